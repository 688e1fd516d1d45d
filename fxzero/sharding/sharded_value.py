"""A value that ranks hold in parts: of all ranks when somebody reads it.

float(w.norm())       pending on other ranks: DTensor gives this rank's own part, without a word
w.exp() * x           what meets a plain tensor is gathered
w.data[3].zero_()     a write to a part of it: see `fxzero.sharding.whole_value`
"""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fxzero._compat import (
    as_it_is,
    layout_of,
    local_tensor,
    squeeze,
    unscale_function,
    without_torch_function,
)
from fxzero.ranks.lost import explaining
from fxzero.sharding.by_hand import communicate, is_collective
from fxzero.sharding.local_data import assign, describes, refuse_elsewhere, sets_data
from fxzero.sharding.shard_state import refuse_bytes
from fxzero.sharding.whereabouts import in_compiler
from fxzero.sharding.whole_value import (
    COPIES,
    VIEW,
    draw,
    draws_numbers,
    gathered,
    has_views,
    is_sharded,
    may_return_views,
    name_of,
    note_views,
    of_rank_0,
    refresh_all,
    refuse_other_shapes,
    replaced,
    tensors_in,
    wants_whole,
    write,
    write_through,
    writes,
    written,
)

log = logging.getLogger("fxzero")


_GETTERS = frozenset(
    getattr(Tensor, name).__get__ for name in "is_sparse dtype device layout requires_grad".split()
)
"""What optimizers ask every gradient for."""


class ShardedValue(DTensor):
    """A gradient, or what was computed from parameters or gradients: of all ranks when read.

    GradScaler asks the layout of the first gradient of its list whether an infinity is to be
    looked for on all ranks, so one that every rank has goes last.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, and add up over the ranks what it leaves pending."""
        if func in _GETTERS:
            return as_it_is(func, types, args, {})
        with without_torch_function():
            if in_compiler():
                return func(*args, **(kwargs or {}))
            refuse_elsewhere(func, args)
            refuse_bytes(func, args[0] if args else None)
            if func is unscale_function():
                return func(sorted(args[0], key=_is_replicated), *args[1:])
            if sets_data(func):
                assign(args[0], args[1])
                return None
            return on_values(func, args, kwargs or {})

    def full_tensor(self, **settings: Any) -> Tensor:
        """The whole value, of a tensor that this rank has a part of: a collective."""
        refuse_elsewhere(DTensor.full_tensor, (self,))
        return super().full_tensor(**settings)

    def redistribute(self, *args: Any, **settings: Any) -> DTensor:
        """The same in another layout: a collective."""
        refuse_elsewhere(DTensor.redistribute, (self,))
        return super().redistribute(*args, **settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy this rank's part."""
        with without_torch_function():
            copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__class__ = ShardedValue
        memo[id(self)] = copied
        return copied

    def __format__(self, spec: str) -> str:
        """Write a number as a number: ``f"{w.norm():.3f}"``."""
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain DTensor, with its place: see `fxzero.sharding.shard_state`."""
        with without_torch_function():
            return copyreg.dispatch_table[DTensor](self.detach())


def read_of_all_ranks(state: dict[str, Any]) -> None:
    """Let tensors that were made inside of the compiler be of all ranks when read."""
    for value in state.values():
        if type(value) is DTensor:
            value.__class__ = ShardedValue


def as_dtensors(compiled: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """A graph that takes sharded values as DTensors, which is what they were traced as.

    A gradient is a DTensor until somebody reads it.

    Args:
        positions: of the inputs that are DTensors.
    """
    if not positions:
        return compiled

    def call(*inputs: Any) -> Any:
        values = [v for p in positions if type(v := inputs[p]) is ShardedValue]
        for value in values:
            value.__class__ = DTensor  # type: ignore[assignment]
        try:
            return compiled(*inputs)
        finally:
            for value in values:
                value.__class__ = ShardedValue

    return call


_LEAVE_TORCH = frozenset({"numpy", "tolist", "__array__"})
"""Methods that turn a tensor into something that cannot be sharded."""

_ROW_BY_ROW = frozenset(
    (
        "add sub rsub mul div true_divide neg abs sign square sqrt rsqrt reciprocal pow exp log "
        "sigmoid tanh clamp clip clamp_min clamp_max lerp addcmul addcdiv where copysign "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ "
        "__neg__ __abs__ __pow__ __rpow__ "
        "detach clone zeros_like ones_like empty_like full_like to type float double half bfloat16 "
        "cpu cuda sum"
    ).split()
)
"""Functions for which a rank without rows has nothing to do: others would raise there, alone."""


@explaining
def on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on sharded values; on whole ones where DTensor cannot, a collective.

    What DTensor can do depends on layouts, which are equal on all ranks. Torch functions of
    subclasses are not asked: the caller has switched them off.
    """
    if is_arithmetic(func, args, kwargs):
        return compute(func, args, kwargs)
    if _is_mixed_list(func, args):
        return _apart(func, args, kwargs)
    refresh_all((args, kwargs))
    if is_collective(func):
        return communicate(func, *_settled_arguments((args, kwargs)))
    targets = written(func, args, kwargs)
    if targets:
        return _on_targets(targets, func, args, kwargs)
    if describes(func):
        return settled(func(*args, **kwargs))
    if writes(func):  # to a plain tensor
        return func(*replaced(args, DTensor, gathered), **replaced(kwargs, DTensor, gathered))
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
    if recorded and name_of(func) not in COPIES:
        # A gradient of gradients, say: what comes of it will meet plain tensors, in a loss.
        return func(*replaced(args, DTensor, in_whole), **replaced(kwargs, DTensor, in_whole))
    if draws_numbers(func):
        return settled(draw(func, args, kwargs))
    if name_of(func) in _LEAVE_TORCH:
        return func(gathered(args[0]), *args[1:], **kwargs)
    if may_return_views(func):
        return _looked_at(func, args, kwargs)
    args, kwargs = _settled_arguments((args, kwargs))
    name = name_of(func)
    if name in ("_foreach_norm", "_foreach_max"):
        args = replaced(args, DTensor, _with_rows)
    row_by_row = (
        name in _ROW_BY_ROW or name.startswith("_foreach_") or not _lacks_rows(args, kwargs)
    )
    on_whole = wants_whole(func) or meets_plain(args, kwargs)
    if row_by_row and not on_whole:
        try:
            return settled(_call(func, args, kwargs))
        except RuntimeError as error:
            if not _are_sharded(args, kwargs):
                raise
            log.debug("gathering what %s takes: %s", func, error)
    args, kwargs = replaced((args, kwargs), DTensor, gathered)
    return func(*args, **kwargs)


_ARITHMETIC = frozenset(
    (
        "add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_ add sub mul div sqrt lerp addcmul addcdiv "
        "_foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_lerp_ _foreach_addcmul_ "
        "_foreach_addcdiv_ _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_sqrt "
        "_foreach_sqrt_ _foreach_addcmul _foreach_addcdiv _fused_adam_ _fused_adamw_ _fused_sgd_"
    ).split()
)
"""What torch's optimizers compute with: each element of a result from the same elements."""


def is_arithmetic(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an optimizer's function is given shards that lie alike, and nothing else to heed.

    DTensor then does on each rank what is right. Of a thousand parameters an update in eager mode
    makes some ten thousand such calls.
    """
    if name_of(func) not in _ARITHMETIC or torch.is_grad_enabled():
        return False
    placements: list[list[tuple[Any, ...]]] = []
    for value in (*args, *kwargs.values()):
        several = value if type(value) in (list, tuple) else (value,)
        sharded = [item for item in several if isinstance(item, DTensor)]
        if len(sharded) < len(several):
            if not placements:
                return False  # a plain number is changed, or what is not sharded
            plain = (i for i in several if isinstance(i, Tensor) and not isinstance(i, DTensor))
            if any(tensor.dim() for tensor in plain):
                return False
        if sharded:
            if any(VIEW in vars(item) for item in sharded):
                return False
            placements.append([layout_of(item).placements for item in sharded])
    return (
        bool(placements)
        and all(lies == placements[0] for lies in placements)
        and not any(p.is_partial() for lie in set(placements[0]) for p in lie)
    )


_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_"})


def compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that `is_arithmetic`.

    An optimizer's fused kernel takes lists of a thousand tensors, all of which DTensor would ask
    for their layouts again; it writes to them and returns nothing, so that it can be given the
    local tensors. Autograd is told, as it is of writes to lists of DTensors.
    """
    name = name_of(func)
    if name not in _FUSED:
        result = as_values(func(*args, **kwargs))
        if name.startswith("_foreach_") and name.endswith("_"):
            torch.autograd.graph.increment_version(args[0])
        return result
    changed: list[Tensor] = []
    result = func(
        *(_local(value, changed) for value in args),
        **{name: _local(value, changed) for name, value in kwargs.items()},
    )
    torch.autograd.graph.increment_version(changed)
    return result


def _local(value: Any, met: list[Tensor]) -> Any:
    """A value, or a list of them, with local tensors for sharded ones: those are added to `met`."""
    if type(value) in (list, tuple):
        met.extend(item for item in value if isinstance(item, DTensor))
        return [local_tensor(item) if isinstance(item, DTensor) else item for item in value]
    if isinstance(value, DTensor):
        met.append(value)
        return local_tensor(value)
    return value


def as_values(result: Any) -> Any:
    """Let what came of sharded values be of all ranks when read."""
    for item in result if type(result) in (list, tuple) else (result,):
        if type(item) is DTensor:
            item.__class__ = ShardedValue
    return result


_ROUNDED = (torch.bfloat16, torch.float16)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function; what ranks add up in 16 bits is rounded once, as in one process."""
    result = func(*args, **kwargs)
    if is_pending(result) and result.dtype in _ROUNDED and kwargs.get("dtype") is None:
        exact = func(*replaced(args, DTensor, _in_32_bits), **kwargs)
        return settled(exact).to(result.dtype)
    return result


def _in_32_bits(value: DTensor) -> Tensor:
    return value.float() if value.dtype in _ROUNDED else value


class _Whole(torch.autograd.Function):
    """A sharded value as a plain tensor.

    Each rank computes something of its own with it, of which the mean over the ranks counts.
    """

    @staticmethod
    def forward(ctx: Any, value: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = value.device_mesh, value.placements
        return gathered(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        pending = [Partial() for _ in range(ctx.mesh.ndim)]
        total = DTensor.from_local(grad.contiguous(), ctx.mesh, pending, run_check=False)
        result: Tensor = total.redistribute(placements=ctx.placements) / ctx.mesh.size()
        return result


def in_whole(value: DTensor) -> Tensor:
    """A value as a plain tensor, in autograd's sight."""
    return _Whole.apply(value) if value.requires_grad else gathered(value)


def _with_rows(value: DTensor) -> Tensor:
    """A value of which every rank has something."""
    return _on_every_rank(gathered(value), value) if _lacks_rows((value,), {}) else value


def _is_mixed_list(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether one of torch's functions over lists is given shards and plain tensors."""
    if not name_of(func).startswith(("_foreach_", "_fused_")) or not args:
        return False
    kinds = {isinstance(t, DTensor) for t in tensors_in(args[0])}
    return len(kinds) == 2


def _apart(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function over lists once for the shards and once for the plain tensors of its lists.

    Parameters that `shard` was told to ignore are plain, and share an optimizer with the others.
    """
    count = len(args[0])
    results: list[Any] = [None] * count
    returns = False
    for kind in (True, False):
        indices = [i for i, t in enumerate(args[0]) if isinstance(t, DTensor) is kind]

        def taken(value: Any, indices: list[int] = indices) -> Any:
            per_tensor = isinstance(value, (list, tuple)) and len(value) == count
            return [value[i] for i in indices] if per_tensor else value

        chosen = {key: taken(value) for key, value in kwargs.items()}
        found = on_values(func, tuple(taken(value) for value in args), chosen)
        if found is not None:
            returns = True
            for i, item in zip(indices, found, strict=True):
                results[i] = item
    return results if returns else None


def _on_targets(
    targets: Sequence[DTensor],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function that changes sharded values, which stay what they are."""
    refuse_other_shapes(func)
    if has_views(targets):
        return write_through(func, args, kwargs)
    if name_of(func) in _EACH_BY_EACH:
        args, kwargs = replaced((args, kwargs), Tensor, lambda t: _alike(t, targets[0]))
    on_whole = draws_numbers(func) or wants_whole(func) or name_of(func) == "__setitem__"
    if on_whole or "out" in kwargs or meets_plain(args, kwargs):
        return write(targets, func, args, kwargs)
    args, kwargs = _settled_arguments((args, kwargs))
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "leaf Variable" in str(error) or _may_fail_alone(error, args, kwargs):
            raise
        log.debug("gathering what %s changes: %s", func, error)
    return write(targets, func, args, kwargs)


_EACH_BY_EACH = frozenset("copy_ add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_".split())
"""In-place functions in which an element meets that of the same place, if shapes are equal."""


def _alike(value: Tensor, target: DTensor) -> Tensor:
    """A plain tensor of a target's shape, laid out like it."""
    if isinstance(value, DTensor) or value.shape != target.shape or value.dim() == 0:
        return value
    return of_rank_0(value.detach(), target)


def _may_fail_alone(error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether only the ranks without rows may have seen an error: it is not about layouts."""
    about_layouts = isinstance(error, NotImplementedError) or any(
        words in str(error) for words in _ABOUT_LAYOUTS
    )
    return _lacks_rows(args, kwargs) and not about_layouts


_ABOUT_LAYOUTS = (
    "requires redistribution",
    "require placement changes",
    "sharding strategy",
    "not supported with DTensor",
)
"""Words in DTensor's errors that all ranks get."""


def _looked_at(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that returns views, or copies that stand for them."""
    look = squeeze if name_of(func) == "squeeze" else func
    try:
        result = look(*args, **kwargs)
    except RuntimeError as error:
        if not _are_sharded(args, kwargs):
            raise
        log.debug("gathering what %s looks at: %s", func, error)
        whole = func(*replaced(args, DTensor, gathered), **replaced(kwargs, DTensor, gathered))
        like = next(t for t in tensors_in((args, kwargs)) if isinstance(t, DTensor))
        result = replaced(whole, Tensor, lambda value: _on_every_rank(value, like))
    result = settled(list(result) if not isinstance(result, (Tensor, tuple)) else result)
    note_views(result, func, args, kwargs)
    return iter(result) if name_of(func) == "__iter__" else result


def _on_every_rank(value: Tensor, like: DTensor) -> Tensor:
    """A whole value as a DTensor of the same mesh."""
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def meets_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a plain tensor with dims is among the arguments."""
    return any(
        not isinstance(value, DTensor) and value.dim() > 0 for value in tensors_in((args, kwargs))
    )


def _are_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(t, DTensor) for t in tensors_in((args, kwargs)))


def _lacks_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether some rank has nothing of a sharded value. All ranks answer alike."""
    return any(
        -(-value.shape[p.dim] // size) * (size - 1) >= value.shape[p.dim]
        for value in tensors_in((args, kwargs))
        if isinstance(value, DTensor)
        for p, size in zip(value.placements, value.device_mesh.shape, strict=True)
        if isinstance(p, Shard) and size > 1
    )


def _is_replicated(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and not is_sharded(gradient)


def is_pending(value: Any) -> bool:
    """Whether ranks have yet to add up what they hold."""
    return isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)


def _settled_arguments(value: Any) -> Any:
    """Add up what plain DTensors leave pending, wherever they come from."""
    if not any(is_pending(t) for t in tensors_in(value)):
        return value
    return replaced(value, DTensor, lambda t: settled(t) if is_pending(t) else t)


def settled(result: Any) -> Any:
    """A result whose value is that of all ranks: what is pending is added up. A collective."""
    if isinstance(result, (list, tuple)):
        items = _settled_together(result)
        return items if type(result) is list else type(result)(items)
    if not isinstance(result, DTensor):
        return result
    if is_pending(result):
        result = result.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in result.placements]
        )
    if type(result) is DTensor:
        result.__class__ = ShardedValue
    return result


def _settled_together(items: Sequence[Any]) -> list[Any]:
    """What is pending in a list, such as all gradients' norms, in as few collectives as can be."""
    found = list(items)
    alike: dict[Any, list[int]] = {}
    for index, item in enumerate(found):
        if is_pending(item) and item.dim() == 0:
            kind = (item.device_mesh, tuple(item.placements), item.dtype)
            alike.setdefault(kind, []).append(index)
    for (mesh, placements, _), indices in alike.items():
        if len(indices) < 2:
            continue
        locals_ = torch.stack([local_tensor(found[i]) for i in indices])
        together = DTensor.from_local(locals_, mesh, placements, run_check=False)
        for i, item in zip(indices, settled(together).unbind(), strict=True):
            found[i] = item
    return [settled(item) for item in found]
