"""`fxzero.checkpoint.blocks`: a file whose every byte was checked before anybody sees it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxzero.checkpoint import blocks, manifest, writer
from fxzero.checkpoint.blocks import CheckedFile
from fxzero.checkpoint.manifest import hash_blocks
from fxzero.checkpoint.page_cache import PageCache
from fxzero.checkpoint.writer import HashedFile
from fxzero.errors import CheckpointError

SMALL = 64


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Many blocks in a short file; of no whole pages, so that none goes past the page cache."""
    with _blocks_of(SMALL):
        yield


@contextlib.contextmanager
def _blocks_of(num_bytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, manifest, writer):
            patch.setattr(module, "BLOCK_BYTES", num_bytes)
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that read."""
    with ThreadPoolExecutor(2) as made:
        yield made


def test_what_is_written_in_pieces_has_the_hashes_of_the_whole(tmp_path: Path) -> None:
    """Pieces that end within blocks, at them, and span several."""
    data = os.urandom(1000)
    file = HashedFile(tmp_path / "file")
    at = 0
    for size in (0, 1, 63, 64, 65, 128, 500, 1000):
        file.write(memoryview(data)[at : at + size])
        at += size
    assert file.finish() == hash_blocks(data)
    assert (tmp_path / "file").read_bytes() == data


def read(file: CheckedFile, begin: int, size: int) -> bytes:
    """A stretch of a file."""
    data = bytearray(size)
    file.fill([(begin, memoryview(data))])
    return bytes(data)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 1500),
    cuts=st.lists(st.integers(0, 1500), max_size=12),
    at_once=st.integers(1, 5),
    order=st.randoms(),
)
def test_stretches_are_as_in_the_file(
    pool: ThreadPoolExecutor,
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    cuts: list[int],
    at_once: int,
    order: random.Random,
) -> None:
    """In any order, of any length, and what is between them is left out; also by more reads than
    one, where the system takes fewer stretches at once."""
    path = tmp_path_factory.getbasetemp() / "any"
    data = os.urandom(size)
    path.write_bytes(data)
    ends = sorted(min(cut, size) for cut in cuts)
    spans = list(itertools.pairwise(ends))[::2]
    order.shuffle(spans)
    found = [bytearray(end - begin) for begin, end in spans]
    with (
        pytest.MonkeyPatch.context() as patch,
        CheckedFile(path, hash_blocks(data), pool) as file,
    ):
        patch.setattr(blocks, "_MOST_AT_ONCE", at_once)
        file.fill([(span[0], memoryview(into)) for span, into in zip(spans, found, strict=True)])
        file.check()
    assert found == [data[begin:end] for begin, end in spans]


def test_a_system_that_reads_less_than_it_is_asked_for(
    pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one over a network may, in the middle of a piece or at its end: it is asked again."""
    path = tmp_path / "file"
    data = os.urandom(1000)
    path.write_bytes(data)
    real = os.preadv

    def preadv(file: int, into: Sequence[memoryview], begin: int, flags: int = 0) -> int:
        if flags:
            return real(file, into, begin, flags)
        some = max(sum(map(len, into)) // 3, 1)
        return real(file, [memoryview(part := bytearray(some))], begin) and spread(part, into)

    monkeypatch.setattr(os, "preadv", preadv)
    with CheckedFile(path, hash_blocks(data), pool) as file:
        found = [bytearray(n) for n in (1, 30, 200, 7)]
        at = (5, 6, 40, 700)
        file.fill([(begin, memoryview(into)) for begin, into in zip(at, found, strict=True)])
    assert found == [data[b : b + len(into)] for b, into in zip(at, found, strict=True)]


def spread(data: bytearray, into: Sequence[memoryview]) -> int:
    """Put some bytes into the first of some pieces of memory, as `preadv` does."""
    count = len(data)
    for piece in into:
        size = min(len(piece), len(data))
        piece[:size] = data[:size]
        del data[:size]
    return count


def test_beyond_the_end(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """It says what there is and what was wanted."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with (
        CheckedFile(path, hash_blocks(bytes(100)), pool) as file,
        pytest.raises(CheckpointError, match="has 100 bytes, and 90 to 101 are wanted"),
    ):
        read(file, 90, 11)


def test_a_changed_byte_is_met_by_whoever_reads_its_block(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Also if it is beside what is wanted, and by `check`; those of other blocks are read."""
    data = bytes(1000)
    path = tmp_path / "file"
    path.write_bytes(data)
    record = hash_blocks(data)
    changed = bytearray(data)
    changed[500] = 1
    path.write_bytes(changed)
    with CheckedFile(path, record, pool) as file:
        assert read(file, 0, SMALL) == bytes(SMALL)
        for begin, size in ((460, 60), (449, 1), (500, 1), (511, 2)):
            with pytest.raises(CheckpointError, match=rf"{path} was changed.*448 to 512"):
                read(file, begin, size)
        assert read(file, 900, 60) == bytes(60)
        file.check(0, 448)
        file.check(512)
        for begin, end in ((0, None), (447, 449), (511, 600)):
            with pytest.raises(CheckpointError, match=str(path)):
                file.check(begin, end)


def test_nobody_writes_into_memory_behind_an_error(
    pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has met it may use the memory for something else."""
    path = tmp_path / "file"
    data = b"\1" * 1000
    path.write_bytes(b"\2" * SMALL + data[SMALL:])
    slow = os.preadv
    began = threading.Event()

    def preadv(file: int, into: Sequence[memoryview], begin: int, flags: int = 0) -> int:
        if flags:
            return slow(file, into, begin, flags)
        if begin:
            began.set()
            time.sleep(0.05)
        else:
            began.wait(1)
        return slow(file, into, begin)

    monkeypatch.setattr(os, "preadv", preadv)
    into = bytearray(1000)
    with CheckedFile(path, hash_blocks(data), pool) as file:
        file._reads = contextlib.nullcontext()  # type: ignore[assignment]
        with pytest.raises(CheckpointError):
            file.fill([(0, memoryview(into))])
        into[:] = bytes(1000)
        time.sleep(0.2)  # with the file still open
        assert into == bytes(1000)


@pytest.mark.parametrize("length", [0, 1, 64, 500, 999])
def test_a_file_that_became_shorter_is_met(
    pool: ThreadPoolExecutor, tmp_path: Path, length: int
) -> None:
    """After its length was looked at, too."""
    path = tmp_path / "file"
    path.write_bytes(bytes(length))
    with (
        CheckedFile(path, hash_blocks(bytes(1000)), pool) as file,
        pytest.raises(CheckpointError, match=str(path)),
    ):
        file.check()


def test_no_file_and_no_file_of_bytes(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Both name it."""
    record = hash_blocks(b"abc")
    with pytest.raises(CheckpointError, match="none cannot be read: No such file"):
        CheckedFile(tmp_path / "none", record, pool)
    with (
        CheckedFile(tmp_path, record, pool) as file,
        pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read: Is a directory"),
    ):
        file.check()


def test_files_are_closed(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """With their reader, whatever it met."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    before = len(os.listdir("/proc/self/fd"))
    for record in (hash_blocks(bytes(1000)), hash_blocks(b"\1" * 1000)):
        for _ in range(20):
            with (
                contextlib.suppress(CheckpointError),
                CheckedFile(path, record, pool) as file,
            ):
                read(file, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_blocks_are_asked_for_before_they_are_read(
    pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few ahead, each once, and none that nobody wants, where all go through the page cache."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    events: list[tuple[str, int]] = []
    real = os.preadv

    def preadv(file: int, into: Sequence[memoryview], begin: int, flags: int = 0) -> int:
        events.append(("read", begin // SMALL))
        return real(file, into, begin)

    def advise(_: int, begin: int, size: int, how: int) -> None:
        events.append(("ask", begin // SMALL))

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(blocks, "_open_direct", lambda path: None)
    with CheckedFile(path, hash_blocks(bytes(1000)), pool) as file:
        wanted = [0, 1, 2, 5, 6, 7, 8, 12]
        file.fill([(block * SMALL, memoryview(bytearray(SMALL))) for block in wanted])
    # Of two threads one may pass the other.
    assert sorted(block for what, block in events if what == "ask") == wanted
    for i, block in enumerate(wanted):
        before = events[: events.index(("read", block))]
        assert sum(what == "ask" for what, _ in before) >= min(i + blocks._AHEAD, len(wanted) - 1)


class Direct:
    """What goes past the page cache, in blocks of a page, of files that are not in it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.path = folder / "file"
        self.path.write_bytes(bytes(PAGE))
        opened = blocks._open_direct(self.path)
        if opened is None:
            pytest.skip(f"the file system of {folder} refuses direct I/O")
        os.close(opened)
        patch.setattr(PageCache, "has", lambda *_: False)
        self.in_turn: list[int] = []
        """Begins of blocks that went through it."""
        read = CheckedFile._read_in_turn

        def read_in_turn(file: CheckedFile, into: Any, begin: int, then: int | None) -> int:
            self.in_turn.append(begin)
            return read(file, into, begin, then)

        patch.setattr(CheckedFile, "_read_in_turn", read_in_turn)


PAGE = mmap.PAGESIZE


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[Direct]:
    """See there."""
    with _blocks_of(PAGE), pytest.MonkeyPatch.context() as patch:
        yield Direct(tmp_path, patch)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.integers(0, 9 * PAGE),
    cuts=st.lists(st.integers(0, 9 * PAGE), max_size=12),
    order=st.randoms(),
)
def test_stretches_past_the_page_cache_are_as_in_the_file(
    pool: ThreadPoolExecutor, direct: Direct, size: int, cuts: list[int], order: random.Random
) -> None:
    """In any order, of any length, in a file that ends anywhere; none goes through it."""
    data = os.urandom(size)
    direct.path.write_bytes(data)
    ends = sorted(min(cut, size) for cut in cuts)
    spans = list(itertools.pairwise(ends))[::2]
    order.shuffle(spans)
    found = [bytearray(end - begin) for begin, end in spans]
    with CheckedFile(direct.path, hash_blocks(data), pool, is_alone=True) as file:
        file.fill([(span[0], memoryview(into)) for span, into in zip(spans, found, strict=True)])
        file.check()
    assert found == [data[begin:end] for begin, end in spans]
    assert direct.in_turn == []


def test_what_was_changed_never_comes_to_memory(pool: ThreadPoolExecutor, direct: Direct) -> None:
    """It is hashed before it is copied to anybody; the other blocks are read."""
    data = b"\1" * (3 * PAGE)
    direct.path.write_bytes(data[:PAGE] + b"\2" * PAGE + data[:PAGE])
    with CheckedFile(direct.path, hash_blocks(data), pool, is_alone=True) as file:
        into = bytearray(2 * PAGE)
        with pytest.raises(CheckpointError, match=rf"{direct.path} was changed.*{PAGE} to"):
            file.fill([(PAGE // 2, memoryview(into))])
        assert set(into) <= {0, 1}
        assert read(file, 0, PAGE) + read(file, 2 * PAGE, PAGE) == b"\1" * (2 * PAGE)


@pytest.mark.parametrize("length", [0, 1, PAGE, 2 * PAGE + 5])
def test_a_shorter_file_past_the_page_cache(
    pool: ThreadPoolExecutor, direct: Direct, length: int
) -> None:
    """As through it."""
    direct.path.write_bytes(bytes(length))
    with (
        CheckedFile(direct.path, hash_blocks(bytes(3 * PAGE)), pool, is_alone=True) as file,
        pytest.raises(CheckpointError, match=f"{direct.path} was changed"),
    ):
        file.check()


@pytest.mark.parametrize("how", ["refused", "half", "unreadable"])
def test_what_a_system_does_not_read_directly_it_reads_otherwise(
    pool: ThreadPoolExecutor, direct: Direct, how: str
) -> None:
    """A file system that opens a file so and reads nothing, or less; a disk's error comes back by
    the other way, which tells it."""
    data = os.urandom(3 * PAGE + 7)
    direct.path.write_bytes(data)
    real = os.preadv
    with CheckedFile(direct.path, hash_blocks(data), pool, is_alone=True) as file:

        def preadv(fd: int, into: Sequence[memoryview], begin: int, flags: int = 0) -> int:
            if fd == file._direct and how == "half":
                return real(fd, into, begin) // 2
            if fd == file._direct or how == "unreadable":
                raise OSError(errno.EIO if how == "unreadable" else errno.EINVAL, "no disk")
            return real(fd, into, begin)

        direct.patch.setattr(os, "preadv", preadv)
        if how == "unreadable":
            with pytest.raises(CheckpointError, match=f"{direct.path} cannot be read: no disk"):
                file.check()
        else:
            assert read(file, 0, len(data)) == data
            assert sorted(direct.in_turn) == [0, PAGE, 2 * PAGE, 3 * PAGE]


def test_what_is_in_the_page_cache_is_taken_from_there(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """A file that was just written is, and one that the system has been let forget is not."""
    path = tmp_path / "file"
    data = os.urandom(8 * PAGE)
    with _blocks_of(PAGE):
        path.write_bytes(data)
        with CheckedFile(path, hash_blocks(data), pool, is_alone=True) as file:
            cache = file._cache
            assert cache is not None
            assert cache.has(0, PAGE)
            assert file._read_directly(0, PAGE) is None
            os.fsync(file._file)
            os.posix_fadvise(file._file, 0, 0, os.POSIX_FADV_DONTNEED)
            if cache.has(0, PAGE):
                pytest.skip(f"the file system of {tmp_path} is the page cache")
            for _ in range(2):  # to ask brings nothing there
                assert not cache.has(0, 8 * PAGE)
            assert file.peek(3 * PAGE, 1) == data[3 * PAGE : 3 * PAGE + 1]
            assert cache.has(3 * PAGE, 4 * PAGE)
            assert not cache.has(2 * PAGE, 4 * PAGE)
            assert read(file, 0, len(data)) == data


def test_threads_keep_one_block_each(tmp_path: Path) -> None:
    """However many files they read, and give it back when they end."""
    data = os.urandom(4 * PAGE)
    made: list[int] = []
    real = mmap.mmap

    def counted(*args: Any, **kwargs: Any) -> mmap.mmap:
        if args[0] == -1:  # memory, no file
            made.append(args[1])
        return real(*args, **kwargs)

    with _blocks_of(PAGE), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", counted)
        patch.setattr(PageCache, "has", lambda *_: False)
        with ThreadPoolExecutor(1) as pool:
            for i in range(5):
                path = tmp_path / f"file{i}"
                path.write_bytes(data)
                with CheckedFile(path, hash_blocks(data), pool, is_alone=True) as file:
                    file.check()
    assert made == [PAGE]


def test_who_is_told_that_all_is_cached_asks_ahead(
    pool: ThreadPoolExecutor, direct: Direct
) -> None:
    """As Linux tells who may not write to a file: it is read from the disk, and by itself the
    system would read nothing ahead."""
    data = os.urandom(8 * PAGE)
    direct.path.write_bytes(data)
    asked: list[int] = []
    direct.patch.setattr(PageCache, "has", lambda *_: True)
    with CheckedFile(direct.path, hash_blocks(data), pool, is_alone=True) as file:
        direct.patch.setattr(os, "posix_fadvise", lambda _, at, *__: asked.append(at // PAGE))
        assert read(file, 0, len(data)) == data
    assert sorted(asked) == list(range(blocks._AHEAD, 8))


def test_no_memory_is_no_fault_of_the_file(tmp_path: Path, direct: Direct) -> None:
    """A checkpoint that is whole is not skipped for it."""
    direct.path.write_bytes(bytes(PAGE))

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    direct.patch.setattr(mmap, "mmap", refuse)
    with (
        ThreadPoolExecutor(1) as pool,
        CheckedFile(direct.path, hash_blocks(bytes(PAGE)), pool, is_alone=True) as file,
        pytest.raises(MemoryError, match=f"{PAGE} bytes to read a block into"),
    ):
        file.check()


def test_nobody_reads_on_behind_a_thread_that_cannot_begin(direct: Direct) -> None:
    """What was begun before is waited for."""
    data = b"\1" * (4 * PAGE)
    direct.path.write_bytes(data)
    into = bytearray(len(data))
    with ThreadPoolExecutor(4) as pool:
        real = pool.submit

        def submit(what: Any, number: int, *args: Any) -> Any:
            if number == 3:
                raise RuntimeError("can't start new thread")
            return real(lambda: time.sleep(0.1) or what(number, *args))

        direct.patch.setattr(pool, "submit", submit)
        with CheckedFile(direct.path, hash_blocks(data), pool, is_alone=True) as file:
            with pytest.raises(RuntimeError, match="new thread"):
                file.fill([(0, memoryview(into))])
            into[:] = bytes(len(into))
            time.sleep(0.3)
            assert into == bytes(len(into))
