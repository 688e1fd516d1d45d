"""What torch functions do to sharded parameters outside of a forward.

w.clamp_(0, 1), w.mul_(0.9), optimizers    on the shard, by DTensor
nn.init.normal_(w), w.uniform_()           as one process would: rank 0 draws the full value
w.copy_(full), w[3] = 0                    this rank's rows of it
w @ x with a plain x, penalties in a loss  the full value, gathered
    float(w.norm())                            of all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fxzero._compat import without_torch_function
from fxzero.local_data import (
    LEAVE_TORCH,
    leave_torch,
    meets_plain,
    on_values,
    settled,
    tensors_in,
)

_RANDOM = frozenset(
    (
        "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ "
        "rand_like randn_like randint_like normal bernoulli multinomial dropout"
    ).split()
)
"""Random functions: DTensor would draw the same numbers for every rank's rows on a CPU."""
_COPIES = frozenset(
    "detach clone zeros_like ones_like empty_like full_like new_zeros new_ones new_empty "
    "new_full new_tensor contiguous".split()
)
"""Functions that make a tensor of the kind of the parameter: an average, a snapshot, a moment."""
_INIT = nn.init.__name__
_KEY = "_fxzero_key"
"""What `fxzero.identity` sets on a parameter, and nobody on what is computed from one."""


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
    name = getattr(func, "__name__", "")
    target = _written(func, name, args, kwargs)
    random = name in _RANDOM or getattr(func, "__module__", "") == _INIT
    if target is not None and (random or name == "__setitem__" or meets_plain(args, kwargs)):
        return _write(target, func, args, kwargs)
    if random:
        return _draw(func, args, kwargs)
    if name in LEAVE_TORCH:
        return leave_torch(func, args, kwargs)
    recorded = name not in _COPIES and _is_recorded(args, kwargs)
    if target is None and (recorded or meets_plain(args, kwargs) or _writes_plain(name, args)):
        args, kwargs = _map((args, kwargs), in_full)
        return func(*args, **kwargs)
    with without_torch_function():
        result = on_values(func, args, kwargs)
        return result if target is not None else settled(result)


def _writes_plain(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a plain tensor is changed in place: a teacher that nobody sharded."""
    first = args[0] if args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place and isinstance(first, Tensor) and not isinstance(first, DTensor)


def _is_recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd records a call: what comes of it will meet plain tensors, in a loss.

    With a DTensor beside the parameters it stays among DTensors.
    """
    if not torch.is_grad_enabled():
        return False
    recorded = any(_is_shard(t) and t.requires_grad for t in tensors_in((args, kwargs)))
    return recorded and not meets_dtensors(args, kwargs)


def meets_dtensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a DTensor that is no parameter is among the arguments."""
    return any(isinstance(t, DTensor) and not _is_shard(t) for t in tensors_in((args, kwargs)))


def _is_shard(value: Any) -> bool:
    return isinstance(value, DTensor) and _KEY in vars(value)


def _written(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor | None:
    """The shard that a function changes in place, if it does."""
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__")
    first = args[0] if args else kwargs.get("tensor")
    return first if in_place and _is_shard(first) else None


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if _is_shard(value):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_map(item, function) for item in value)
    if type(value) is dict:
        return {key: _map(item, function) for key, item in value.items()}
    return value


def _shards(value: Any) -> Iterator[DTensor]:
    if _is_shard(value):
        yield value
    elif type(value) in (list, tuple):
        for item in value:
            yield from _shards(item)
    elif type(value) is dict:
        yield from _shards(list(value.values()))


def _gathered(shard: DTensor) -> Tensor:
    with without_torch_function(), torch.no_grad():
        return cast(DTensor, shard.detach()).full_tensor().clone()


def _write(
    target: DTensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    """Let a function change the full value, of which every rank keeps its rows.

    Rank 0's result counts: random numbers differ from rank to rank.
    """
    recorded = torch.is_grad_enabled() and target.requires_grad and target.is_leaf
    if recorded and getattr(func, "__module__", "") != _INIT:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    copies = {id(shard): _gathered(shard) for shard in _shards((args, kwargs))}
    full_args, full_kwargs = _map((args, kwargs), lambda shard: copies[id(shard)])
    with torch.no_grad():
        func(*full_args, **full_kwargs)
        _keep_rows(target, copies[id(target)])
    return target


def _keep_rows(target: DTensor, value: Tensor) -> None:
    with without_torch_function():
        target.detach().copy_(_of_rank_0(value, target))


def _of_rank_0(value: Tensor, like: DTensor) -> DTensor:
    """A full value as rank 0 has it, laid out like another tensor. A collective."""
    value = value.contiguous()
    if dist.is_initialized():
        dist.broadcast(value, src=0)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _draw(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers of the shape of a parameter, as one process would draw them."""
    like = next(_shards((args, kwargs)))
    full_args, full_kwargs = _map((args, kwargs), _gathered)
    result = func(*full_args, **full_kwargs)
    if not isinstance(result, Tensor) or result.shape != like.shape:
        return result
    with without_torch_function():
        return _of_rank_0(result.detach(), like)
