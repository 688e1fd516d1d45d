"""A tensor in a file of torch.distributed.checkpoint: a zip archive, as `torch.save` writes it.

PK.. data.pkl      what it is, which the checkpoint's metadata say too
PK.. data/0        its bytes, uncompressed        ──► read past the pickle, which nobody opens
PK.. version, …
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

HEAD_BYTES = 4096
"""Of an archive, in which the entries before a tensor's bytes are: some hundred bytes."""
_ENTRY = b"PK\x03\x04"
_ENTRY_BYTES = 30
"""Of the header of an archive's entry; its last four are the lengths of what follows."""


def begin_of_bytes(head: bytes | memoryview) -> int | None:
    """Where in an archive its entry ``data/0`` has its bytes: behind the entry's header, its name
    and what fills up to the next 64 bytes. (APPNOTE.TXT, 4.3.7)

    Args:
        head: its first `HEAD_BYTES`.

    Returns:
        None if there is no such entry.
    """
    head = bytes(head)
    found = head.find(_ENTRY)
    while found >= 0:
        begin = found + _ENTRY_BYTES
        if begin > len(head):
            return None
        name_bytes, extra_bytes = struct.unpack_from("<HH", head, begin - 4)
        if head[begin : begin + name_bytes].endswith(b"/data/0"):
            return begin + name_bytes + extra_bytes
        found = head.find(_ENTRY, found + 1)
    return None


def fault_of_archive(path: Path, begin: int, num_bytes: int) -> str | None:
    """Compare an archive's entries with the checksums that are beside them: torch does not.

    Args:
        path: the file that it is a stretch of.

    Returns:
        What is wrong; None if nothing is.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        try:
            with zipfile.ZipFile(_Stretch(file, begin, num_bytes)) as archive:
                wrong = archive.testzip()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            return f"holds no archive where one should be ({error})"
    if wrong is None:
        return None
    return f"was changed since it was written: {wrong} has another checksum"


class _Stretch(io.RawIOBase):
    """A stretch of a file, as a file of its own."""

    def __init__(self, file: io.FileIO, begin: int, num_bytes: int) -> None:
        self._file = file
        self._begin = begin
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        into = memoryview(buffer).cast("B")
        into = into[: max(self._num_bytes - self._at, 0)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(into) or 0
        self._at += count
        return count
