"""Asynchronous collectives over gloo, a list of tensors each.

Gathers and exchanges are point-to-point messages of torch.distributed: every rank sends
its part straight to the others, which receive it where it belongs; small parts travel
together (`fxzero.runtime.point_to_point`). Gloo's own all-gather
assembles a flat scratch copy and its reduce-scatter is an all-reduce inside; measured on
two ranks and 12.6 MB, messages take half of the all-gather's time and no memory.
Messages between two ranks match in the order of their launches and by the tag of the graph
that runs; that the other ranks run the same graph is compared before the first wait: see
`fxzero.ranks.agree`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import free_storage, launch_all_reduce, resolve_process_group
from fxzero.ranks.agree import now, settle
from fxzero.runtime.point_to_point import Packed, swap
from fxzero.runtime.slab import Places

_joined: deque[Any] = deque(maxlen=16)
"""The last all-reduces that were waited for. When a handle dies with its wait, gloo's
worker thread often drops the tensors last, while Python drops its own references, and
the heap is corrupted within some hundred small collectives (seen with torch 2.13:
"unaligned tcache chunk"). By the time that one falls out of here, the worker threads
hold nothing of it. Messages run without worker threads. Handles keep no memory here, or
the gradients of sixteen buckets would lie about from step to step: see `_taken_from`."""


class InFlight:
    """A bucket that was started: what it fills, and the handles to wait for."""

    __slots__ = ("handles", "packed", "received", "sources", "tensors")

    def __init__(
        self,
        tensors: list[Tensor],
        handles: list[Any],
        received: list[list[Tensor]] | None = None,
        sources: list[Tensor | None] | None = None,
        packed: Sequence[Packed] = (),
    ) -> None:
        self.tensors = tensors
        """The results; in an exchange, this rank's own parts of what it sends."""
        self.handles = handles
        self.received = received
        """Every rank's part, by rank, of each tensor of an exchange."""
        self.sources = sources
        """Sent memory that nobody else reads: freed when the collective is joined."""
        self.packed = packed
        """What arrives together, and is put into its places when the collective is joined."""


def gather(
    parts: list[Tensor], size: int, group: str, memory: Tensor | None = None, offset: int = 0
) -> InFlight:
    """Start gathering the ranks' parts of some tensors along dim 0.

    Args:
        memory: the slab where the full tensors have their places; None if they have none.
        offset: where these begin, in bytes.
    """
    process_group = resolve_process_group(group)
    rank = process_group.rank()
    places = Places(memory, offset)
    fulls = [places.take(part, (part.shape[0] * size, *part.shape[1:])) for part in parts]
    rows = [full.chunk(size) for full in fulls]
    by_rank = [list(of_rank) for of_rank in zip(*rows, strict=True)]
    handles, packed = swap(process_group, now.tag, [parts] * size, by_rank)
    for mine, part in zip(by_rank[rank], parts, strict=True):
        mine.copy_(part)
    return InFlight(fulls, handles, packed=packed)


def exchange(
    fulls: list[Tensor],
    size: int,
    group: str,
    own: list[bool],
    memory: Tensor | None = None,
    offsets: tuple[int, int] = (0, 0),
) -> InFlight:
    """Start sending each rank its rows of full gradients; `own` where nobody else reads one.

    Args:
        memory: the slab where what is received has its places; None if it has none.
        offsets: where the rows begin in which the means will be, and all others, in bytes.
    """
    process_group = resolve_process_group(group)
    rank = process_group.rank()
    for_means, for_others = (Places(memory, offset) for offset in offsets)
    kept = 1 if rank == 0 else 0  # see `join_exchange`
    sent: list[Sequence[Tensor]] = []
    received: list[list[Tensor]] = []
    sources: list[Tensor | None] = []
    for full, is_own in zip(fulls, own, strict=True):
        if not full.is_contiguous():  # an operator chose other strides than its fake kernel
            full = full.contiguous()
        rows = full.chunk(size)
        arriving = [
            row
            if other == rank
            else (for_means if other == kept else for_others).take(row, row.shape)
            for other, row in enumerate(rows)
        ]
        sent.append(rows)
        received.append(arriving)
        sources.append(full if is_own else None)
    outgoing = [list(of_rank) for of_rank in zip(*sent, strict=True)]
    by_rank = [list(of_rank) for of_rank in zip(*received, strict=True)]
    handles, packed = swap(process_group, now.tag, outgoing, by_rank)
    return InFlight(outgoing[rank], handles, received, sources, packed)


def all_reduce(tensors: list[Tensor], group: str, own: list[bool]) -> InFlight:
    """Start summing over ranks, in place where nobody else reads a tensor.

    Gloo's sums carry no tag, and sums of different sizes end the process: the ranks compare first.
    """
    if now.announcement is not None:
        settle()
    totals = [
        # Strides may be others than the graph's.
        tensor
        if is_own and tensor.is_contiguous()
        else tensor.clone(memory_format=torch.contiguous_format)
        for tensor, is_own in zip(tensors, own, strict=True)
    ]
    return InFlight(totals, [launch_all_reduce(total, group) for total in totals])


def join(flight: InFlight) -> list[Tensor]:
    """Wait for what was gathered."""
    if now.announcement is not None:
        settle()
    now.num_waits += 1
    for handle in flight.handles:
        handle.wait()
    for packed in flight.packed:
        packed.unpack()
    flight.packed = ()
    return flight.tensors


def join_sum(flight: InFlight, size: int) -> list[Tensor]:
    """Wait for sums over ranks and divide them, in place."""
    totals = join(flight)
    flight.tensors = []
    _joined.extend(flight.handles)
    return [_taken_from(total).div_(size) for total in totals]


def _taken_from(total: Tensor) -> Tensor:
    """A tensor's memory as another one; it has none itself from then on, whoever still holds it."""
    taken = total.detach()
    total.set_()  # type: ignore[call-overload]
    return taken


def join_exchange(flight: InFlight, size: int) -> list[Tensor]:
    """Wait for this rank's rows from all ranks, and average them in rank order.

    The sums are taken in memory that was received: nothing is allocated, and what was received
    and sent for one tensor ends before the next one's turn.
    """
    mine = join(flight)
    assert flight.received is not None
    assert flight.sources is not None
    means = []
    for index, own in enumerate(mine):
        first, second, *rest = flight.received[index]
        total = torch.add(first, second, out=second if first is own else first)
        for part in rest:
            total.add_(part)
        means.append(total.div_(size))
        source, flight.received[index] = flight.sources[index], []
        del first, second, rest
        if source is not None:
            free_storage(source)
    return means
