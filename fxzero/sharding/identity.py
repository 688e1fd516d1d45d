"""One identity: whoever holds a parameter holds its shard, and a forward reads it in full.

    model.fc.weight, in a loop         a ShardedParameter: a DTensor of this rank's rows
    self.weight, in a forward          its full value: see `fxzero.sharding.markers`
    dict(self.named_parameters())[…]   a ShardedParameter, which a forward's operators read in full
    a tuple filled before `shard`      the tensor that the shard has replaced: a ReplacedParameter,
                                       which stands for the shard wherever it is used

Python cannot turn one tensor object into a DTensor, whose layout in memory is another. What
`shard` replaces therefore forwards every operation to what has replaced it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxzero._compat import (
    as_it_is,
    break_graph,
    gradient_hooks,
    is_compiling,
    is_view_function,
    makes_parameter,
    never_compile_alone,
    storage_identity,
    take_foreach_of,
    use_count,
    without_torch_function,
)
from fxzero.errors import ShardingError
from fxzero.sharding.local_data import (
    assign,
    attribute_of,
    describes,
    gets_data,
    refuse_elsewhere,
    sets_data,
    sets_gradient,
)
from fxzero.sharding.outside import meets_dtensors, on_shards
from fxzero.sharding.params import KEY
from fxzero.sharding.sharded_value import (
    ShardedValue,
    as_values,
    compute,
    is_arithmetic,
    meets_plain,
    settled,
)
from fxzero.sharding.whereabouts import in_compiler, in_forward
from fxzero.sharding.whole_value import of_rank_0, replaced

_NOW = "_fxzero_now"
"""Attribute of a replaced parameter: the module that owns what has replaced it, and the name."""


_GETTERS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in "grad requires_grad is_leaf is_sparse dtype device shape ndim layout".split()
)
"""What optimizers ask every parameter for, several times a step."""
_ASKS = frozenset({torch.is_complex, torch.Tensor.is_complex, is_view_function()})
"""Answered as they are: a shard is no view, whatever reading it would be (Dynamo 2.11 asks)."""
_SETS_GRADIENT = frozenset(getattr(torch.Tensor, name).__set__ for name in ("grad",))


class ShardedParameter(DTensor):
    """This rank's shard of a parameter; what a forward does with it, it does with the whole."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function on shards, or inside of a forward on full values."""
        if func in _GETTERS:
            result = as_it_is(func, types, args, {})
            if type(result) is not DTensor or KEY not in vars(args[0]) or in_compiler():
                return result
            return as_values(result)
        if func in _ASKS or (func in _SETS_GRADIENT and args[1] is None):
            return as_it_is(func, types, args, kwargs or {})
        if not in_compiler():
            refuse_elsewhere(func, args)
        if is_arithmetic(func, args, kwargs or {}) and not in_compiler() and not in_forward():
            with without_torch_function():
                return compute(func, args, kwargs or {})
        if not any(_laid_out((args, kwargs))):
            try:
                with without_torch_function():
                    return func(*args, **(kwargs or {}))
            except RuntimeError:
                if not in_compiler() or not meets_plain(args, kwargs or {}):
                    raise
                # Dynamo runs a call on fake tensors, which know no key.
                break_graph(
                    "a sharded parameter that was not read as an attribute of its module "
                    "(self._parameters, say) meets a plain tensor",
                    "read it as self.weight, or as self.get_parameter('weight')",
                )
        if func is torch.Tensor.detach and makes_parameter(1) and not in_compiler():
            raise ShardingError(
                f"a new nn.Parameter is made of the shard of {vars(args[0]).get(KEY, '?')}, which "
                "no rank would reduce (weight norm and the like do so). Do it before "
                "fxzero.shard; for a copy of the values, use w.full_tensor()."
            )
        if describes(func) or in_compiler():
            return _kept(func, args, kwargs or {})
        if in_forward():
            return _on_full_values(func, args, kwargs or {})
        return on_shards(func, args, kwargs or {}, in_full)

    def full_tensor(self, **settings: Any) -> torch.Tensor:
        """The whole value, of a parameter that this rank has a part of: a collective."""
        refuse_elsewhere(DTensor.full_tensor, (self,))
        return super().full_tensor(**settings)

    def redistribute(self, *args: Any, **settings: Any) -> DTensor:
        """The same in another layout: a collective."""
        refuse_elsewhere(DTensor.redistribute, (self,))
        return super().redistribute(*args, **settings)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        """The shard that the compiler traces with: of the class that it will meet."""
        shard = DTensor.__tensor_unflatten__(inner, context, size, stride)
        shard.__class__ = ShardedParameter
        return shard

    __deepcopy__ = ShardedValue.__deepcopy__
    __reduce_ex__ = ShardedValue.__reduce_ex__


class ReplacedParameter(nn.Parameter):
    """A parameter of a model before `shard`: it stands for the one that has replaced it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function on what has replaced the parameters."""
        if in_compiler():
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        args, kwargs = replaced((args, kwargs or {}), ReplacedParameter, replacement)
        return func(*args, **kwargs)


@torch.compiler.disable  # where a graph has ended, it runs below compiled code
def _on_full_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run a torch function inside of a forward."""
    # A compiled graph gives a parameter that it has changed its new shard: DTensor to DTensor.
    if meets_dtensors(args, kwargs):
        return on_shards(func, args, kwargs, in_full)
    args, kwargs = replaced((args, kwargs), ShardedParameter, in_full)
    return func(*args, **kwargs)


def _kept(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function that means the parameter as it is kept.

    ``.data`` is the shard without gradient; ``.grad`` a gradient whose norms are of all ranks.
    """
    with without_torch_function():
        if sets_data(func):
            assign(args[0], args[1])
            return None
        if sets_gradient(func, args):
            args = (args[0], of_rank_0(args[1].detach(), args[0]))
        result = func(*args, **kwargs)
    if in_compiler():
        return result
    if func is torch.autograd.grad:
        return settled(result)
    if not isinstance(result, DTensor):
        return result
    if gets_data(func) and KEY in vars(args[0]):
        result.__class__ = ShardedParameter
        setattr(result, KEY, vars(args[0])[KEY])
    elif type(result) is DTensor and getattr(func, "__name__", "") == "__get__":
        result.__class__ = ShardedValue
    return result


def _laid_out(value: Any) -> Iterator[bool]:
    """True for each parameter in nested lists that `shard` has laid out, and no gradient of one."""
    if isinstance(value, ShardedParameter):
        yield KEY in vars(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _laid_out(item)
    elif isinstance(value, dict):
        yield from _laid_out(list(value.values()))


def in_full(parameter: ShardedParameter) -> Tensor:
    """A parameter's full value, with a gradient that becomes a shard. A collective."""
    from fxzero.sharding.markers import read_in_full

    if KEY not in vars(parameter):  # what the compiler made of one
        return parameter
    return read_in_full(cast(nn.Parameter, parameter), vars(parameter)[KEY])


def replacement(old: ReplacedParameter) -> Any:
    """What stands for a replaced parameter: in a forward a full value, else the shard."""
    owner, name = getattr(old, _NOW)
    return getattr(owner, name)


def stand_in(old: nn.Parameter, owner: nn.Module, name: str) -> None:
    """Let the tensor that a parameter was before `shard` stand for what it is now."""
    device = old.device
    old.data = torch.empty(0, dtype=old.dtype, device=device)  # views of it keep its memory
    old.__class__ = ReplacedParameter
    setattr(old, _NOW, (owner, name))


def optimizers_of(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """The optimizers in this process that update one of some parameters."""
    wanted = {id(p) for p in parameters}
    found = (o for o in gc.get_objects() if issubclass(type(o), Optimizer))
    return [
        optimizer for optimizer in found if any(id(p) in wanted for p in _updated_by(optimizer))
    ]


def _updated_by(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in vars(optimizer).get("param_groups", ()):
        yield from group["params"]


def refuse_used_optimizers(
    parameters: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer]
) -> None:
    """An optimizer that has stepped holds state of full parameters, which nobody has sharded.

    Raises:
        ShardingError: there is one.
    """
    names = {id(p): name for name, p in parameters.items()}
    for optimizer in optimizers:
        used = [p for p in _updated_by(optimizer) if id(p) in names and optimizer.state.get(p)]
        if used:
            raise ShardingError(
                f"{type(optimizer).__name__} holds state of {names[id(used[0])]} already: it has "
                "taken a step before fxzero.shard, and its state is that of full parameters. "
                "Shard first; to go on from a checkpoint, load it with "
                "torch.distributed.checkpoint after that."
            )


def refuse_alive(parameters: Mapping[str, nn.Parameter]) -> None:
    """What hangs on a full parameter would go on with its old value, and take its gradients.

    Raises:
        ShardingError: a parameter has a gradient hook, or something computed of it is kept.
    """
    for name, parameter in parameters.items():
        if gradient_hooks(parameter):
            raise ShardingError(
                f"{name} has a gradient hook, which would see no gradient after fxzero.shard. "
                "Register it after shard: it then gets this rank's shard of the gradient."
            )
        if parameter.is_leaf and not parameter.is_meta and use_count(parameter) > 1:
            raise ShardingError(
                f"something computed from {name} is kept, with its gradient: a view such as "
                f"{name}.t() that the model has stored, or a loss from before fxzero.shard. "
                "Compute it in the forward, or drop it before shard."
            )


def refuse_shared_memory(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
) -> None:
    """What has the same memory as a parameter (``a.data = b.data``) would not after sharding.

    Raises:
        ShardingError: there is another parameter, or a buffer, that has.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in (*parameters.items(), *buffers.items()):
        if parameter.numel() and not parameter.is_meta:
            kept = by_storage.setdefault(storage_identity(parameter), [])
            for other_name, other in kept:
                if _overlap(parameter, other) and other_name in parameters:
                    raise ShardingError(
                        f"{other_name} and {name} are two tensors in the same memory: what is "
                        "written to one is written to both, which shards cannot do. Tie them as "
                        "one parameter (a.weight = b.weight), or give each memory of its own."
                    )
            kept.append((name, parameter))


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    (start, end), (other_start, other_end) = _extent(first), _extent(second)
    if end <= other_start or other_end <= start:
        return False
    taken = torch.zeros(max(end, other_end), dtype=torch.bool)
    taken.as_strided(first.shape, first.stride(), start).fill_(True)
    return bool(taken.as_strided(second.shape, second.stride(), other_start).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's elements begin and end in its storage."""
    start = tensor.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(start), int(start + 1 + sum((size - 1) * stride for size, stride in steps))


def as_now(optimizer: Optimizer) -> None:
    """Give an optimizer, made from a list that is older than `shard`, the parameters of today."""
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            if isinstance(old, ReplacedParameter):
                owner, name = getattr(old, _NOW)
                new = group["params"][index] = owner._parameters[name]
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def hand_over(replaced_by: Mapping[int, nn.Parameter], optimizers: Iterable[Optimizer]) -> None:
    """Give optimizers that were made before `shard` the parameters that replaced theirs.

    Args:
        replaced_by: new parameters by the identity of the old ones.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replaced_by.get(id(p), p) for p in group["params"]]


take_foreach_of(ShardedParameter, ShardedValue)
for _function in (
    vars(ShardedParameter)["__torch_function__"].__func__,
    *(_laid_out, describes, _kept, sets_data, gets_data, attribute_of),
    *(in_compiler, is_compiling, in_forward),
):
    never_compile_alone(_function)  # nor is there anything in them to compile
