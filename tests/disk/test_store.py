"""Bytes on disk that look like memory: striped, checked, and written to by anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxzero.disk.scratch import BLOCK, DiskSettings, ScratchFile, pages
from fxzero.disk.store import DiskStore, sections_of
from fxzero.errors import DiskError


def store_in(*folders: Path, sizes: tuple[int, ...] = (3 * BLOCK, 100, 5 * BLOCK)) -> DiskStore:
    """Pieces of two blocks."""
    names = [(f"section {i}", size) for i, size in enumerate(sizes)]
    return DiskStore(names, DiskSettings(tuple(map(str, folders)), chunk_bytes=2 * BLOCK))


def numbered(store: DiskStore) -> None:
    """Write each piece, full of its number."""
    for piece in store.pieces:
        memory = pages(piece.num_bytes)
        memory[:] = bytes([piece.number + 1]) * piece.num_bytes
        store.write(piece, memory)


def flip(store: DiskStore, number: int, at: int = 5) -> None:
    """Change one bit of a piece behind the store's back."""
    piece = store.pieces[number]
    fd = os.open(f"/proc/self/fd/{store.files[piece.file].fd}", os.O_RDWR)
    (byte,) = os.pread(fd, 1, piece.offset + at)
    os.pwrite(fd, bytes([byte ^ 4]), piece.offset + at)
    os.close(fd)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 7 * BLOCK), max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_pieces_cover_everything_once(sizes: list[int], blocks: int, num_folders: int) -> None:
    """In the mapping and in each file they lie one behind the other, none is longer than a chunk,
    and those of a section follow each other."""
    config = DiskSettings(tuple(f"/{i}" for i in range(num_folders)), chunk_bytes=blocks * BLOCK)
    sections = sections_of([(str(i), size) for i, size in enumerate(sizes)], config)
    pieces = [piece for section in sections for piece in section.pieces]
    ends = [0] * num_folders
    end = 0
    for i, piece in enumerate(pieces):
        assert (piece.number, piece.begin, piece.offset) == (i, end, ends[piece.file])
        assert 0 < piece.num_bytes <= config.chunk_bytes
        assert piece.num_bytes % BLOCK == 0
        end += piece.num_bytes
        ends[piece.file] += piece.num_bytes
    for section, size in zip(sections, sizes, strict=True):
        assert 0 <= sum(piece.num_bytes for piece in section.pieces) - size < BLOCK


@pytest.mark.parametrize("num_folders", [1, 3])
def test_the_mapping_shows_what_was_written(tmp_path: Path, num_folders: int) -> None:
    """Whatever file it is in, and after it was written over."""
    store = store_in(*(tmp_path / str(i) for i in range(num_folders)))
    for _ in range(2):
        numbered(store)
        for piece in store.pieces:
            own = store.memory[piece.begin : piece.begin + piece.num_bytes]
            assert bytes(own) == bytes([piece.number + 1]) * piece.num_bytes
    assert not len(store.changed_pages())


@pytest.mark.parametrize("num_folders", [1, 2])
def test_what_somebody_writes_is_found_and_goes_to_disk(tmp_path: Path, num_folders: int) -> None:
    """One byte: its piece is written, with what is around it, and checked from then on."""
    store = store_in(*(tmp_path / str(i) for i in range(num_folders)))
    numbered(store)
    at = store.pieces[1].begin + 17
    store.memory[at] = 99
    assert store.changed_pages().tolist() == [at // BLOCK]
    assert store.write_changes() == 1
    assert not len(store.changed_pages())
    found = pages(2 * BLOCK)
    store.read(store.pieces[1], found)
    assert found[17] == 99
    assert set(found[: store.pieces[1].num_bytes]) == {2, 99}
    assert store.memory[at] == 99


def test_a_write_of_a_step_is_not_a_change(tmp_path: Path) -> None:
    """Nor is a page that somebody has read."""
    store = store_in(tmp_path)
    numbered(store)
    assert sum(store.memory) > 0
    numbered(store)
    assert store.write_changes() == 0


def test_put_spans_pieces(tmp_path: Path) -> None:
    """Whole pieces and parts of them, in one stretch."""
    store = store_in(tmp_path)
    source = bytes(i % 251 for i in range(5 * BLOCK))
    store.put(100, memoryview(source))
    store.write_changes()
    assert bytes(store.memory[100 : 100 + len(source)]) == source
    assert bytes(store.memory[:100]) == bytes(100)
    found = pages(2 * BLOCK)
    store.read(store.pieces[0], found)
    assert bytes(found[100:]) == source[: 2 * BLOCK - 100]


def test_a_bit_that_has_changed(tmp_path: Path) -> None:
    """What it is part of, where it is, and what to do; the other pieces are fine."""
    store = store_in(tmp_path)
    numbered(store)
    flip(store, 2)
    with pytest.raises(DiskError, match=r"section 1, bytes .* in .* are not what was written"):
        store.read(store.pieces[2], pages(2 * BLOCK))
    with pytest.raises(DiskError, match="section 1"):
        store.check(store.sections[1])
    for section in (store.sections[0], store.sections[2]):
        store.check(section)


def test_a_change_beside_a_bit_that_has_changed(tmp_path: Path) -> None:
    """What is around a change is read and checked: a new checksum does not bless it."""
    store = store_in(tmp_path, sizes=(4 * BLOCK,))
    numbered(store)
    flip(store, 0)
    store.memory[BLOCK] = 1  # another page of the piece
    with pytest.raises(DiskError, match="are not what was written"):
        store.write_changes()


def test_a_write_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in memory, and written when the disk is right again."""
    store = store_in(tmp_path)
    numbered(store)
    memory = pages(2 * BLOCK)
    memory[:] = b"\x63" * len(memory)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(ScratchFile, "write", fail)
        with pytest.raises(DiskError, match=r"writing section 0, .*Input/output error\. Nothing"):
            store.write(store.pieces[0], memory)
        with pytest.raises(DiskError, match="Nothing is lost"):
            store.write_changes()
    assert set(store.memory[: 2 * BLOCK]) == {99}
    assert store.write_changes() == 1
    found = pages(2 * BLOCK)
    store.read(store.pieces[0], found)
    assert set(found) == {99}


def test_more_stripes_than_the_system_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting that makes fewer is named."""
    monkeypatch.setattr("fxzero.disk.store._most_mappings", lambda: 4)
    with pytest.raises(DiskError, match=r"chunk_bytes=8192 makes 6 stripes .* Raise disk"):
        store_in(tmp_path / "a", tmp_path / "b")


def test_a_system_without_page_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, as writes by hand could not be seen."""
    real = os.open

    def refuse(path: object, *args: int) -> int:
        if path == "/proc/self/pagemap":
            raise OSError(13, "Permission denied")
        return real(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskError, match="pagemap, which cannot be read here"):
        store_in(tmp_path)
