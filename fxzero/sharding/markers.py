"""What `fxzero.shard` leaves in a model: a forward that reads a parameter gets the full one.

    before                 linear.weight    the full parameter
    after, in a forward    linear.weight    fxzero::unshard(shard, "0/linear.weight", …)
    after, elsewhere       linear.weight    the shard, `linear._parameters["weight"]`

The reading property lives in a subclass made for the module, so names, `isinstance` and
hooks stay as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxzero._compat import differentiable_local, never_compile_alone, pytree
from fxzero._compat.equal_layers import trace_equal_layers_once
from fxzero.errors import ShardingError
from fxzero.sharding.buffers import forward_then_sync
from fxzero.sharding.full_parameter import full_parameter
from fxzero.sharding.params import KEY, MODES, ModelState, spec_of
from fxzero.sharding.whereabouts import in_compiler, in_forward

KEYS = "_fxzero_keys"
"""Attribute of a marked module: its parameters' keys, by name."""
STATE = "_fxzero_state"
"""Attribute of a marked module: what all parameters of its model share."""
MODE = "_fxzero_mode"
"""Attribute of a marked module: its model's in `MODES`."""

_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def mark(module: nn.Module, keys: dict[str, str], state: ModelState) -> None:
    """Give the module a class in which reading a parameter unshards it."""
    if not keys:
        return
    module.__dict__[KEYS] = keys
    module.__dict__[STATE] = state
    module.__dict__[MODE] = state.mode
    base = type(module)
    identity = (base, tuple(keys))
    if identity not in _classes:
        members: dict[str, Any] = {name: _reader(name) for name in keys}
        members["__deepcopy__"] = members["__reduce_ex__"] = _refuse_copy
        members["_apply"] = _apply(base)
        members["__setattr__"] = _setattr(base)
        if isinstance(module, nn.RNNBase):
            members["_flat_weights"] = _flat_weights()
            members["_update_flat_weights"] = _keep_flat_weights
        _classes[identity] = _subclass(base, members)
    module.__class__ = _classes[identity]
    trace_equal_layers_once(_has_markers, KEYS, lambda key: spec_of(key).kind)


def _has_markers(module: nn.Module) -> bool:
    return any(KEYS in vars(part) for part in module.modules())


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the model's forward cast its floating-point inputs.

    In a class of its own rather than a hook: Dynamo compiles a hook of the outermost
    module as a graph of its own.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    def around(forward: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        return forward(*args, **kwargs)

    model.__class__ = _subclass(type(model), _around_forward(model, around))


def compute_in_fp32(module: nn.Module, result: torch.dtype) -> None:
    """Let one module of a low-precision model compute in fp32; `result` is what it returns."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    def around(forward: Any, args: Any, kwargs: Any) -> Any:
        tree_map = pytree.tree_map
        args, kwargs = tree_map(lambda v: cast(v, torch.float32), (args, kwargs))
        return tree_map(lambda v: cast(v, result), forward(*args, **kwargs))

    module.__class__ = _subclass(type(module), _around_forward(module, around))


def _around_forward(module: nn.Module, around: Callable[[Any, Any, Any], Any]) -> dict[str, Any]:
    """Members of a class for a module, in which `around` calls the forward.

    Args:
        around: is given the forward, its arguments and its keyword arguments.
    """
    own = vars(module).get("forward")
    if own is not None:  # set on the module itself, where it goes before that of any class

        @functools.wraps(own)
        def forward_of_module(*args: Any, **kwargs: Any) -> Any:
            return around(own, args, kwargs)

        vars(module)["forward"] = forward_of_module
        return {}
    base = type(module)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(base.forward, self), args, kwargs)

    return {"forward": forward}


def _unshard(parameter: nn.Parameter, key: str, sync: str) -> Tensor:
    local = differentiable_local(parameter) if isinstance(parameter, DTensor) else parameter
    return torch.ops.fxzero.unshard(local, key, sync)


@torch.compiler.disable  # for modules that Dynamo leaves to Python (nn.LSTM): it would compile this
def _unshard_eagerly(parameter: nn.Parameter, key: str, sync: str) -> Tensor:
    return full_parameter(_unshard(parameter, key, sync), spec_of(key).name)


def read_in_full(parameter: nn.Parameter, key: str) -> Tensor:
    """The full value of a parameter that a forward has reached around its module's property."""
    return _unshard_eagerly(parameter, key, spec_of(key).state.sync)


def _reader(name: str) -> property:
    """A property that reads a parameter: in a forward as its full self."""

    def read(self: Any) -> Any:  # a marked module
        parameter = self._parameters.get(name, _ABSENT)
        # Dynamo traces this for every parameter: no call that is not needed. KEYS and MODE.
        if torch.compiler.is_dynamo_compiling():
            if isinstance(parameter, nn.Parameter):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                return torch.ops.fxzero.unshard(
                    local, self._fxzero_keys[name], getattr(MODES, self._fxzero_mode)
                )
            if parameter is not _ABSENT:  # None, or what functional_call was given
                return parameter
        if parameter is _ABSENT:
            raise _absent(self, name)
        key = getattr(parameter, KEY, None)
        if key is None or in_compiler() or not in_forward():
            return parameter
        return _unshard_eagerly(parameter, key, getattr(self, STATE).sync)

    never_compile_alone(read)
    return property(read)


_ABSENT: Any = object()


def _absent(module: nn.Module, name: str) -> ShardingError:
    return ShardingError(
        f"{type(module).__name__}.{name} is no parameter of its module any more: something took it "
        "away after fxzero.shard. Prune, parametrize and normalise weights before shard."
    )


def read_by_name(model: nn.Module, state: ModelState) -> None:
    """Let a forward that walks through its model's parameters under the compiler read them in full.

    Eager code needs no help: operators read a `ShardedParameter` in full by themselves.
    """
    base = type(model)

    def named_parameters(
        self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        found = base.named_parameters(self, prefix, recurse, remove_duplicate)
        if not torch.compiler.is_dynamo_compiling():
            return found
        cut = len(prefix) + 1 if prefix else 0
        return iter([(name, _attribute(self, name[cut:])) for name, _ in found])

    def get_parameter(self: nn.Module, target: str) -> Any:
        if in_compiler() or not in_forward():
            return base.get_parameter(self, target)
        return _attribute(self, target)

    members: dict[str, Any] = {
        "named_parameters": named_parameters,
        "get_parameter": get_parameter,
        "__deepcopy__": _refuse_copy,
        "__reduce_ex__": _refuse_copy,
    }
    if state.zero > 0 or state.pipeline is not None:
        members["_ddp_params_and_buffers_to_ignore"] = property(_refuse_ddp)
    if state.buffers is not None:
        members |= _around_forward(
            model, lambda forward, args, kwargs: forward_then_sync(forward, args, kwargs, state)
        )
    model.__class__ = _subclass(base, members)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _setattr(base: type[nn.Module]) -> Any:
    """Assigning a parameter after `shard`: one of the model's ties it, another is refused."""

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        keys: dict[str, str] = vars(self)[KEYS]
        if name == "parametrizations":
            raise ShardingError(
                f"{type(self).__name__} is parametrized after fxzero.shard (weight_norm and the "
                "like do so), which would take its sharded parameters away. Do it before shard."
            )
        if name in keys and isinstance(value, Tensor):
            key = getattr(value, KEY, None)
            if key is None or not isinstance(value, nn.Parameter):
                raise ShardingError(
                    f"{type(self).__name__}.{name} is assigned a new tensor after fxzero.shard, "
                    "which no rank has sharded (load_state_dict(assign=True) and prune do so, "
                    "too). Assign it before shard, or change the values of "
                    "the one that is there: module.weight.copy_(…) under torch.no_grad()."
                )
            vars(self)[KEYS] = {**keys, name: key}
        base.__setattr__(self, name, value)

    return set_attribute


def _apply(base: type[nn.Module]) -> Any:
    """What `Module.to` and its kin do: a shard stays on its mesh's device, in its dtype."""

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        ours = {
            name: parameter
            for name, parameter in self._parameters.items()
            if parameter is not None and getattr(parameter, KEY, None) is not None
        }
        for name, parameter in ours.items():
            _apply_to(parameter, fn, f"{type(self).__name__}.{name}")
        others = {n: p for n, p in self._parameters.items() if n not in ours}
        everything, self.__dict__["_parameters"] = self._parameters, others
        try:
            base._apply(self, fn, recurse=False)
        finally:
            everything.update(others)
            self.__dict__["_parameters"] = everything
        return self

    return apply


def _apply_to(parameter: nn.Parameter, fn: Any, name: str) -> None:
    """Give a parameter the values that a function makes of it.

    Raises:
        ShardingError: it would get another dtype, or go to another device.
    """
    with torch.no_grad():
        for tensor in (parameter, parameter.grad):
            if tensor is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            applied = fn(local)
            if (applied.dtype, applied.device) != (local.dtype, local.device):
                spec = spec_of(getattr(parameter, KEY))
                stays = (
                    " Its shards stay in the host's memory (offload=True), and it computes on "
                    f"{spec.device}: leave the model where it is."
                    if spec.device is not None
                    else ""
                )
                raise ShardingError(
                    f"{name} is {local.dtype} on {local.device}, and after fxzero.shard it cannot "
                    f"become {applied.dtype} on {applied.device}. Call .to() before shard, or pass "
                    f"shard(param_dtype=…) to compute in another dtype.{stays}"
                )
            if applied is not local:
                local.copy_(applied)


def _refuse_copy(self: nn.Module, *_: Any) -> Any:
    """A copy would share the original's keys, and with them its kept gradients."""
    raise ShardingError(
        f"a sharded {type(self).__name__} cannot be copied or pickled. Copy the model before "
        "fxzero.shard, or save its state_dict(). For an average of its weights, make "
        "AveragedModel(model) before shard, and shard its .module alike."
    )


def _refuse_ddp(self: nn.Module) -> Any:
    """DistributedDataParallel asks for it first of all: it would broadcast rank 0's rows."""
    raise ShardingError(
        f"a sharded {type(self).__name__} was given to DistributedDataParallel, which would take "
        "each rank's rows for replicas. fxzero.shard reduces the gradients already: drop the "
        "wrapper; to replicate sharded models, pass shard() a mesh of two axes. Under accelerate, "
        "whose prepare() wraps, use fxzero.integrations.accelerate.FxZeroAccelerator."
    )


def _flat_weights() -> property:
    """`nn.LSTM` and its kin keep their weights in a list as well: derive it from the readers."""

    def read(self: nn.RNNBase) -> list[Any]:
        return [getattr(self, name, None) for name in self._flat_weights_names]

    def write(self: nn.RNNBase, value: list[Any]) -> None:
        """Torch refreshes the list when a parameter is replaced; there is nothing to refresh."""

    return property(read, write)


def _keep_flat_weights(self: nn.RNNBase) -> None:
    """Torch makes the list anew where weights are other tensors than before: it is always new."""


def _subclass(base: type, members: dict[str, Any]) -> type:
    """A class that differs from its base in some members and in nothing that shows."""
    names = {n: getattr(base, n) for n in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**names, **members})
