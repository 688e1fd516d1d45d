"""Memory of the host that is first touched in large pages, where the system has them.

    model.h.0.weight │ model.h.0.bias │ model.h.1.weight │ …      one stretch of memory,
    ──── storage ────│─── storage ────│──── storage ─────│        and a storage for each

A page of 4 KiB that is touched for the first time costs more than a copy of what it will hold, and
everything that is loaded arrives in memory of its own. A tensor by itself has few large pages, or
none: together they have. What is small has memory by itself, lest a count of steps, which an
optimizer keeps where it moves all else to a GPU, keep the whole stretch.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

_LEAST_BYTES = 4 << 20
"""Of a stretch: two large pages, of which one at least is whole wherever the memory begins."""
_SMALL_BYTES = 64 << 10
_ALIGNED_BYTES = 64
"""Where a tensor may begin, as torch's own allocator has it."""


def empty(forms: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Uninitialised tensors on the CPU, as `torch.empty` makes them; their storages cannot be
    resized, and their memory is given back with the last of them.

    Args:
        forms: by name, a tensor's sizes and its dtype.
    """
    places: dict[str, int] = {}
    total = 0
    for name, (shape, dtype) in forms.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes <= _SMALL_BYTES:
            continue
        places[name] = total
        total += -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    memory = _stretch(total)
    found = {}
    for name, (shape, dtype) in forms.items():
        if memory is None or name not in places:
            found[name] = torch.empty(shape, dtype=dtype)
        else:
            count = math.prod(shape)
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=places[name])
            found[name] = flat.view(shape)
    return found


def _stretch(num_bytes: int) -> mmap.mmap | None:
    """So much memory; None where it would have no large pages."""
    if num_bytes < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return None
    return memory
