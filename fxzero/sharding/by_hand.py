"""Collectives that somebody calls by hand on what came of sharded values.

dist.all_reduce(w.norm())     every rank has the number: what torch does with each rank's own
dist.all_reduce(w.grad)       ranks have other rows: adding them up would be no gradient; refused
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from fxzero._compat import local_tensor
from fxzero.errors import ShardingError
from fxzero.sharding.whole_value import is_sharded, name_of, replaced, tensors_in

_MODULE = "torch.distributed.distributed_c10d"


def is_collective(func: Callable[..., Any]) -> bool:
    """Whether a torch function is one of torch.distributed's own."""
    return getattr(func, "__module__", None) == _MODULE


def communicate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective on what each rank has, in place as torch does.

    Raises:
        ShardingError: ranks have parts of it.
    """
    for value in tensors_in((args, kwargs)):
        if isinstance(value, DTensor) and is_sharded(value):
            raise ShardingError(
                f"torch.distributed.{name_of(func)} was given a tensor of shape "
                f"{tuple(value.shape)}, of which each rank has some rows, and would mix rows of "
                "one rank with others of another. Gradients are reduced already when backward "
                "ends. Call value.full_tensor() for the whole of it, on all ranks, or "
                "value.to_local() for this rank's rows."
            )
    return func(*replaced(args, DTensor, local_tensor), **replaced(kwargs, DTensor, local_tensor))
