"""`fxzero.checkpoint.blocks`: a file whose every byte was checked before anybody sees it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxzero.checkpoint import blocks, manifest, reader, writer
from fxzero.checkpoint.blocks import CheckedFile, Part
from fxzero.checkpoint.manifest import hash_blocks
from fxzero.checkpoint.writer import HashedFile
from fxzero.errors import CheckpointError

SMALL = 64


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Many blocks in a short file."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, manifest, writer):
            patch.setattr(module, "BLOCK_BYTES", SMALL)
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


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(0, 1500),
    reads=st.lists(st.tuples(st.integers(0, 1600), st.integers(0, 400)), max_size=8),
)
def test_any_stretch_reads_as_from_the_file(
    pool: ThreadPoolExecutor,
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    reads: list[tuple[int, int]],
) -> None:
    """In any order, beyond the end too."""
    path = tmp_path_factory.getbasetemp() / "any"
    data = os.urandom(size)
    path.write_bytes(data)
    with CheckedFile(path, hash_blocks(data), pool) as file:
        for begin, length in reads:
            file.seek(begin)
            assert file.read(length) == data[begin : begin + length]
            part, plain = Part(file, begin, length), io.BytesIO(data[begin : begin + length])
            for offset in (length // 2, 0, length // 3):
                part.seek(offset)
                plain.seek(offset)
                assert part.read(7) == plain.read(7)
            part.seek(0)
            plain.seek(0)
            assert part.read() == plain.read()


def test_a_changed_byte_is_met_by_whoever_reads_its_block(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """And by `check`; those of other blocks are read."""
    data = bytes(1000)
    path = tmp_path / "file"
    path.write_bytes(data)
    record = hash_blocks(data)
    changed = bytearray(data)
    changed[500] = 1
    path.write_bytes(changed)
    with CheckedFile(path, record, pool) as file:
        assert file.read(SMALL) == bytes(SMALL)
        file.seek(460)
        with pytest.raises(CheckpointError, match=rf"{path} was changed.*448 to 512"):
            file.read(60)
        file.seek(900)
        assert file.read(60) == bytes(60)
        with pytest.raises(CheckpointError, match=str(path)):
            file.check()


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
    """With their reader, also if what was read ahead was never wanted or is wrong."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    before = len(os.listdir("/proc/self/fd"))
    for record in (hash_blocks(bytes(1000)), hash_blocks(b"\1" * 1000)):
        for _ in range(20):
            file = CheckedFile(path, record, pool)
            with contextlib.suppress(CheckpointError):
                file.read(1)
            file.close()
            file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_will_be_wanted_is_asked_for_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, in order; one that is not there is met by who reads it."""
    path = tmp_path / "file"
    path.write_bytes(bytes((3 << 20) + 5))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, begin, size, how: asked.append((begin, size))
    )
    reader._begin_to_read(path)
    assert asked == [(i << 20, 1 << 20) for i in range(4)]
    reader._begin_to_read(tmp_path / "missing")
    assert len(asked) == 4
