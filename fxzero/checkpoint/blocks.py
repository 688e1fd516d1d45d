"""Reading a file of a checkpoint by blocks, of which each is compared with what was written.

blocks  │     0     │     1     │     2     │     read one after another, and hashed beside
pieces    ▓▓▓▓▓▓  ▓▓▓▓▓▓▓                       a disk's bytes go right to where they belong
            q        k                          what is between them is hashed and forgotten

Who fills memory has it filled with bytes that were checked, or an error, behind which nobody writes
into it any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from fxzero.checkpoint.manifest import BLOCK_BYTES, FileRecord
from fxzero.errors import CheckpointError

_MOST_AT_ONCE = os.sysconf("SC_IOV_MAX")
"""Stretches of memory that one read may go to."""

_AHEAD = 4
"""Blocks that the system is asked for before they are read. By itself it reads little more than one
ahead, and a disk waits where this process is late for once; of hundreds of requests at once some
disks give less than of these."""
_AT_ONCE_BYTES = 1 << 20
"""Linux reads no more for one request."""

Piece = tuple[int, memoryview]
"""Where a stretch of a file begins, and the memory that it goes to."""


class CheckedFile:
    """A file whose bytes are those that were written.

    Args:
        path: the file.
        record: what the manifest says of it.
        pool: threads that read and hash.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path, record: FileRecord, pool: ThreadPoolExecutor) -> None:
        self.path = path
        self.record = record
        self._pool = pool
        self._reads = threading.Lock()
        """Held by who reads: a disk gives two threads in turn less than it gives one."""
        self._between = threading.local()
        """Memory of each thread for what nobody wants of a block."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fill memory with stretches of the file that do not overlap, in any order.

        Raises:
            CheckpointError: a block that one of them is in is not what was written, or cannot be
                read; or one is beyond the end.
        """
        by_block: dict[int, list[Piece]] = {}
        for begin, into in sorted((p for p in pieces if len(p[1])), key=lambda p: p[0]):
            end = begin + len(into)
            if end > self.record.bytes:
                raise CheckpointError(
                    f"{self.path} has {self.record.bytes} bytes, and {begin} to {end} are wanted"
                )
            for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                first = max(begin, block * BLOCK_BYTES)
                last = min(end, (block + 1) * BLOCK_BYTES)
                by_block.setdefault(block, []).append((first, into[first - begin : last - begin]))
        self._read_all([(block, by_block[block]) for block in sorted(by_block)])

    def check(self, begin: int = 0, end: int | None = None) -> None:
        """Compare the blocks that a stretch is in, or all.

        Raises:
            CheckpointError: see `fill`.
        """
        end = self.record.bytes if end is None else min(end, self.record.bytes)
        blocks = range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        self._read_all([(block, ()) for block in blocks])

    def peek(self, begin: int, num_bytes: int) -> bytes:
        """What is there, compared with nothing: to find out what to ask for.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            return os.pread(self._file, num_bytes, begin)
        except OSError as error:
            raise self._unreadable(error) from error

    def _read_all(self, wanted: Sequence[tuple[int, Sequence[Piece]]]) -> None:
        for block, _ in wanted[:_AHEAD]:
            self._expect(block)
        following = (block for block, _ in wanted[_AHEAD:])
        reads: list[Future[None]] = [
            self._pool.submit(self._read, block, pieces, next(following, None))
            for block, pieces in wanted
        ]
        try:
            for read in reads:
                read.result()
        finally:
            for read in reads:
                read.cancel()
            wait(reads)

    def _expect(self, number: int) -> None:
        """Let the system begin to read a block."""
        begin = number * BLOCK_BYTES
        ask_for(self._file, begin, min(begin + BLOCK_BYTES, self.record.bytes))

    def _read(self, number: int, pieces: Sequence[Piece], then: int | None) -> None:
        """Read a block to where its pieces go, and compare all of it.

        Args:
            then: a block that will be read some time after it.
        """
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.record.bytes)
        into = self._memory(begin, end, pieces)
        try:
            with self._reads:
                if then is not None:
                    self._expect(then)
                count = self._fill(into, begin)
        except OSError as error:
            raise self._unreadable(error) from error
        if count != end - begin or not self.record.is_block(number, *into):
            raise CheckpointError(
                f"{self.path} was changed since it was written: its bytes {begin} to {end} have "
                "another hash"
            )

    def _fill(self, into: Sequence[memoryview], begin: int) -> int:
        """Read what lies one behind the other, as far as the file goes. A system may read less than
        it is asked for, over a network say.

        Returns:
            How many bytes were read.
        """
        left, count = list(into), 0
        while left and (read := os.preadv(self._file, left[:_MOST_AT_ONCE], begin + count)):
            count += read
            while left and read >= len(left[0]):
                read -= len(left.pop(0))
            if read:
                left[0] = left[0][read:]
        return count

    def _memory(self, begin: int, end: int, pieces: Sequence[Piece]) -> list[memoryview]:
        """All that a block goes to: its pieces, and what is between them."""
        between: memoryview | None = getattr(self._between, "memory", None)
        if between is None:
            between = self._between.memory = memoryview(bytearray(BLOCK_BYTES))
        found = []
        for first, into in (*pieces, (end, between[:0])):
            if first > begin:
                found.append(between[: first - begin])
                between = between[first - begin :]
            if len(into):
                found.append(into)
            begin = first + len(into)
        return found

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {error.strerror}")


def ask_for(file: int, begin: int, end: int) -> None:
    """Let the system begin to read a stretch of a file, where it can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for at in range(begin, end, _AT_ONCE_BYTES):
        with contextlib.suppress(OSError):  # which whoever reads it will meet
            os.posix_fadvise(file, at, min(_AT_ONCE_BYTES, end - at), os.POSIX_FADV_WILLNEED)


def ask_in_turn(file: int, end: int) -> None:
    """Let the system read the begin of a file, a block at a time and one ahead: whoever wants the
    last byte of a block waits for it.

    Raises:
        OSError: it cannot be read.
    """
    for begin in range(0, end, BLOCK_BYTES):
        ask_for(file, begin, min(begin + BLOCK_BYTES, end))
        if begin:
            os.pread(file, 1, begin - 1)
