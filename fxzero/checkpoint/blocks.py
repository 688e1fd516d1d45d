"""Reading a file of a checkpoint by blocks, of which each is compared with what was written.

blocks  │     0     │     1     │     2     │     several at once, each into a thread's own memory,
pieces    ▓▓▓▓▓▓  ▓▓▓▓▓▓▓                       hashed there, and copied to where they belong;
            q        k                          what is between them is forgotten

What one process alone reads goes past the page cache (O_DIRECT): memory for it there, which nobody
has touched before, costs a processor more than all else together. What is in the cache already, as
behind a crash, is taken from there, and so is what other processes read, too, and everything where
a file system refuses the other way: right to where it belongs, one block after another.

Who fills memory has it filled with bytes that were checked, or an error, behind which nobody writes
into it any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from fxzero.checkpoint.manifest import BLOCK_BYTES, FileRecord
from fxzero.checkpoint.page_cache import PageCache
from fxzero.errors import CheckpointError

_MOST_AT_ONCE = os.sysconf("SC_IOV_MAX")
"""Stretches of memory that one read may go to."""

NUM_THREADS = 8
"""Of a pool that reads: as many blocks are on their way at once."""
_AHEAD = 4
"""Blocks that the page cache is asked for before they are read. By itself it reads little more than
one ahead, and a disk waits where this process is late for once; of hundreds of requests at once
some disks give less than of these."""
_AT_ONCE_BYTES = 1 << 20
"""Linux reads no more for one request."""

Piece = tuple[int, memoryview]
"""Where a stretch of a file begins, and the memory that it goes to."""

_of_thread = threading.local()
"""Each thread's own memory for a block."""


class CheckedFile:
    """A file whose bytes are those that were written.

    Args:
        path: the file.
        record: what the manifest says of it.
        pool: threads that read and hash.
        is_alone: whether no other process of this host reads it now: past the page cache each of
            them would have it from the disk.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(
        self, path: Path, record: FileRecord, pool: ThreadPoolExecutor, *, is_alone: bool = False
    ) -> None:
        self.path = path
        self.record = record
        self._pool = pool
        self._reads = threading.Lock()
        """Held by who reads through the page cache: of two threads in turn it reads less ahead."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self._direct = _open_direct(path) if is_alone else None
        """The file once more, past the page cache; None where that is refused."""
        self._is_refused = False
        """Whether it can be opened so, and not read."""
        self._cache: PageCache | None = None
        if self._direct is not None:
            _read_nothing_ahead(self._file)
            self._cache = PageCache(self._file, record.bytes)

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)
        if self._cache is not None:
            self._cache.close()

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
        if self._direct is None:
            for block, _ in wanted[:_AHEAD]:
                self._expect(block)
        following = (block for block, _ in wanted[_AHEAD:])
        reads: deque[Future[None]] = deque()
        try:
            for block, pieces in wanted:
                then = next(following, None)
                reads.append(self._pool.submit(self._read, block, pieces, then))
            while reads:  # none is kept: an error would hold itself, by this frame and its future
                reads.popleft().result()
        finally:
            for read in reads:
                read.cancel()
            wait(reads)

    def _expect(self, number: int) -> None:
        """Let the page cache begin to read a block."""
        begin = number * BLOCK_BYTES
        ask_for(self._file, begin, min(begin + BLOCK_BYTES, self.record.bytes))

    def _read(self, number: int, pieces: Sequence[Piece], then: int | None) -> None:
        """Read a block to where its pieces go, and compare all of it.

        Args:
            then: a block that will be read some time after it.
        """
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.record.bytes)
        data = self._read_directly(begin, end)
        try:
            if data is None:
                into = self._memory(begin, end, pieces)
                count = self._read_in_turn(into, begin, then)
            else:
                into = [data]
                count = end - begin
        except OSError as error:
            raise self._unreadable(error) from error
        if count != end - begin or not self.record.is_block(number, *into):
            raise CheckpointError(
                f"{self.path} was changed since it was written: its bytes {begin} to {end} have "
                "another hash"
            )
        if data is not None:
            for first, target in pieces:
                target[:] = data[first - begin : first - begin + len(target)]

    def _read_directly(self, begin: int, end: int) -> memoryview | None:
        """Read a block past the page cache, into this thread's memory.

        Returns:
            Its bytes; None if they are in the cache, or are not had at one go: the other way tells
            why, and reads what can be read.
        """
        if self._direct is None or self._cache is None or self._is_refused:
            return None
        if self._cache.has(begin, end):
            return None
        memory = _memory_of_thread()
        try:  # beyond the end, as all that is asked for are whole pages
            count = os.preadv(self._direct, [memory], begin)
        except OSError:
            self._is_refused = True
            return None
        return memory[: end - begin] if count >= end - begin else None

    def _read_in_turn(self, into: Sequence[memoryview], begin: int, then: int | None) -> int:
        """Read through the page cache.

        Returns:
            How many bytes were read.
        """
        with self._reads:
            if then is not None:  # where this one was in the cache, that one is most probably
                self._expect(then)
            return self._fill(into, begin)

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
        between = _memory_of_thread()
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


def _open_direct(path: Path) -> int | None:
    """Open a file past the page cache, where its system and this one can."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return None


def _read_nothing_ahead(file: int) -> None:
    """Let the page cache read what it is asked for and no more: who peeks waits for all of it."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def _memory_of_thread() -> memoryview:
    """Memory for a block that begins at a page, as direct reads ask, in large pages where there
    are some: a disk is asked for less at once where they are small."""
    memory: memoryview | None = getattr(_of_thread, "memory", None)
    if memory is None or len(memory) != BLOCK_BYTES:
        try:
            pages = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:  # which is no fault of the file
            raise MemoryError(f"{BLOCK_BYTES} bytes to read a block into: {error}") from error
        with contextlib.suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = _of_thread.memory = memoryview(pages)
    return memory


def ask_for(file: int, begin: int, end: int) -> None:
    """Let the system begin to read a stretch of a file, where it can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for at in range(begin, end, _AT_ONCE_BYTES):
        with contextlib.suppress(OSError):  # which whoever reads it will meet
            os.posix_fadvise(file, at, min(_AT_ONCE_BYTES, end - at), os.POSIX_FADV_WILLNEED)
