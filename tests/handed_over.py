"""What threads hand to each other, for a race detector: queues, futures, buffers, reads of a disk.

Inside of these contexts whoever takes something knows what the one who has handed it over knew:
see `tests.races`.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fxzero.disk.store import DiskStore
from fxzero.runtime import disk_streams, lanes
from fxzero.runtime.disk_buffers import Buffer, Ring
from tests.races import Clock, Races, thread

Use = Callable[[Tensor, str, str], None]


class Queue(queue.SimpleQueue[Any]):
    """Who takes something out knows what the one who has put it in knew."""

    races: Races

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Hand over."""
        super().put((self.races.hand_over(thread()), item), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take."""
        known, item = super().get(block, timeout)
        self.races.learn(thread(), known)
        return item


@contextlib.contextmanager
def futures_hand_over(races: Races) -> Iterator[None]:
    """Who waits for a future knows what the one who has done it knew."""
    set_result, result = Future.set_result, Future.result

    def hand_over(self: Future[Any], value: Any) -> None:
        vars(self)["known"] = races.hand_over(thread())
        set_result(self, value)

    def take(self: Future[Any], timeout: float | None = None) -> Any:
        value = result(self, timeout)
        for known in (vars(self).get("known"), vars(self).get("of_disk")):
            if known is not None:
                races.learn(thread(), known)
        return value

    with (
        mock.patch.object(Future, "set_result", hand_over),
        mock.patch.object(Future, "result", take),
    ):
        yield


@contextlib.contextmanager
def disks_fill(races: Races, use: Use) -> Iterator[None]:
    """A read of the disk writes to its buffer, from when it is asked for until who asks waits.

    Args:
        use: notes that somebody writes to a tensor, and where.
    """
    start = DiskStore.start_reading
    count = iter(range(1 << 30))

    def reading(self: DiskStore, piece: Any, buffer: memoryview) -> Future[None]:
        who = f"read {next(count)} of the disk"
        races.learn(who, races.hand_over(thread()))
        target = torch.frombuffer(buffer, dtype=torch.uint8)
        use(target, who, piece.section)
        future = start(self, piece, buffer)
        vars(future)["of_disk"] = races.hand_over(who)
        return future

    with mock.patch.object(DiskStore, "start_reading", reading):
        yield


@contextlib.contextmanager
def buffers_hand_over(races: Races) -> Iterator[None]:
    """Who takes a buffer knows what the one who has given it back knew."""
    given: dict[int, Clock] = {}
    give, take = Ring.give, Ring.take

    def hand_over(self: Ring, buffer: Buffer) -> None:
        given[id(buffer)] = races.hand_over(thread())
        give(self, buffer)

    def taken(self: Ring, is_over: Callable[[], bool] = lambda: False) -> Buffer | None:
        buffer = take(self, is_over)
        if buffer is not None:
            races.learn(thread(), given.get(id(buffer), {}))
        return buffer

    with mock.patch.object(Ring, "give", hand_over), mock.patch.object(Ring, "take", taken):
        yield


@contextlib.contextmanager
def queues_hand_over(races: Races) -> Iterator[None]:
    """Of lanes, and of updates on disk."""
    kind = type("QueueOfRaces", (Queue,), {"races": races})
    with (
        mock.patch.object(lanes, "SimpleQueue", kind),
        mock.patch.object(disk_streams, "SimpleQueue", kind),
    ):
        yield
