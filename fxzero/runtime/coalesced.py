"""Coalesced collectives of a device's own backend whose results have their places in a slab.

They are what torch's functional collectives launch, with memory that is given: those keep what is
in flight by its storage, which all of a slab's tensors share. A backend begins behind what compute
has been given so far, so that whatever still reads a place has read it when the next transfer
writes there; and compute goes on behind the join.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fxzero._compat import is_fake, launch_all_gather, launch_reduce_scatter
from fxzero.runtime.slab import Places


class Coalesced(NamedTuple):
    """What was started: what it fills, and what to wait for."""

    tensors: list[Tensor]
    work: Any
    """None where tensors have no values: somebody only looks at the step."""
    sent: list[Tensor]
    """Alive until the join."""


def gather(parts: list[Tensor], size: int, group: str, memory: Tensor, offset: int) -> Coalesced:
    """Start gathering the ranks' parts of some tensors along dim 0.

    Args:
        memory: the slab.
        offset: where in it the full tensors begin, in bytes.
    """
    places = Places(memory, offset)
    fulls = [places.take(part, (part.shape[0] * size, *part.shape[1:])) for part in parts]
    sent = [part.contiguous() for part in parts]
    work = None if is_fake(memory) else launch_all_gather(fulls, sent, group)
    return Coalesced(fulls, work, sent)


def reduce_scatter(
    fulls: list[Tensor], op: str, size: int, group: str, memory: Tensor, offset: int
) -> Coalesced:
    """Start reducing full gradients, each rank its rows.

    Args:
        op: ``avg`` or ``sum``.
        memory: the slab.
        offset: where in it this rank's rows begin, in bytes.
    """
    places = Places(memory, offset)
    rows = [places.take(full, (full.shape[0] // size, *full.shape[1:])) for full in fulls]
    sent = [full.contiguous() for full in fulls]
    work = None if is_fake(memory) else launch_reduce_scatter(rows, sent, op, group)
    return Coalesced(rows, work, sent)


def join(flight: Coalesced) -> list[Tensor]:
    """Let compute wait for what was started."""
    if flight.work is not None:
        flight.work.wait()
    return flight.tensors
