"""Gathers of the next step, started while this one ends.

    step n      …  update(w); ahead(w) ─┐  other updates, the script's own work
    step n+1    check(w); take(w) ──────┘  what is in flight, if w is still what was sent

Between two steps anybody may change a parameter: load a checkpoint, clip weights, write through
``.data``. Each rank therefore compares what it sent with what it would send now, bit by bit, and
one small all-reduce lets all ranks decide alike: if any of them differs anywhere, all throw away
what is in flight and gather again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fxzero._compat import is_fake
from fxzero.runtime import collectives
from fxzero.runtime.collectives import InFlight

_orphans: list[InFlight] = []
"""What is in flight and nobody will take: its step was compiled again, or is gone. Its memory
must live until the messages have arrived."""


def is_same(sent: Tensor, now: Tensor) -> bool:
    """Whether two tensors are equal bit by bit: NaN equals itself, -0 is not 0.

    They have equal strides and no gaps. By eight bytes at a time it takes a sixth of the time.
    """
    if is_fake(now) or is_fake(sent):
        return True
    flat = [t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in (sent, now)]
    if all((t.storage_offset() | t.numel()) % 8 == 0 for t in flat):
        flat = [t.view(torch.int64) for t in flat]
    return torch.equal(*flat)


class Ahead:
    """One bucket's gather that may have been started a step earlier.

    Args:
        prepare: makes what this rank sends of its shards: casts, padding.
        size: how many ranks its process group has.
        group: the group's name.
    """

    def __init__(
        self, prepare: Callable[..., list[Tensor]], size: int, group: str, rank: int, name: str
    ) -> None:
        self.prepare = prepare
        self.size = size
        self.group = group
        self.rank = rank
        self.flight: InFlight | None = None
        self.num_taken = 0
        """How often what was in flight was used."""
        self.num_stale = 0
        """How often it was thrown away."""
        self.__name__ = name

    def launch(self, *shards: Tensor) -> None:
        """Start the next step's gather."""
        while _orphans:
            collectives.join(_orphans.pop())
        self.drop()
        self.flight = collectives.gather(self.prepare(*shards), self.size, self.group)

    def is_current(self, *shards: Tensor) -> bool:
        """Whether what is in flight is what this rank would send now."""
        if self.flight is None:
            return False
        sent = [full.chunk(self.size)[self.rank] for full in self.flight.tensors]
        now = [tensor.contiguous() for tensor in self.prepare(*shards)]
        return all(map(is_same, sent, now))

    def take(self, *shards: Tensor) -> InFlight:
        """What is in flight, or else a gather that starts now."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self.num_taken += 1
            return flight
        return collectives.gather(self.prepare(*shards), self.size, self.group)

    def drop(self) -> None:
        """Throw away what is in flight."""
        flight, self.flight = self.flight, None
        if flight is not None:
            collectives.join(flight)

    def __del__(self) -> None:
        if self.flight is not None:
            _orphans.append(self.flight)


class Check:
    """The node that decides, at the beginning of a step, whether what is in flight is taken."""

    __module__ = "fxzero.runtime.ahead"

    def __init__(self, aheads: Sequence[Ahead], counts: Sequence[int]) -> None:
        self.aheads = tuple(aheads)
        self.counts = tuple(counts)
        """How many of the arguments belong to each."""
        self.__name__ = self.__qualname__ = "check_ahead"

    def __call__(self, *shards: Tensor) -> None:
        groups = dict.fromkeys(ahead.group for ahead in self.aheads)
        current = dict.fromkeys(groups, True)
        position = 0
        for ahead, count in zip(self.aheads, self.counts, strict=True):
            mine = shards[position : position + count]
            position += count
            if not ahead.is_current(*mine):
                current[ahead.group] = False
        for group in groups:
            flag = torch.tensor([0.0 if current[group] else 1.0])
            (changed,) = collectives.join_sum(collectives.all_reduce([flag], group, [True]), 1)
            current[group] = is_fake(changed) or not bool(changed.item())
        for ahead in self.aheads:
            if not current[ahead.group]:
                ahead.num_stale += ahead.flight is not None
                ahead.drop()


class Early(Protocol):
    """A transfer that a step may start for the next one: `Ahead`, and the uploads of
    `fxzero.runtime.residents`."""

    __name__: str

    @property
    def launch(self) -> Callable[..., None]:
        """Start it for the next step."""

    @property
    def take(self) -> Callable[..., Any]:
        """What was started, or else what starts now; something joins it."""


class Take:
    """The node that begins a transfer: what a step before has started, or a new one."""

    __module__ = "fxzero.runtime.ahead"

    def __init__(self, ahead: Early) -> None:
        self.ahead = ahead
        self.__name__ = self.__qualname__ = f"take_{ahead.__name__}"

    def __call__(self, *args: Any) -> Any:
        return self.ahead.take(*args)


class Launch:
    """The node that starts the next step's transfer."""

    __module__ = "fxzero.runtime.ahead"

    def __init__(self, ahead: Early) -> None:
        self.ahead = ahead
        self.__name__ = self.__qualname__ = f"ahead_{ahead.__name__}"

    def __call__(self, *args: Any) -> None:
        self.ahead.launch(*args)
