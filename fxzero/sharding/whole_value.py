"""What runs on the whole value of a sharded tensor, as one process would run it.

nn.init.normal_(w), torch.randn_like(w.grad)    rank 0 draws: every rank keeps its rows
w.copy_(full), w.grad.mul_(mask), w.tril_()     every rank keeps its rows of the result
w.data[3].zero_()                               a view of other ranks' rows: see `View`

All are collectives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fxzero._compat import local_tensor, version_of, without_torch_function
from fxzero.errors import ShardingError
from fxzero.sharding.local_data import computes_attribute

_RANDOM = frozenset(
    (
        "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ "
        "rand_like randn_like randint_like normal bernoulli multinomial poisson binomial "
        "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout_ alpha_dropout_ "
        "feature_alpha_dropout_ dropout1d dropout2d dropout3d rrelu rrelu_ gumbel_softmax "
        "fractional_max_pool2d fractional_max_pool3d"
    ).split()
)
"""Random functions: DTensor would draw the same numbers for every rank's rows on a CPU."""
COPIES = frozenset(
    "detach clone zeros_like ones_like empty_like full_like new_zeros new_ones new_empty "
    "new_full new_tensor contiguous".split()
)
"""Functions that make a tensor like the one they are given: an average, a snapshot, a moment."""
_INDEXED = ("index_", "scatter", "put_", "masked_scatter", "conv", "_conv")
"""What DTensor computes wrongly without a word, or partly so (torch 2.13), by its beginning."""
_SQUEEZED = frozenset({"cov", "corrcoef"})
"""What is squeezed inside of a function: torch 2.11 goes by the sizes of each rank's own part."""
_INIT = nn.init.__name__
_FUNCTIONAL = nn.functional.__name__


def name_of(func: Callable[..., Any]) -> str:
    """A torch function's name."""
    return getattr(func, "__name__", "")


def draws_numbers(func: Callable[..., Any]) -> bool:
    """Whether a function draws random numbers, or initialises."""
    return name_of(func) in _RANDOM or is_initialiser(func)


def is_initialiser(func: Callable[..., Any]) -> bool:
    """Whether a function is one of `torch.nn.init`."""
    return getattr(func, "__module__", "") == _INIT


def wants_whole(func: Callable[..., Any]) -> bool:
    """Whether a function must not be left to DTensor.

    Losses are means, of which DTensor takes the mean over uneven shards; copies of views look at
    the shape of this rank's part, as do functions that squeeze.
    """
    if (getattr(func, "__module__", None) or "") in (_FUNCTIONAL, "torch._C._nn"):
        return True
    name = name_of(func)
    return name in _SQUEEZED or name.startswith(_INDEXED) or name.endswith("_copy")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def replaced(value: Any, kind: type[Tensor], by: Callable[[Any], Any]) -> Any:
    """Replace tensors of one class in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)([replaced(item, kind, by) for item in value])
    if isinstance(value, dict) and type(value) is dict:
        return {key: replaced(item, kind, by) for key, item in value.items()}
    return value


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument in place."""
    name = name_of(func)
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"):
        return True
    return name.endswith("_") and not name.endswith("__")


def written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[DTensor]:
    """The sharded tensors that a function changes in place."""
    if writes(func):
        target = args[0] if args else kwargs.get("tensor", kwargs.get("self"))
    elif getattr(func, "__module__", "") == _FUNCTIONAL and _is_told_to_write(func, args, kwargs):
        target = args[0] if args else kwargs.get("input")
    else:
        target = kwargs.get("out")
    return [t for t in tensors_in(target) if isinstance(t, DTensor)]


def _is_told_to_write(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether one of `torch.nn.functional` was called with ``inplace=True``."""
    signature = inspect.signature(func)
    return "inplace" in signature.parameters and bool(
        signature.bind(*args, **kwargs).arguments.get("inplace")
    )


_OTHER_SHAPES = frozenset(
    (
        "resize_ resize_as_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_ set_"
    ).split()
)


def refuse_other_shapes(func: Callable[..., Any]) -> None:
    """A sharded tensor keeps its layout.

    Raises:
        ShardingError: a function would give it another shape in place.
    """
    if name_of(func) in _OTHER_SHAPES:
        raise ShardingError(
            f"{name_of(func)} would give a sharded tensor another shape in place. Make a new one: "
            "w.detach().reshape(…)."
        )


def gathered(tensor: DTensor) -> Tensor:
    """The whole value, in memory of its own."""
    with without_torch_function(), torch.no_grad():
        if not is_sharded(tensor) and not any(p.is_partial() for p in tensor.placements):
            # Every rank has it. ``torch.tensor([norm, …])`` asks where DTensor does not dispatch.
            return local_tensor(tensor).detach().clone()
        detached = cast(DTensor, tensor.detach())
        return detached.full_tensor().clone()


def write(
    targets: Sequence[DTensor],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Let a function change whole values, of which every rank keeps its rows.

    Rank 0's result counts: random numbers differ from rank to rank.

    Raises:
        RuntimeError: as in torch, where autograd would have to record a write to a leaf.
    """
    recorded = torch.is_grad_enabled() and not is_initialiser(func)
    if recorded and any(target.requires_grad and target.is_leaf for target in targets):
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    whole = {id(t): gathered(t) for t in tensors_in((args, kwargs)) if isinstance(t, DTensor)}
    whole_args, whole_kwargs = replaced((args, kwargs), DTensor, lambda t: whole[id(t)])
    with torch.no_grad():
        result = func(*whole_args, **whole_kwargs)
        for target in targets:
            _keep_rows(target, whole[id(target)])
    if isinstance(result, Tensor) and any(result is whole[id(t)] for t in targets):
        return next(t for t in targets if result is whole[id(t)])
    return result


def _keep_rows(target: DTensor, value: Tensor) -> None:
    with without_torch_function():
        target.detach().copy_(of_rank_0(value, target))


def of_rank_0(value: Tensor, like: DTensor) -> DTensor:
    """A whole value as rank 0 has it, laid out like another tensor."""
    value = value.contiguous()
    if dist.is_initialized():
        dist.broadcast(value, src=0)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def draw(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers as one process would draw them; sharded if of the shape of an argument."""
    like = next(t for t in tensors_in((args, kwargs)) if isinstance(t, DTensor))
    result = func(*replaced(args, DTensor, gathered), **replaced(kwargs, DTensor, gathered))
    if not isinstance(result, Tensor):
        return result
    if result.shape != like.shape:
        if dist.is_initialized():
            dist.broadcast(result, src=0)
        return result
    with without_torch_function():
        return of_rank_0(result.detach(), like)


_VIEWS = frozenset(
    (
        "__getitem__ __iter__ unbind select narrow chunk split split_with_sizes tensor_split "
        "hsplit vsplit dsplit view view_as reshape reshape_as flatten unflatten ravel squeeze "
        "unsqueeze t transpose swapaxes swapdims movedim moveaxis permute adjoint expand "
        "expand_as broadcast_to diagonal unfold as_strided contiguous"
    ).split()
)
"""Functions whose result shares memory with what they are given, at least sometimes."""


@dataclass
class View:
    """How a tensor was cut out of a sharded one by functions that torch calls views.

    Where DTensor has gathered, to look at a row say, the result is a copy, and what is written
    to it would be lost. So it knows where it comes from: a write is repeated on the whole value,
    of which every rank keeps its rows, and a reader sees what was written since.
    """

    base: DTensor
    version: int
    """Of the base, when the copy was made."""
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None], ...]
    """Functions, what they take beside the tensor, and which of the results was taken."""

    def of(self, whole: Tensor) -> Tensor:
        """The same view of a whole value."""
        for func, args, kwargs, index in self.steps:
            result = func(whole, *args, **kwargs)
            whole = result if index is None else list(result)[index]
        return whole


VIEW = "_fxzero_view"
"""Attribute of a copy that stands for a view."""


def view_of(tensor: Tensor) -> View | None:
    """Where a copy that stands for a view comes from; None of any other tensor."""
    found: View | None = vars(tensor).get(VIEW)
    return found


def may_return_views(func: Callable[..., Any]) -> bool:
    """Whether a function may return views."""
    return name_of(func) in _VIEWS or computes_attribute(func)


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different rows of a tensor."""
    return isinstance(tensor, DTensor) and any(isinstance(p, Shard) for p in tensor.placements)


def note_views(
    result: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Mark the results of a view function that are copies, so that writes reach their base."""
    source, rest = args[0], args[1:]
    if not isinstance(source, DTensor) or any(True for _ in tensors_in((rest, kwargs))):
        return
    before = view_of(source)
    if before is None and not is_sharded(source):
        return
    several = not isinstance(result, Tensor)
    for index, item in enumerate(result if several else (result,)):
        if not isinstance(item, Tensor) or item is source:
            continue
        if before is None and (is_sharded(item) or not _shares_memory(func, source, rest, kwargs)):
            continue
        step = (func, rest, kwargs, index if several else None)
        base = source if before is None else before.base
        steps = (step,) if before is None else (*before.steps, step)
        view = View(base, version_of(base), steps)
        vars(item)[VIEW] = view


def _shares_memory(
    func: Callable[..., Any], source: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a function returns views of a plain tensor of this shape: a mask makes copies."""
    with without_torch_function(), torch.no_grad():
        stand_in = torch.empty(source.shape, dtype=source.dtype, device="meta")
        result = func(stand_in, *args, **kwargs)
    first = result if isinstance(result, Tensor) else next(iter(result), None)
    return first is not None and first._base is stand_in


def write_through(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Let a function change what copies stand for: parts of sharded tensors."""
    views = [(t, v) for t in written(func, args, kwargs) if (v := view_of(t)) is not None]
    bases = {id(view.base): view.base for _, view in views}
    whole = {key: gathered(base) for key, base in bases.items()}
    parts = {id(t): view.of(whole[id(view.base)]) for t, view in views}

    def part(tensor: DTensor) -> Tensor:
        return parts[id(tensor)] if id(tensor) in parts else gathered(tensor)

    with torch.no_grad():
        func(*replaced(args, DTensor, part), **replaced(kwargs, DTensor, part))
        for key, base in bases.items():
            _keep_rows(base, whole[key])
    for tensor, _ in views:
        refresh(tensor)
    return args[0] if args else next(iter(kwargs.values()))


def refresh_all(value: Any) -> None:
    """Let copies that stand for views see what was written to their bases."""
    for tensor in tensors_in(value):
        view = view_of(tensor) if isinstance(tensor, DTensor) else None
        if view is not None and version_of(view.base) != view.version:
            refresh(tensor)


def refresh(tensor: Tensor) -> None:
    """Give a copy the values that its view has now."""
    view = view_of(tensor)
    assert view is not None
    assert isinstance(tensor, DTensor)
    with without_torch_function(), torch.no_grad():
        local_tensor(tensor).copy_(view.of(gathered(view.base)))
    view.version = version_of(view.base)


def has_views(tensors: Iterable[Tensor]) -> bool:
    """Whether copies that stand for views are among some tensors."""
    return any(view_of(tensor) is not None for tensor in tensors)
