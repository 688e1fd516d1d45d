"""Gathers of the next step, started while this one ends.

    step n      …  update(w); ahead(w) ─┐  other updates, the script's own work
    step n+1    launch(w) ──────────────┘  takes what is in flight, if w is what it was

Between two steps anybody may change a parameter: load a checkpoint, average weights, step by
hand. What is in flight is used only if every shard that it was made of is the same tensor, of
the same version, with the same bits; else it is thrown away and gathered again. All ranks see
the same changes, as they do in any other collective program.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import is_fake, real_tensors
from fxzero.runtime.collectives import InFlight

_orphans: list[Any] = []
"""What is in flight and nobody will take: its step was compiled again, or is gone. Its memory
must live until the messages have arrived."""


def _finish(flight: Any) -> None:
    """Wait for a collective whose result nobody wants."""
    if isinstance(flight, InFlight):
        for handle in flight.handles:
            handle.wait()
        return
    with real_tensors():  # a compilation may be what threw the flight away
        for tensor in flight if isinstance(flight, (list, tuple)) else (flight,):
            if not is_fake(tensor):
                torch.ops._c10d_functional.wait_tensor.default(tensor)


_all: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """torch warns of functional collectives that nobody waited for; gloo's end with the process."""
    for ahead in list(_all):
        if not isinstance(ahead.flight, InFlight):
            with contextlib.suppress(Exception):
                ahead.drop()


def bits(tensor: Tensor) -> Tensor:
    """A number that is another one when any bits change, but for rare pairs of changes: 0-d."""
    size = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
    if integer is None or not tensor.is_contiguous():
        return tensor.sum()
    return tensor.view(integer).sum()


class Ahead:
    """One gather that may have been started a step earlier.

    Args:
        start: starts it, given the shards that it is made of.
        group: the name of its process group.
    """

    def __init__(self, start: Callable[..., Any], group: str, name: str) -> None:
        self.start = start
        self.group = group
        self.flight: Any = None
        self.seen: list[tuple[int, int, int]] = []
        self.sums: list[Tensor] = []
        self.num_taken = 0
        """How often what was in flight was used."""
        self.num_stale = 0
        """How often it was thrown away."""
        self.__name__ = name
        _all.add(self)

    def launch(self, *shards: Tensor) -> None:
        """Start the next step's gather."""
        while _orphans:
            _finish(_orphans.pop())
        self.drop()
        self.seen = [_identity(shard) for shard in shards]
        self.sums = [bits(shard) for shard in shards]
        self.flight = self.start(*shards)

    def take(self, *shards: Tensor) -> Any:
        """What is in flight if the shards are what they were, else a gather that starts now."""
        flight, self.flight = self.flight, None
        if flight is not None:
            if self._is_current(shards):
                self.num_taken += 1
                return flight
            self.num_stale += 1
            _finish(flight)
        return self.start(*shards)

    def _is_current(self, shards: tuple[Tensor, ...]) -> bool:
        if [_identity(shard) for shard in shards] != self.seen:
            return False
        pairs = zip(self.sums, (bits(shard) for shard in shards), strict=True)
        return all(bool((before == now).all()) for before, now in pairs)

    def drop(self) -> None:
        """Throw away what is in flight."""
        if self.flight is not None:
            _finish(self.flight)
            self.flight = None

    def __del__(self) -> None:
        if self.flight is not None:
            _orphans.append(self.flight)


def _identity(shard: Tensor) -> tuple[int, int, int]:
    return shard.untyped_storage()._cdata, shard.data_ptr(), shard._version


class Take:
    """The node that begins a gather: what a step before has started, if it is still right."""

    __module__ = "fxzero.runtime.ahead"

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead
        self.__name__ = self.__qualname__ = f"take_{ahead.__name__}"

    def __call__(self, *shards: Tensor) -> Any:
        return self.ahead.take(*shards)


class Launch:
    """The node that starts the next step's gather."""

    __module__ = "fxzero.runtime.ahead"

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead
        self.__name__ = self.__qualname__ = f"ahead_{ahead.__name__}"

    def __call__(self, *shards: Tensor) -> None:
        self.ahead.launch(*shards)
