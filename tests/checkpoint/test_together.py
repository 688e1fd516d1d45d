"""`fxzero.checkpoint.together`: tensors of one file, right to where they belong."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from fxzero.checkpoint import together
from fxzero.checkpoint.archives import begin_of_bytes
from fxzero.checkpoint.blocks import CheckedFile
from fxzero.checkpoint.manifest import hash_blocks
from fxzero.checkpoint.together import Archive, Together
from fxzero.errors import CheckpointError


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that read."""
    with ThreadPoolExecutor(2) as made:
        yield made


def saved(tensor: Tensor) -> bytes:
    """An archive, as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def shifted(tensor: Tensor, begin: int, length: int) -> bytes:
    """An archive of some length, whose bytes begin at some place."""
    name = b"archive/data/0"
    header = b"PK\3\4" + bytes(22) + struct.pack("<HH", len(name), begin - 30 - len(name)) + name
    data = header.ljust(begin, b"\0") + tensor.numpy().tobytes()
    return data.ljust(length, b"\0")


def item(offsets: Sequence[int], lengths: Sequence[int]) -> ReadItem:
    """What is wanted of a part."""
    index = MetadataIndex("w")
    none = torch.Size([0] * len(offsets))
    return ReadItem(
        LoadItemType.TENSOR, index, none, index, torch.Size(offsets), torch.Size(lengths)
    )


def write(path: Path, archives: Sequence[bytes]) -> list[int]:
    """A file of some archives, and where each begins."""
    path.write_bytes(b"".join(archives))
    return [sum(len(a) for a in archives[:i]) for i in range(len(archives))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_rows_columns_and_scalars(
    pool: ThreadPoolExecutor, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Of a matrix, a vector, a number and nothing: as slices of them."""
    path = tmp_path / "file"
    wholes = [
        torch.randint(0, 100, shape).to(dtype) for shape in ((6, 5), (7,), (), (0, 3), (2, 3, 4))
    ]
    archives = [saved(whole) for whole in wholes]
    offsets = write(path, archives)
    wanted = [
        (0, (0, 0), (6, 5)),
        (1, (2,), (3,)),
        (2, (), ()),
        (3, (0, 0), (0, 3)),
        (4, (1, 0, 0), (1, 3, 4)),
        (4, (0, 1, 1), (2, 2, 3)),
    ]
    with CheckedFile(path, hash_blocks(path.read_bytes()), pool) as file:
        reads = Together(file)
        found = []
        for i, begin, lengths in wanted:
            archive = Archive(offsets[i], len(archives[i]), dtype, wholes[i].shape)
            target = torch.empty(lengths, dtype=dtype)
            reads.add(archive, item(begin, lengths), target)
            found.append(target)
        reads.read()
    for (i, begin, lengths), target in zip(wanted, found, strict=True):
        places = tuple(slice(b, b + n) for b, n in zip(begin, lengths, strict=True))
        assert torch.equal(target, wholes[i][places])


def test_several_parts_of_one_archive(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Rows one behind the other, the same twice, and into memory that is not dense."""
    path = tmp_path / "file"
    whole = torch.randn(8, 4)
    data = saved(whole)
    (offset,) = write(path, [data])
    spans = [(0, 2), (2, 3), (4, 4), (0, 8), (0, 8)]
    targets = [torch.zeros(n, 4) for _, n in spans[:-1]] + [torch.zeros(4, 8).t()]
    with CheckedFile(path, hash_blocks(data), pool) as file:
        reads = Together(file)
        archive = Archive(offset, len(data), whole.dtype, whole.shape)
        for (first, count), target in zip(spans, targets, strict=True):
            reads.add(archive, item((first, 0), (count, 4)), target)
        again = torch.zeros(8, 4)  # by another name
        reads.add(Archive(offset, len(data), whole.dtype, whole.shape), item((0, 0), (8, 4)), again)
        reads.read()
    for (first, count), target in zip(spans, targets, strict=True):
        assert torch.equal(target, whole[first : first + count])
    assert torch.equal(again, whole)


def test_little_is_kept_aside(
    pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many columns, as much as there is room for at once."""
    path = tmp_path / "file"
    wholes = [torch.randn(16, 16) for _ in range(20)]
    archives = [saved(whole) for whole in wholes]
    offsets = write(path, archives)
    monkeypatch.setattr(together, "_ASIDE_BYTES", 3000)
    fills = []
    with CheckedFile(path, hash_blocks(path.read_bytes()), pool) as file:
        fill = file.fill
        monkeypatch.setattr(file, "fill", lambda pieces: fills.append(len(pieces)) or fill(pieces))
        reads = Together(file)
        found = [torch.zeros(16, 3) for _ in wholes]
        for whole, offset, data, target in zip(wholes, offsets, archives, found, strict=True):
            archive = Archive(offset, len(data), whole.dtype, whole.shape)
            reads.add(archive, item((0, 5), (16, 3)), target)
        reads.read()
    assert fills == [6] * 6 + [4]  # three archives of a KiB at once: heads and bytes
    assert all(torch.equal(a, b[:, 5:8]) for a, b in zip(found, wholes, strict=True))


@pytest.mark.parametrize(("first", "second"), [(64, 128), (128, 64), (64, 900)])
def test_bytes_that_begin_elsewhere(
    pool: ThreadPoolExecutor, tmp_path: Path, first: int, second: int
) -> None:
    """In two archives that are alike otherwise: the guess is seen to be wrong."""
    path = tmp_path / "file"
    wholes = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10]
    archives = [shifted(w, begin, 1200) for w, begin in zip(wholes, (first, second), strict=True)]
    assert [begin_of_bytes(a) for a in archives] == [first, second]
    offsets = write(path, archives)
    found = [torch.zeros(1, 3), torch.zeros(1, 3)]
    with CheckedFile(path, hash_blocks(path.read_bytes()), pool) as file:
        reads = Together(file)
        for whole, offset, target in zip(wholes, offsets, found, strict=True):
            archive = Archive(offset, 1200, whole.dtype, whole.shape)
            reads.add(archive, item((1, 0), (1, 3)), target)
        reads.read()
    assert [target.tolist() for target in found] == [[[3, 4, 5]], [[13, 14, 15]]]


@pytest.mark.parametrize("second", [b"", b"PK\3\4", b"x" * 300])
def test_no_archive_where_one_should_be(
    pool: ThreadPoolExecutor, tmp_path: Path, second: bytes
) -> None:
    """As it was written, the first of its kind and a later one: there is none. As it was not: it
    was changed."""
    path = tmp_path / "file"
    data = saved(torch.arange(6.0))
    second = second.ljust(len(data), b"\0")
    for archives in ([data, second], [second, data]):
        offsets = write(path, archives)
        for record, said in (
            (hash_blocks(path.read_bytes()), "holds no tensor of 24 bytes where one should be"),
            (hash_blocks(bytes(2 * len(data))), "was changed since it was written"),
        ):
            with (
                CheckedFile(path, record, pool) as file,
                pytest.raises(CheckpointError, match=said),
            ):
                read_all(file, offsets, len(data))


def read_all(file: CheckedFile, offsets: Sequence[int], length: int) -> None:
    """Six numbers of each archive."""
    reads = Together(file)
    for offset in offsets:
        archive = Archive(offset, length, torch.float32, torch.Size([6]))
        reads.add(archive, item((0,), (6,)), torch.empty(6))
    reads.read()
