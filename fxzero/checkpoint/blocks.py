"""Reading a file of a checkpoint by blocks, each of which is checked before anybody sees it.

blocks  │ 0 │ 1 │ 2 │ 3 │        read one after another and hashed beside, a few ahead of who reads
reader       ──────►             a tensor's bytes are copied out of those that are checked
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np

from fxzero.checkpoint.manifest import BLOCK_BYTES, FileRecord
from fxzero.errors import CheckpointError

_AHEAD = 4
"""Blocks that are read before anybody asks for them."""
_KEPT = 8


class _Readable(io.RawIOBase):
    """Bytes that are read from any place on.

    Args:
        num_bytes: how many there are.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go somewhere else."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.num_bytes}[whence]
        self._at = base + offset
        return self._at


class CheckedFile(_Readable):
    """A file whose bytes are those that were written.

    Args:
        path: the file.
        record: what the manifest says of it.
        pool: threads that read and hash.
        until: where what is wanted ends, behind which nothing is read ahead.
    """

    def __init__(
        self, path: Path, record: FileRecord, pool: ThreadPoolExecutor, until: int | None = None
    ) -> None:
        super().__init__(record.bytes)
        self._num_ahead = len(record.blocks) if until is None else -(-until // BLOCK_BYTES)
        self.path = path
        self.record = record
        self._pool = pool
        self._blocks: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._reads = threading.Lock()
        """Held by who reads: a disk gives two threads in turn less than it gives one."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, as far as the file goes.

        Raises:
            CheckpointError: a block is not what was written, or cannot be read.
        """
        into = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(into) and self._at < self.record.bytes:
            block, offset = divmod(self._at, BLOCK_BYTES)
            data = self._block(block)[offset:]
            count = min(len(data), len(into) - filled)
            _copy(data[:count], into[filled : filled + count])
            filled += count
            self._at += count
        return filled

    def check(self) -> None:
        """Read all of it.

        Raises:
            CheckpointError: see `readinto`.
        """
        for block in range(len(self.record.blocks)):
            self._block(block)

    def _block(self, number: int) -> memoryview:
        """A block's bytes, until others are asked for."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
        end = min(number + _AHEAD, max(self._num_ahead, number + 1))
        for ahead in range(number, end):
            if ahead not in self._blocks:
                self._blocks[ahead] = self._pool.submit(self._read, ahead, self._buffer())
        return self._blocks[number].result()

    def _buffer(self) -> bytearray:
        """Memory for a block: that of the one which was wanted longest ago, if there are enough."""
        if len(self._blocks) >= _KEPT:
            _, oldest = self._blocks.popitem(last=False)
            with contextlib.suppress(CheckpointError):  # of no interest: nobody has asked for it
                return cast(bytearray, oldest.result().obj)
        return bytearray(min(BLOCK_BYTES, self.record.bytes))

    def _read(self, number: int, buffer: bytearray) -> memoryview:
        begin = number * BLOCK_BYTES
        data = memoryview(buffer)[: min(BLOCK_BYTES, self.record.bytes - begin)]
        try:
            with self._reads:
                count = os.preadv(self._file, [data], begin)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        if count != len(data) or not self.record.is_block(number, data):
            raise CheckpointError(
                f"{self.path} was changed since it was written: its bytes {begin} to "
                f"{begin + len(data)} have another hash"
            )
        return data

    def close(self) -> None:
        """Let go of the file, behind those that still read it."""
        if not self.closed:
            for block in self._blocks.values():
                block.cancel()
            for block in self._blocks.values():
                if not block.cancelled():
                    block.exception()
            self._blocks.clear()
            os.close(self._file)
        super().close()


def _copy(data: memoryview, into: memoryview) -> None:
    """Copy bytes, beside which other threads run: a memoryview would hold them up."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


class Part(_Readable):
    """A stretch of a file, as a file of its own."""

    def __init__(self, file: CheckedFile | io.FileIO, begin: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._file = file
        self._begin = begin

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, as far as the stretch goes."""
        into = memoryview(buffer).cast("B")
        into = into[: max(self.num_bytes - self._at, 0)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(into) or 0
        self._at += count
        return count
