"""Whether the system has a part of a file in memory already.

Asked by `mincore(2)`, which reads nothing: a read of what is cached alone (RWF_NOWAIT) begins to
read what is not, and not every file system knows it.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np


def is_cached(file: int, begin: int, num_bytes: int) -> bool:
    """Whether all of a stretch is in the page cache, or the system does not tell; it tells those
    alone who may write to the file.

    Args:
        file: open for reading.
        begin: of the stretch, a multiple of the system's allocation granularity.
        num_bytes: of it, not 0.
    """
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mapped = mmap.mmap(file, num_bytes, access=mmap.ACCESS_READ, offset=begin)
    except (AttributeError, OSError, ValueError):  # no such call; cannot be mapped; beyond the end
        return True
    pages = np.empty(-(-num_bytes // mmap.PAGESIZE), np.uint8)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
    failed = mincore(*arguments, pages.ctypes.data_as(ctypes.c_void_p))
    return bool(failed) or bool((pages & 1).all())
