"""Whether the system has parts of a file in memory already.

Asked by `mincore(2)`, which reads nothing: a read of what is cached alone (RWF_NOWAIT) begins to
read what is not, and not every file system knows it. The file is mapped once: a mapping a question
would wait for whoever touches memory meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np


class PageCache:
    """What of a file is in it.

    Args:
        file: open for reading.
        num_bytes: of it.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._mapped: mmap.mmap | None = None
        try:
            self._mincore = ctypes.CDLL(None, use_errno=True).mincore
            self._mapped = mmap.mmap(file, num_bytes, access=mmap.ACCESS_READ)
        except (AttributeError, OSError, ValueError):  # no such call; not to be mapped; it is short
            return
        self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data

    def close(self) -> None:
        """Ask no more."""
        if self._mapped is not None:
            self._mapped.close()

    def has(self, begin: int, end: int) -> bool:
        """Whether all of a stretch is in it, or the system does not tell; it tells those alone who
        may write to the file.

        Args:
            begin: of the stretch, a multiple of the system's page size.
            end: of it, behind its begin, in the file.
        """
        if self._mapped is None:
            return True
        pages = np.empty(-(-(end - begin) // mmap.PAGESIZE), np.uint8)
        arguments = ctypes.c_void_p(self._address + begin), ctypes.c_size_t(end - begin)
        failed = self._mincore(*arguments, pages.ctypes.data_as(ctypes.c_void_p))
        return bool(failed) or bool((pages & 1).all())
