"""Scratch files: bytes of one run, which no other run ever sees.

A file has no name: it is gone with the process that made it, however that ends, and nothing of a
run before can be taken for this one's. Where a file system knows no such files it gets a name and
loses it at once; what a crash between the two has left is recognised by its lock, and removed.

Bytes go past the page cache (O_DIRECT), in whole blocks between block-aligned memory and file.
Where a file system refuses that they go through it, with a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

from fxzero.errors import ConfigError, DiskError, FxZeroWarning, HostMemoryError
from fxzero.settings import at_least, check_types

BLOCK = max(4096, mmap.PAGESIZE)
"""Bytes: what is read and written begins and ends at multiples of it."""

_PREFIX = "fxzero-scratch-"


def pages(num_bytes: int) -> memoryview:
    """Memory that begins at a page, as direct I/O asks, and takes none until it is written.

    Raises:
        HostMemoryError: the system does not give it.
    """
    try:
        return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError) as error:
        raise HostMemoryError(
            f"{num_bytes} bytes of pool host at once: {error}. Nothing was moved there. Hold less "
            "there, make disk.chunk_bytes or disk.depth smaller if that is what they are for, or "
            "raise the limit (ulimit -v)."
        ) from error


@dataclass(frozen=True)
class DiskSettings:
    """Where on disk a step may hold what it has, and how it is read and written."""

    paths: tuple[str, ...] = ()
    """Folders, each on a disk of its own: what is on disk is striped over them. They are made if
    they are not there. By default a folder below the system's temporary one. Each rank holds its
    part in them, in files without names that end with it."""
    chunk_bytes: int = 8 << 20
    """What is read, checked and written at once, per tensor kind: a multiple of 4096. Twelve to
    sixteen chunks and `depth` more are held in the host's memory, however large the model."""
    depth: int = 4
    """Reads, and writes, that are on their way at a time."""

    def __post_init__(self) -> None:
        check_types(self, "disk")
        at_least("disk.depth", self.depth, 1)
        if self.chunk_bytes < BLOCK or self.chunk_bytes % BLOCK:
            raise ConfigError(
                f"disk.chunk_bytes={self.chunk_bytes} must be a multiple of {BLOCK}: files are "
                "read and written in whole blocks"
            )
        if "" in self.paths:
            raise ConfigError("disk.paths has an empty path: name folders, or leave it out")
        folders = [os.path.realpath(folder) for folder in self.folders]
        twice = next((folder for folder in folders if folders.count(folder) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"disk.paths={list(self.paths)} names {twice} twice: what is on disk is striped "
                "over folders on disks of their own. Name each once."
            )

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files are made."""
        if self.paths:
            return tuple(Path(path).expanduser() for path in self.paths)
        return (Path(tempfile.gettempdir()) / f"fxzero-{os.getuid()}",)


class ScratchFile:
    """A file without a name.

    Args:
        folder: where it is; made if it is not there.
        num_bytes: its size, a multiple of `BLOCK`: all of it is there before anything is written.

    Raises:
        DiskError: the folder cannot be made or written to, or has not as much room.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self.num_bytes = num_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
            self.fd = _nameless(folder)
        except OSError as error:
            why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            raise DiskError(
                f"disk.paths: no file can be made in {folder}: {why}. Name a folder that this "
                "process may write to."
            ) from error
        weakref.finalize(self, os.close, self.fd)
        try:
            if num_bytes:
                os.posix_fallocate(self.fd, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskError(
                    f"disk.paths: {num_bytes} bytes in {folder}: {error.strerror}"
                ) from error
            why = f"{_free_bytes(folder)} are free. Nothing was moved there. Free some"
            if error.errno == errno.EFBIG:
                why = "which is larger than a file may be. Nothing was moved there. Raise the limit"
                why += " (ulimit -f)"
            raise DiskError(
                f"disk.paths: {folder} has no room for {num_bytes} bytes, {why}, name other "
                "folders, or raise host_budget so that less goes to disk."
            ) from error
        self.is_direct = self._use_direct()
        """Whether bytes go past the page cache."""

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer.

        Raises:
            OSError: by its ``errno``; EIO where the file ends before.
        """
        done = 0
        while done < len(buffer):
            got = os.preadv(self.fd, [buffer[done:]], offset + done)
            if not got:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done}")
            done += got

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write all of a buffer.

        Raises:
            OSError: by its ``errno``.
        """
        done = 0
        while done < len(buffer):
            done += os.pwritev(self.fd, [buffer[done:]], offset + done)

    def _use_direct(self) -> bool:
        """Go past the page cache if the file system lets us, which only a read tells for sure."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            if self.num_bytes:
                self.read(0, pages(BLOCK))
        except OSError as error:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            warnings.warn(
                f"disk.paths: the file system of {self.folder} refuses direct I/O "
                f"({error.strerror}): bytes go through the page cache, which is slower and takes "
                "memory that others could use",
                FxZeroWarning,
                stacklevel=2,
            )
            return False
        return True


def _nameless(folder: Path) -> int:
    """Open a file that has no name, or that loses it at once."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    fcntl.flock(fd, fcntl.LOCK_EX)  # who looks for leftovers may have it for a moment
    with contextlib.suppress(FileNotFoundError):  # and may have taken it for one
        os.unlink(name)
    return fd


def _remove_leftovers(folder: Path) -> None:
    """Remove files that processes had named and not yet unnamed when they ended."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its maker holds it while it lives
            path.unlink()


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
