"""Memory of the host that is first touched in large pages, where the system has them.

    model.h.0.weight │ model.h.0.bias │ model.h.1.weight │ …      one stretch of memory,
    ──── storage ────│─── storage ────│──── storage ─────│        and a storage for each

A page of 4 KiB that is touched for the first time costs more than a copy of what it will hold, and
everything that is loaded arrives in memory of its own. A tensor by itself has few large pages, or
none: together they have. What is small has memory by itself, lest a count of steps, which an
optimizer keeps where it moves all else to a GPU, keep the whole stretch.

A thread touches it from its begin on, ahead of who fills it: the first touches of several threads
at once hinder each other, and while all of them wait for memory nobody asks a disk for more.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_LEAST_BYTES = 4 << 20
"""Of a stretch: two large pages, of which one at least is whole wherever the memory begins."""
_SMALL_BYTES = 64 << 10
_ALIGNED_BYTES = 64
"""Where a tensor may begin, as torch's own allocator has it."""
_LEAST_AHEAD_BYTES = 64 << 20
"""Of a stretch that is worth a thread."""
_AT_ONCE_BYTES = 16 << 20
"""Touched by one call, which keeps the memory from being given back meanwhile."""
_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14: touch it, and leave what is in it."""


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
    if num_bytes >= _LEAST_AHEAD_BYTES:
        about = weakref.ref(memory), num_bytes
        touches = threading.Thread(target=_touch, args=about, name="fxzero-touch", daemon=True)
        with contextlib.suppress(RuntimeError):  # there may be no more threads
            touches.start()
    return memory


def _touch(of: weakref.ref[mmap.mmap], num_bytes: int) -> None:
    """Touch memory that somebody fills, as long as somebody has it. Where the system does not do
    so, or has none, whoever fills it does."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    for begin in range(0, num_bytes, _AT_ONCE_BYTES):
        memory = of()
        if memory is None:
            return
        address = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data + begin)
        length = ctypes.c_size_t(min(_AT_ONCE_BYTES, num_bytes - begin))
        if madvise(address, length, _MADV_POPULATE_WRITE):
            return
        del memory
