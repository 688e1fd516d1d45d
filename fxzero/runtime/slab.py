"""One block of a device's memory in which transfers find their places.

    memory = slab(1 << 20, device)
    a = gather([w], 2, group, memory, 0);      …; vacate([a'])
    b = gather([v], 2, group, memory, 65536);  …
    c = gather([u], 2, group, memory, 0)       where a was

Which place is whose, and until when, is decided before the step runs: see `fxzero.passes.slab`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxzero.graph.lanes import aligned


def slab(num_bytes: int, device: torch.device) -> Tensor:
    """So many bytes of a device."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def vacate(tensors: list[Tensor]) -> None:
    """Their places may be taken by others from here on; the memory itself stays."""


vacate.leaves_places = True  # type: ignore[attr-defined]
fx.node.has_side_effect(vacate)


class Places:
    """Memory for some tensors, one behind the other: of a slab, or each from the allocator.

    Args:
        memory: the slab; None if there is none.
        offset: where in it the first one begins, in bytes.
    """

    __slots__ = ("memory", "offset")

    def __init__(self, memory: Tensor | None, offset: int) -> None:
        self.memory = memory
        self.offset = offset

    def take(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Uninitialised memory for a contiguous tensor of another one's dtype and device."""
        if self.memory is None:
            return like.new_empty(shape)
        begin = self.offset
        end = begin + math.prod(shape) * like.element_size()
        self.offset = aligned(end)
        return self.memory[begin:end].view(like.dtype).view(shape)
