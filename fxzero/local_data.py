"""What DTensor leaves open: results that are pending on other ranks, and ``.data``.

float(w.norm())       pending: DTensor gives this rank's own part, without a word (torch 2.13)
w.exp() * x           what meets a plain tensor is gathered
w.data = average      takes the memory of the average, as with any tensor
"""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fxzero._compat import (
    local_tensor,
    set_local_tensor,
    unscale_function,
    without_torch_function,
)
from fxzero.errors import ShardingError
from fxzero.whereabouts import in_compiler

log = logging.getLogger("fxzero")


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
        with without_torch_function():
            if in_compiler():
                return func(*args, **(kwargs or {}))
            if func is unscale_function():
                args = (sorted(args[0], key=_is_replicated), *args[1:])
            if sets_data(func):
                assign(args[0], args[1])
                return None
            if getattr(func, "__name__", "") in LEAVE_TORCH:
                return leave_torch(func, args, kwargs or {})
            result = on_values(func, args, kwargs or {})
            # What was changed in place stays of its class: an optimizer's moments, say.
            return result if any(result is a for a in args) else settled(result)

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
        """Pickled as a plain DTensor, with its place: see `fxzero.shard_state`."""
        with without_torch_function():
            return copyreg.dispatch_table[DTensor](self.detach())


def meets_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a plain tensor with dims is among the arguments."""
    return any(
        not isinstance(value, DTensor) and value.dim() > 0 for value in tensors_in((args, kwargs))
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on sharded values; on full ones where DTensor cannot, a collective.

    What DTensor can do depends on layouts, which are equal on all ranks.
    """
    if _writes_shards(func, args, kwargs):
        return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if not meets_plain(args, kwargs) and not (name in _OF_SOME and _lacks_rows(args, kwargs)):
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            # A rank without rows may fail alone, and what looks at a copy would be written in vain.
            if name in _VIEWS or not _are_sharded(args, kwargs) or _lacks_rows(args, kwargs):
                raise
            log.debug("gathering what %s takes: %s", func, error)
    args, kwargs = _in_full((args, kwargs))
    return func(*args, **kwargs)


_VIEWS = frozenset("unbind __iter__ view reshape flatten chunk split t transpose permute".split())


def _are_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(t, DTensor) for t in tensors_in((args, kwargs)))


_OF_SOME = frozenset(
    (
        "max min amax amin aminmax argmax argmin norm linalg_vector_norm vector_norm median "
        "nanmedian quantile nanquantile mode kthvalue logsumexp topk maximum minimum _foreach_norm"
    ).split()
)
"""Reductions that nothing has a value of: a rank without rows would raise, and alone."""


def _lacks_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether some rank has nothing of a sharded value. All ranks answer alike."""
    return any(
        -(-value.shape[p.dim] // size) * (size - 1) >= value.shape[p.dim]
        for value in tensors_in((args, kwargs))
        if isinstance(value, DTensor)
        for p, size in zip(value.placements, value.device_mesh.shape, strict=True)
        if isinstance(p, Shard) and size > 1
    )


def _writes_shards(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function changes sharded values, which must stay what they are."""
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "__set__") or (name.endswith("_") and name[-2:] != "__")
    written = args[:1] if in_place or name.startswith("__i") else kwargs.get("out")
    return any(isinstance(t, DTensor) for t in tensors_in(written))


def _in_full(value: Any) -> Any:
    """Gather the sharded values in nested lists, tuples and dicts. A collective."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if type(value) in (list, tuple):
        return type(value)(_in_full(item) for item in value)
    if type(value) is dict:
        return {key: _in_full(item) for key, item in value.items()}
    return value


def _is_replicated(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and all(p.is_replicate() for p in gradient.placements)


def settled(result: Any) -> Any:
    """A result whose value is that of all ranks: what is pending is added up. A collective.

    Lists are left alone: torch's own functions over all gradients add up once, at their end.
    Values with indices (``max(dim=0)``) and means with deviations are not such lists.
    """
    if isinstance(result, tuple) and (len(result) == 2 or type(result) is not tuple):
        return type(result)([settled(item) for item in result])
    if isinstance(result, (list, tuple)):
        for item in result:  # parts of a shard: what is computed from them is of all ranks
            if type(item) is DTensor and not any(p.is_partial() for p in item.placements):
                item.__class__ = ShardedValue
        return result
    if not isinstance(result, DTensor):
        return result
    if any(p.is_partial() for p in result.placements):
        result = result.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in result.placements]
        )
    if type(result) is DTensor:
        result.__class__ = ShardedValue
    return result


LEAVE_TORCH = frozenset({"numpy", "tolist", "__array__"})
"""Methods that turn a tensor into something that cannot be sharded."""


def leave_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn the full value into numbers of Python's or NumPy's. A collective."""
    value, *rest = args
    with without_torch_function():
        return func(value.full_tensor(), *rest, **kwargs)


def gets_data(func: Callable[..., Any]) -> bool:
    """Whether a torch function reads ``tensor.data``."""
    return attribute_of(func) == "data" and getattr(func, "__name__", "") == "__get__"


def sets_data(func: Callable[..., Any]) -> bool:
    """Whether a torch function assigns ``tensor.data``."""
    return attribute_of(func) == "data" and getattr(func, "__name__", "") == "__set__"


def attribute_of(func: Callable[..., Any]) -> str:
    """The attribute that a torch function reads or assigns; "" of any other function."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def assign(tensor: DTensor, value: Tensor) -> None:
    """``tensor.data = value``: the tensor takes the value's memory, as torch means it.

    Args:
        value: laid out like the tensor, or the full value, of which each rank takes its rows.

    Raises:
        ShardingError: another shape, dtype or layout.
    """
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ShardingError(
            f".data of a sharded tensor of {tuple(tensor.shape)}, {tensor.dtype} was assigned one "
            f"of {tuple(value.shape)}, {value.dtype}. Assign a tensor of the same shape and dtype."
        )
    if not isinstance(value, DTensor):
        value = distribute_tensor(
            value.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    if value.placements != tensor.placements:
        value = value.redistribute(placements=tensor.placements)
    with torch.no_grad():
        set_local_tensor(tensor, local_tensor(value).detach())
