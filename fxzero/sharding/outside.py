"""What torch functions do to sharded parameters outside of a forward.

w.clamp_(0, 1), w.mul_(0.9), optimizers    on the shard, by DTensor
nn.init.normal_(w), w.copy_(full)          on the whole value: see `fxzero.sharding.whole_value`
w @ x with a plain x, penalties in a loss  the full value, gathered
float(w.norm())                            of all ranks: see `fxzero.sharding.sharded_value`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxzero._compat import without_torch_function
from fxzero.sharding.params import KEY
from fxzero.sharding.sharded_value import in_whole, on_values
from fxzero.sharding.whole_value import (
    COPIES,
    draws_numbers,
    name_of,
    replaced,
    tensors_in,
    written,
)


def on_shards(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_full: Callable[[Any], Tensor],
) -> Any:
    """Run a torch function whose arguments hold shards.

    Args:
        in_full: gathers a shard, in autograd's sight.
    """
    makes = draws_numbers(func) or name_of(func) in COPIES or written(func, args, kwargs)
    if not makes and _is_recorded(args, kwargs):
        args, kwargs = replaced(
            (args, kwargs), DTensor, lambda t: in_full(t) if _is_shard(t) else in_whole(t)
        )
        return func(*args, **kwargs)
    with without_torch_function():
        return on_values(func, args, kwargs)


def _is_recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd records a call: what comes of it will meet plain tensors, in a loss."""
    return torch.is_grad_enabled() and any(
        _is_shard(t) and t.requires_grad for t in tensors_in((args, kwargs))
    )


def meets_dtensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a DTensor that is no parameter is among the arguments."""
    return any(isinstance(t, DTensor) and not _is_shard(t) for t in tensors_in((args, kwargs)))


def _is_shard(value: Any) -> bool:
    return isinstance(value, DTensor) and KEY in vars(value)
