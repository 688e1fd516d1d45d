"""Memory of the host that is first touched in large pages, where the system has them.

A page of 4 KiB that is touched for the first time costs more than a copy of what it will hold, and
everything that is loaded arrives in memory of its own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST_BYTES = 4 << 20
"""Of a tensor: two large pages, of which one at least is whole wherever the memory begins."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU, as `torch.empty` makes it; its storage cannot be resized.

    Args:
        shape: its sizes.
        dtype: its dtype.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))
