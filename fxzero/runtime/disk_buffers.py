"""Memory between the disk and those who read it: a fixed number of buffers, used again and again.

However large a model is, what is on its way takes so much and no more: who reads the disk waits
for a buffer that somebody has let go of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from fxzero.disk.scratch import pages
from fxzero.runtime.pinned import pin
from fxzero.sharding.host import HOST

SETS = 4
"""Pieces of an update, with its state, that are on their way at a time: two are read while one is
updated and one is written."""


class Buffer:
    """Memory for one piece."""

    __slots__ = ("memory", "tensor")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        """The same: (bytes,)."""


class Ring:
    """Some buffers, which one lane takes and others give back.

    Args:
        device: what reads them beside the host.

    Raises:
        HostMemoryError: a GPU has to, and the system does not let it.
    """

    def __init__(self, count: int, num_bytes: int, device: torch.device = HOST) -> None:
        memory = pages(count * num_bytes)
        every = torch.frombuffer(memory, dtype=torch.uint8)
        pin(self, every, device, "what is on its way from the disk to the device", _HOLD_LESS)
        self._free = [Buffer(memory[i * num_bytes :][:num_bytes]) for i in range(count)]
        self._changed = threading.Condition()

    def take(self, is_over: Callable[[], bool] = lambda: False) -> Buffer | None:
        """A buffer that nobody uses, as soon as there is one; None once there is no more need."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or is_over())
            return None if is_over() else self._free.pop()

    def give(self, buffer: Buffer) -> None:
        """Let others have a buffer."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those who wait ask again whether there is still need."""
        with self._changed:
            self._changed.notify_all()

    @property
    def num_free(self) -> int:
        """How many buffers nobody uses."""
        return len(self._free)


_HOLD_LESS = "make disk.chunk_bytes or disk.depth smaller"


class Buffers:
    """All of a process's: for what is updated, and for parameters on their way to the device.

    Args:
        depth: reads that are on their way at a time.
        most_kinds: sections of a bucket: the parameters' and those of their state.
        piece_bytes: what a buffer has to hold.
        device: where parameters go.
    """

    def __init__(
        self, depth: int, most_kinds: int, piece_bytes: int, device: torch.device = HOST
    ) -> None:
        self.states = Ring(SETS * most_kinds, piece_bytes)
        self.params = Ring(depth, piece_bytes, device)


def buffers_bytes(depth: int, most_kinds: int, piece_bytes: int) -> int:
    """What the buffers take."""
    return (SETS * most_kinds + depth) * piece_bytes
