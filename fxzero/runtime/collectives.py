"""Asynchronous collectives over gloo, one tensor each.

Torch's functional collectives drop their handle the moment a wait returns. The last
reference to the tensors is then often dropped by gloo's worker thread while Python
drops its own, and the heap is corrupted within some hundred small collectives (seen
with torch 2.13: "unaligned tcache chunk"; the same calls with handles that outlive the
wait run clean). Here a handle outlives its wait, and memory is freed by name instead.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from fxzero._compat import free_storage, launch_all_gather, launch_all_reduce, launch_all_to_all

_joined: deque[Any] = deque(maxlen=16)
"""The last handles that were waited for. By the time that one falls out, the worker
threads have run later collectives and hold nothing of it."""


class InFlight:
    """A collective that was started: what it fills, and the handle to wait for."""

    __slots__ = ("handle", "source", "tensor")

    def __init__(self, tensor: Tensor, handle: Any, source: Tensor | None = None) -> None:
        self.tensor = tensor
        self.handle = handle
        self.source = source
        """Sent memory that nobody else reads: freed when the collective is joined."""


def gather(part: Tensor, size: int, group: str) -> InFlight:
    """Start gathering the ranks' parts along dim 0."""
    full = part.new_empty((part.shape[0] * size, *part.shape[1:]))
    return InFlight(full, launch_all_gather(full, part, group))


def exchange(full: Tensor, size: int, group: str, own: bool) -> InFlight:
    """Start sending each rank its rows of a full gradient; `own` when nobody else reads it."""
    received = full.new_empty(full.shape)
    handle = launch_all_to_all(received, full, group)
    return InFlight(received, handle, full if own else None)


def all_reduce(tensor: Tensor, group: str, own: bool) -> InFlight:
    """Start summing over ranks, in place when nobody else reads the tensor."""
    total = tensor if own else tensor.clone()
    return InFlight(total, launch_all_reduce(total, group))


def join(flight: InFlight) -> Tensor:
    """Wait for what was gathered."""
    flight.handle.wait()
    _joined.append(flight.handle)
    return flight.tensor


def join_sum(flight: InFlight, size: int) -> Tensor:
    """Wait for a sum over ranks and make it an average, in place."""
    return join(flight).div_(size)


def join_exchange(flight: InFlight, size: int) -> Tensor:
    """Wait for this rank's rows from all ranks, and average them in rank order.

    Args:
        size: ranks in the group; the received tensor has `size` times this rank's rows.
    """
    received = join(flight)
    mean = received.unflatten(0, (size, received.shape[0] // size)).mean(0)
    free_storage(received)
    if flight.source is not None:
        free_storage(flight.source)
    return mean
