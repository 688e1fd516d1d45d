"""The gathered copy of a parameter that eager code gets, which refuses to be written to.

A write would be lost: the copy ends with the forward, and every rank keeps its own shard. So
each torch function that gets such a tensor compares version counters, and views of the copy
are copies too. Under the compiler the graph is searched instead: see `fxzero.graph.writes`.

A graph that ends in the middle of a forward returns copies as plain tensors, so that the next
one can be traced through them. Those are looked at again when the next graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import is_fake, version_of, without_torch_function
from fxzero.errors import ShardingError
from fxzero.sharding.local_data import sets_data
from fxzero.sharding.whereabouts import in_forward

HOW_TO_WRITE = (
    "The write would be lost: in a forward a parameter is a gathered copy. Change the parameter "
    "outside of the forward, after optimizer.step() say: there {name} is this rank's shard, and "
    "in-place operations, copy_ and nn.init work on it. State that a forward updates belongs in a "
    "buffer."
)


class FullParameter(Tensor):
    """A parameter's full value inside of a forward."""

    @classmethod
    @torch.compiler.disable  # a graph breaks where a part of it was read by eager code
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function, and see that it has not changed the copy.

        Raises:
            ShardingError: it has.
        """
        with without_torch_function():
            copies = list(_copies((args, kwargs)))
            if sets_data(func):
                _refuse(func, copies[0])
            versions = [version_of(copy) for copy in copies]
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError:  # autograd may meet the write before we do
                _refuse_writes(func, copies, versions)
                raise
            _refuse_writes(func, copies, versions)
            return _marked(result, copies)


def _refuse_writes(
    func: Callable[..., Any], copies: list[FullParameter], versions: list[int]
) -> None:
    for copy, version in zip(copies, versions, strict=True):
        if version_of(copy) != version:
            _refuse(func, copy)


def _refuse(func: Callable[..., Any], copy: FullParameter) -> None:
    name = vars(copy).get("_fxzero_name", "a parameter")
    if not in_forward():
        raise ShardingError(
            f"{getattr(func, '__name__', func)} changes a part of {name} that was read with "
            "gradients on, which is a gathered copy: the write would be lost. Read the part under "
            f"torch.no_grad(), or from {name}.data: there a write reaches the shard."
        )
    raise ShardingError(
        f"{getattr(func, '__name__', func)} changes {name} inside of a forward. "
        + HOW_TO_WRITE.format(name=name)
    )


def full_parameter(value: Tensor, name: str) -> Tensor:
    """A tensor as the full value of the parameter `name`."""
    if is_fake(value):
        return value  # a tensor without values: what somebody writes to it is lost anyway
    copy = value.as_subclass(FullParameter)
    copy._fxzero_name = name  # type: ignore[attr-defined]
    return copy


def returned_copy(value: Tensor, name: str) -> None:
    """Note that a compiled graph gives eager code a gathered copy, or a view of one."""
    value._fxzero_name = name  # type: ignore[attr-defined]
    _returned.append((value, version_of(value), value.data_ptr(), name))


def check_returned_copies() -> None:
    """See that eager code has not written to what graphs have returned.

    Raises:
        ShardingError: it has.
    """
    returned = _returned.copy()
    _returned.clear()
    for value, version, address, name in returned:
        if (version_of(value), value.data_ptr()) != (version, address):
            raise ShardingError(
                f"{name} was changed inside of a forward, between two compiled graphs. "
                + HOW_TO_WRITE.format(name=name)
            )


_returned: list[tuple[Tensor, int, int, str]] = []
"""Copies that graphs have returned since the last check, with version, address and name."""


def _copies(value: Any) -> Iterator[FullParameter]:
    if isinstance(value, FullParameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _copies(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _copies(item)


def _marked(result: Any, copies: Iterable[FullParameter]) -> Any:
    """What a function returned, its views of a copy marked as such."""
    if isinstance(result, (list, tuple)) and any(isinstance(r, Tensor) for r in result):
        items = [_marked(item, copies) for item in result]
        return type(result)(items) if type(result) in (list, tuple) else result
    if not isinstance(result, Tensor) or result.layout is not torch.strided:
        return result
    for copy in copies:
        start = copy.data_ptr()
        # By address: a Python object for a storage races with gloo's worker threads.
        if start <= result.data_ptr() < start + max(copy.nbytes, 1) and result.numel():
            if type(result) is FullParameter:
                return result
            return full_parameter(result, vars(copy).get("_fxzero_name", "a parameter"))
    return result if type(result) is not FullParameter else result.as_subclass(Tensor)
