"""Tensors of one file that are read together, right to where they belong.

    archives of the file   │ head │ bytes of a │ tail │ head │ bytes of b │ tail │ …
    memory                          ▓▓▓▓▓▓▓▓▓▓                 ▓▓▓▓▓▓▓▓▓▓
                                    all of a: its own          columns of b: aside, then copied

Where in an archive the bytes begin its head says, which would have to be read first. Of archives
that have as much beside their tensors' bytes it says the same, but for strange coincidence: one of
them is asked, and each is looked at when it has been read with all else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from fxzero.checkpoint.archives import HEAD_BYTES, begin_of_bytes
from fxzero.checkpoint.blocks import CheckedFile, Piece
from fxzero.errors import CheckpointError

_ASIDE_BYTES = 64 << 20
"""Of tensors that are read aside, as only something of each is wanted: read together."""


@dataclass(eq=False)
class Archive:
    """A part of a tensor as it was written, and what of it is to be read."""

    offset: int
    """In the file."""
    length: int
    dtype: torch.dtype
    sizes: torch.Size
    begin: int = 0
    """Of its bytes, in the archive."""
    head: memoryview = field(default_factory=lambda: memoryview(b""))
    """What is before them, as it was read."""
    pieces: list[Piece] = field(default_factory=list)
    """From the begin of its bytes on."""

    @property
    def num_bytes(self) -> int:
        """Of the part."""
        return self.sizes.numel() * self.dtype.itemsize

    def rows(self, item: ReadItem) -> int | None:
        """At which of its bytes that begins which is wanted; None if that is not rows of it."""
        if item.lengths[1:] != self.sizes[1:]:
            return None
        first = item.storage_offsets[0] if self.sizes else 0
        return first * self.sizes[1:].numel() * self.dtype.itemsize


class Together:
    """See the module. `add` reads what was added before where it must, and `read` the rest.

    Args:
        file: what they are read from.
    """

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        self._archives: list[Archive] = []
        self._end = 0
        """Of what is to be read, in the file."""
        self._begins: dict[int, int] = {}
        """Where the bytes of an archive begin, by how many others it has."""
        self._aside: list[tuple[Tensor, ReadItem, Tensor]] = []
        """Parts, what is wanted of them, and where that goes."""
        self._aside_bytes = 0

    def add(self, archive: Archive, item: ReadItem, target: Tensor) -> None:
        """Read what is wanted of an archive: the next one of the file, or again the last one.

        Raises:
            CheckpointError: it is none, or what was added before is not what was written.
        """
        if not target.numel():
            return
        rows = archive.rows(item)
        goes_aside = rows is None or not _is_plain(target, archive.dtype)
        begin = 0 if rows is None or goes_aside else rows
        if not archive.begin:
            archive.begin = self._begin_of(archive)
        is_new = not self._archives or archive is not self._archives[-1]
        first = archive.offset + (0 if is_new else archive.begin + begin)
        # What begins before the end of the last is what another name was added for, too.
        if first < self._end or self._aside_bytes >= _ASIDE_BYTES:
            self.read()
            is_new = True
        if is_new:
            self._archives.append(archive)
            archive.head = memoryview(bytearray(archive.begin))
        into = target
        if goes_aside:
            into = torch.empty(archive.sizes, dtype=archive.dtype)
            self._aside.append((into, item, target))
            self._aside_bytes += into.nbytes
        archive.pieces.append((begin, _memory(into)))
        self._end = archive.offset + archive.begin + begin + into.nbytes

    def read(self) -> None:
        """Read what was added.

        Raises:
            CheckpointError: something of it is not what was written.
        """
        pieces = [(archive.offset, archive.head) for archive in self._archives]
        for archive in self._archives:
            pieces += _placed(archive)
        self._file.fill(pieces)
        for archive in self._archives:
            if begin_of_bytes(archive.head) != archive.begin:
                self._read_elsewhere(archive)
            archive.pieces = []
        for whole, item, target in self._aside:
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                whole = whole.narrow(dim, start, length)
            target.copy_(whole)
        self._archives, self._end = [], 0
        self._aside, self._aside_bytes = [], 0

    def _begin_of(self, archive: Archive) -> int:
        """Where the bytes of an archive begin, most probably."""
        key = archive.length - archive.num_bytes
        if key not in self._begins:
            head = self._file.peek(archive.offset, min(HEAD_BYTES, archive.length))
            self._begins[key] = self._checked(archive, begin_of_bytes(head))
        return self._begins[key]

    def _read_elsewhere(self, archive: Archive) -> None:
        """Read what of an archive was looked for in the wrong place."""
        head = memoryview(bytearray(min(HEAD_BYTES, archive.length)))
        self._file.fill([(archive.offset, head)])
        archive.begin = self._checked(archive, begin_of_bytes(head))
        self._file.fill(_placed(archive))

    def _checked(self, archive: Archive, begin: int | None) -> int:
        if begin is not None and begin + archive.num_bytes <= archive.length:
            return begin
        self._file.check(archive.offset, archive.offset + archive.length)  # changed, if it was
        raise CheckpointError(
            f"{self._file.path} holds no tensor of {archive.num_bytes} bytes where one should be"
        )


def _placed(archive: Archive) -> list[Piece]:
    """What is wanted of an archive, by its place in the file."""
    begin = archive.offset + archive.begin
    return [(begin + offset, into) for offset, into in archive.pieces]


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's memory is its values, of some dtype."""
    return tensor.dtype is dtype and tensor.is_contiguous() and tensor.is_cpu


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
