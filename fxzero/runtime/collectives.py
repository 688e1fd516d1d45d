"""Asynchronous collectives over gloo, one tensor each.

Gathers and exchanges are point-to-point messages of torch.distributed: every rank sends
its part straight to the others, which receive it where it belongs. Gloo's own all-gather
assembles a flat scratch copy and its reduce-scatter is an all-reduce inside; measured on
two ranks and 12.6 MB, messages take half of the all-gather's time and no memory.
Messages between two ranks match in the order of their launches and by the tag of the graph
that runs; that the other ranks run the same graph is compared before the first wait: see
`fxzero.runtime.agree`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import free_storage, launch_all_reduce, resolve_process_group
from fxzero.runtime.agree import now, settle

_joined: deque[Any] = deque(maxlen=16)
"""The last all-reduces that were waited for. When a handle dies with its wait, gloo's
worker thread often drops the tensors last, while Python drops its own references, and
the heap is corrupted within some hundred small collectives (seen with torch 2.13:
"unaligned tcache chunk"). By the time that one falls out of here, the worker threads
hold nothing of it. Messages run without worker threads."""


class InFlight:
    """A collective that was started: what it fills, and the handles to wait for."""

    __slots__ = ("handles", "received", "source", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        handles: list[Any],
        received: list[Tensor] | None = None,
        source: Tensor | None = None,
    ) -> None:
        self.tensor = tensor
        """The result; in an exchange, this rank's own part of what it sends."""
        self.handles = handles
        self.received = received
        """Every rank's part, by rank, of an exchange."""
        self.source = source
        """Sent memory that nobody else reads: freed when the collective is joined."""


def gather(part: Tensor, size: int, group: str) -> InFlight:
    """Start gathering the ranks' parts along dim 0."""
    process_group = resolve_process_group(group)
    rank, tag = process_group.rank(), now.tag
    full = part.new_empty((part.shape[0] * size, *part.shape[1:]))
    rows = full.chunk(size)
    handles = [
        process_group.recv([rows[other]], other, tag) for other in _others_before(rank, size)
    ]
    handles += [process_group.send([part], other, tag) for other in _others_after(rank, size)]
    rows[rank].copy_(part)
    return InFlight(full, handles)


def exchange(full: Tensor, size: int, group: str, own: bool) -> InFlight:
    """Start sending each rank its rows of a full gradient; `own` when nobody else reads it."""
    process_group = resolve_process_group(group)
    rank, tag = process_group.rank(), now.tag
    if not full.is_contiguous():  # an operator chose other strides than its fake kernel
        full = full.contiguous()
    rows = full.chunk(size)
    received = [row if other == rank else torch.empty_like(row) for other, row in enumerate(rows)]
    handles = [
        process_group.recv([received[other]], other, tag) for other in _others_before(rank, size)
    ]
    handles += [
        process_group.send([rows[other]], other, tag) for other in _others_after(rank, size)
    ]
    return InFlight(rows[rank], handles, received, full if own else None)


def _others_after(rank: int, size: int) -> list[int]:
    """The other ranks, next one first: no rank is everybody's first receiver."""
    return [(rank + step) % size for step in range(1, size)]


def _others_before(rank: int, size: int) -> list[int]:
    """The other ranks in the order in which their messages to `rank` are sent."""
    return [(rank - step) % size for step in range(1, size)]


def all_reduce(tensor: Tensor, group: str, own: bool) -> InFlight:
    """Start summing over ranks, in place when nobody else reads the tensor.

    Gloo's sums carry no tag, and sums of different sizes end the process: the ranks compare first.
    """
    if now.announcement is not None:
        settle()
    if not own or not tensor.is_contiguous():  # strides may be others than the graph's
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    total = tensor
    return InFlight(total, [launch_all_reduce(total, group)])


def join(flight: InFlight) -> Tensor:
    """Wait for what was gathered."""
    if now.announcement is not None:
        settle()
    now.num_waits += 1
    for handle in flight.handles:
        handle.wait()
    return flight.tensor


def join_sum(flight: InFlight, size: int) -> Tensor:
    """Wait for a sum over ranks and divide it, in place."""
    total = join(flight)
    _joined.extend(flight.handles)
    return total.div_(size)


def join_exchange(flight: InFlight, size: int) -> Tensor:
    """Wait for this rank's rows from all ranks, and average them in rank order.

    The sum is taken in memory that was received: nothing is allocated.
    """
    own = join(flight)
    assert flight.received is not None
    first, second, *rest = flight.received
    total = torch.add(first, second, out=second if first is own else first)
    for part in rest:
        total.add_(part)
    if flight.source is not None:
        free_storage(flight.source)
    return total.div_(size)
