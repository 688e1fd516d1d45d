"""Bytes on disk that look like memory: written and checked in chunks, read by anybody.

    section   exp_avg of a bucket    ├── piece ──┼── piece ──┼─ piece ─┤   up to chunk_bytes each
    files     disk 0, disk 1         piece 0, 2, …           piece 1, 3, …
    mapping   one stretch of addresses, in which each section lies in one piece

A step reads and writes pieces past the mapping, and each is checked against what was written last.
Whoever else looks at the bytes does so through the mapping, which shows what is in the files. It is
a private one: what somebody writes there stays in memory, and the kernel's page map says that it
does (a page that is no file's). Before the next step such pages are written to the files, so that a
loaded checkpoint, or a parameter that was set by hand, is what the step begins with.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fxzero.disk.scratch import BLOCK, DiskSettings, ScratchFile, pages
from fxzero.errors import DiskError

_GO_BACK = "What is computed from it is lost: load a checkpoint."
_PAGE = mmap.PAGESIZE
_WRITE_AT = 64 << 20
"""Bytes that may wait in memory until they are written."""
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Address space alone: what nobody writes to takes no memory. (Python knows it from 3.13 on.)"""
_FIXED = 0x10
_PAGE_IS_THERE = np.uint64(0b11 << 62)
"""Of an entry of ``/proc/self/pagemap``: in memory, or swapped out."""
_PAGE_IS_OF_FILE = np.uint64(1 << 61)


def in_blocks(num_bytes: int) -> int:
    """So many bytes, rounded up to whole blocks."""
    return -(-num_bytes // BLOCK) * BLOCK


@dataclass(frozen=True)
class Piece:
    """What is read, checked and written at once."""

    number: int
    file: int
    offset: int
    """In its file."""
    begin: int
    """In the mapping."""
    num_bytes: int
    section: str
    """What it is a part of, for messages."""


@dataclass(frozen=True)
class Section:
    """A stretch of bytes."""

    name: str
    begin: int
    """In the mapping."""
    pieces: tuple[Piece, ...]


def sections_of(sizes: Sequence[tuple[str, int]], settings: DiskSettings) -> list[Section]:
    """Cut some stretches, by name and size, into pieces, and give each a place in a file."""
    ends = [0] * len(settings.folders)
    found, begin, number = [], 0, 0
    for name, num_bytes in sizes:
        first, pieces = begin, []
        left = in_blocks(num_bytes)
        while left:
            own = min(left, settings.chunk_bytes)
            file = number % len(ends)
            pieces.append(Piece(number, file, ends[file], begin, own, name))
            ends[file] += own
            begin, left, number = begin + own, left - own, number + 1
        found.append(Section(name, first, tuple(pieces)))
    return found


class DiskStore:
    """Sections in scratch files.

    Args:
        sizes: their names and bytes.

    Raises:
        DiskError: there is no room, no right to write, or no page map to see what somebody wrote.
    """

    def __init__(self, sizes: Sequence[tuple[str, int]], settings: DiskSettings) -> None:
        self.settings = settings
        self.sections = sections_of(sizes, settings)
        self.pieces = [piece for section in self.sections for piece in section.pieces]
        self.num_bytes = sum(piece.num_bytes for piece in self.pieces)
        """All of it, in all files."""
        os.close(_open_page_map())  # before anything is moved
        per_file = [
            sum(piece.num_bytes for piece in self.pieces if piece.file == i)
            for i in range(len(settings.folders))
        ]
        self.files = [
            ScratchFile(folder, size)
            for folder, size in zip(settings.folders, per_file, strict=True)
        ]
        self._checksums: list[int | None] = [None] * len(self.pieces)
        """Of what was last written; None before that."""
        self._mapped = self._map()
        self.memory = memoryview(self._mapped)
        """The mapping: what is on disk, and in its stead what somebody has written here since."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        """Where it begins."""
        self._unwritten_bytes = 0
        """What `put` has left in the mapping."""
        self._expected: set[int] = set()
        """Pieces that are being loaded."""
        self.failures: list[DiskError] = []
        """Writes of a step that failed, and that nobody has been told of."""
        self._pid = os.getpid()
        self._buffer = pages(settings.chunk_bytes)
        self._using_buffer = threading.RLock()
        self._threads = _Threads(settings.depth)

    def read(self, piece: Piece, buffer: memoryview) -> None:
        """Fill a buffer with a piece, and see that it is what was written.

        Raises:
            DiskError: it cannot be read, or is something else.
        """
        buffer = buffer[: piece.num_bytes]
        where = f"{piece.section}, bytes {piece.offset} to {piece.offset + piece.num_bytes} of a "
        where += f"scratch file in {self.files[piece.file].folder}"
        try:
            self.files[piece.file].read(piece.offset, buffer)
        except OSError as error:
            raise DiskError(f"reading {where}: {error.strerror}. {_GO_BACK}") from error
        wanted = self._checksums[piece.number]
        if wanted is not None and zlib.crc32(buffer) != wanted:
            raise DiskError(
                f"{where}, are not what was written there (checksum {zlib.crc32(buffer):08x}, "
                f"expected {wanted:08x}): the disk, or somebody, has changed them. {_GO_BACK}"
            )

    def write(self, piece: Piece, buffer: memoryview) -> None:
        """Write a piece. If that fails its bytes are kept in memory, in the mapping.

        Raises:
            DiskError: it cannot be written.
        """
        buffer = buffer[: piece.num_bytes]
        try:
            self.files[piece.file].write(piece.offset, buffer)
        except OSError as error:
            self._checksums[piece.number] = None  # it may have been written in part
            self.memory[piece.begin : piece.begin + piece.num_bytes] = buffer
            raise DiskError(
                f"writing {piece.section}, {piece.num_bytes} bytes in "
                f"{self.files[piece.file].folder}: {error.strerror}. Nothing is lost: they stay in "
                "memory, this step's update is complete, and the next step writes them again. Save "
                "a checkpoint, and see what is wrong with the disk."
            ) from error
        self._checksums[piece.number] = zlib.crc32(buffer)

    def start_reading(self, piece: Piece, buffer: memoryview) -> Future[None]:
        """`read`, on a thread of its own."""
        return self._threads.readers.submit(self.read, piece, buffer)

    def start_writing(self, piece: Piece, buffer: memoryview) -> Future[None]:
        """`write`, on a thread of its own."""
        return self._threads.writers.submit(self.write, piece, buffer)

    def put(self, begin: int, source: memoryview) -> None:
        """Change some bytes: whole pieces go to the files, and what is left to the mapping.

        Raises:
            DiskError: a piece cannot be written.
        """
        end = begin + len(source)
        with self._using_buffer:
            for piece in self._between(begin, end):
                first, last = max(begin, piece.begin), min(end, piece.begin + piece.num_bytes)
                part = source[first - begin : last - begin]
                if len(part) == piece.num_bytes:
                    self._forget(piece)
                    self._checksums[piece.number] = None
                    self._buffer[: len(part)] = part
                    self.write(piece, self._buffer)
                else:
                    self.memory[first:last] = part
                    self._unwritten_bytes += len(part)
            if self._unwritten_bytes > _WRITE_AT:
                self.write_changes()

    def write_changes(self) -> int:
        """Write what somebody has changed in the mapping to the files; return how many pieces.

        Raises:
            DiskError: one cannot be written, or what is around a change cannot be read.
        """
        if os.getpid() != self._pid:
            raise DiskError(
                "this process was forked from one that holds tensors on disk, and shares its "
                "files: a step here would change them there. Train in a process that was spawned."
            )
        with self._using_buffer:
            return self._write_changes()

    def _write_changes(self) -> int:
        self._unwritten_bytes = 0
        changed = self.changed_pages()
        numbers = np.unique(np.searchsorted(self._begins, changed * _PAGE, side="right") - 1)
        for number in numbers.tolist():
            piece = self.pieces[number]
            edges = (piece.begin // _PAGE, (piece.begin + piece.num_bytes) // _PAGE)
            first, last = np.searchsorted(changed, edges).tolist()
            is_whole = (last - first) * _PAGE == piece.num_bytes
            if self._checksums[number] is None or (is_whole and number in self._expected):
                self._buffer[: piece.num_bytes] = self._mapped_bytes(piece)
            else:
                self.read(piece, self._buffer)
                for page in changed[first:last].tolist():
                    at = page * _PAGE
                    self._buffer[at - piece.begin :][:_PAGE] = self.memory[at : at + _PAGE]
            self.write(piece, self._buffer)
            self._forget(piece)
        self._expected.clear()
        return len(numbers)

    def expect(self, section: Section) -> None:
        """A section is about to be loaded: where all of a piece is written over before the next
        step, what was there before does not matter, were it right or not."""
        self._expected |= {piece.number for piece in section.pieces}

    def changed_pages(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The pages of the mapping that somebody has written to since they were on disk."""
        pages = _open_page_map()  # each time: a forked process has its own
        try:
            first, count = self.address // _PAGE, self.num_bytes // _PAGE
            entries = np.frombuffer(_read_all(pages, first * 8, count * 8), dtype=np.uint64)
        finally:
            os.close(pages)
        is_private = ((entries & _PAGE_IS_THERE) != 0) & ((entries & _PAGE_IS_OF_FILE) == 0)
        return np.nonzero(is_private)[0]

    def check(self, section: Section) -> None:
        """See that what is on disk is what was written there: for whoever will read it through the
        mapping, which nothing checks.

        Raises:
            DiskError: a piece is not.
        """
        with self._using_buffer:
            for piece in section.pieces:
                if self._checksums[piece.number] is not None:
                    self.read(piece, self._buffer)

    def _mapped_bytes(self, piece: Piece) -> memoryview:
        return self.memory[piece.begin : piece.begin + piece.num_bytes]

    def _forget(self, piece: Piece) -> None:
        """Let the mapping show what is on disk again."""
        self._mapped.madvise(mmap.MADV_DONTNEED, piece.begin, piece.num_bytes)

    def _number_at(self, begin: int) -> int:
        return int(np.searchsorted(self._begins, begin, side="right")) - 1

    def _between(self, begin: int, end: int) -> list[Piece]:
        """The pieces that some bytes of the mapping are in."""
        if begin == end:
            return []
        return self.pieces[self._number_at(begin) : self._number_at(end - 1) + 1]

    def _map(self) -> mmap.mmap:
        """Show all pieces, one behind the other, in one stretch of addresses."""
        self._begins = np.array([piece.begin for piece in self.pieces], dtype=np.int64)
        size = max(self.num_bytes, BLOCK)
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        if len(self.files) == 1 and self.num_bytes:
            return mmap.mmap(self.files[0].fd, size, flags=flags, prot=_PROTECTION)
        reserved = mmap.mmap(-1, size, flags=flags | mmap.MAP_ANONYMOUS, prot=_PROTECTION)
        address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        most = _most_mappings()
        if len(self.pieces) > most // 2:
            raise DiskError(
                f"disk.chunk_bytes={self.settings.chunk_bytes} makes {len(self.pieces)} stripes "
                f"over {len(self.files)} folders, and this system maps {most} at most "
                "(vm.max_map_count). Raise disk.chunk_bytes."
            )
        for piece in self.pieces:
            _map_at(address + piece.begin, piece, self.files[piece.file].fd, flags | _FIXED)
        return reserved


class _Threads:
    """Threads that read and write; a forked process makes its own."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._pid = 0
        self._lock = threading.Lock()

    def _make(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._readers = ThreadPoolExecutor(self._depth, "fxzero-disk-read")
                self._writers = ThreadPoolExecutor(self._depth, "fxzero-disk-write")
                self._pid = os.getpid()

    @property
    def readers(self) -> ThreadPoolExecutor:
        """What reads."""
        self._make()
        return self._readers

    @property
    def writers(self) -> ThreadPoolExecutor:
        """What writes."""
        self._make()
        return self._writers


def _map_at(address: int, piece: Piece, fd: int, flags: int) -> None:
    """Show a piece of a file at an address that is ours."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    found = call(address, piece.num_bytes, _PROTECTION, flags, fd, piece.offset)
    if found != address:
        raise DiskError(f"mapping a scratch file: {os.strerror(ctypes.get_errno())}")


def _most_mappings() -> int:
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65530


def _open_page_map() -> int:
    """What says which pages are whose.

    Raises:
        DiskError: this system has none.
    """
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DiskError(
            "what somebody writes to a tensor on disk is found by /proc/self/pagemap, which cannot "
            f"be read here ({error.strerror}). Without it nothing can be held on disk: use "
            "memory='all_host'."
        ) from error


def _read_all(fd: int, offset: int, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = os.pread(fd, num_bytes - len(found), offset + len(found))
        if not part:
            raise DiskError("/proc/self/pagemap ends before the last page of a scratch file")
        found += part
    return found
