"""A folder of checkpoints: what is in it, and how one appears in it whole or not at all.

DIR/.writing-0000000100     files arrive; a crash leaves this behind, and the next save clears it
DIR/step-0000000100         renamed once everything is on disk: from then on it is a checkpoint
DIR/step-0000000060.1       of a run that has gone back behind 100: newer than 100, by its suffix
DIR/.lock                   held by the job that writes, for as long as it lives
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from fxzero.checkpoint.manifest import METADATA, NAME, VALUES, Manifest
from fxzero.errors import CheckpointError

log = logging.getLogger("fxzero")

PUBLISHED = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_LEFT_BEHIND = re.compile(r"\.(writing|deleting)-.*")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that has none."""


@dataclass(frozen=True, order=True)
class Published:
    """A checkpoint's place in the order of checkpoints."""

    generation: int
    """How often training had gone back when it was published."""
    step: int
    path: Path


def is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint that `save` has written, whole or not."""
    if PUBLISHED.fullmatch(path.resolve().name) is not None:
        return True
    return any((path / name).exists() for name in (NAME, VALUES))


def is_of_others(path: Path) -> bool:
    """Whether a folder is a checkpoint that `dcp.save` has written by itself."""
    return not is_ours(path) and (path / METADATA).exists()


def published(folder: Path) -> list[Published]:
    """The checkpoints in a folder, oldest first. Whether they are whole, their manifests say."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            match = PUBLISHED.fullmatch(entry.name)
            if match is not None and entry.is_dir():
                found.append(Published(int(match[2] or 0), int(match[1]), folder / entry.name))
    return sorted(found)


def read_manifest(path: Path, *, sizes: bool = True) -> Manifest:
    """The manifest of a checkpoint, whose files are there and as long as it says.

    Args:
        path: of the checkpoint.
        sizes: False for the manifest alone, whatever has become of the files.

    Raises:
        CheckpointError: it is not; which file, and in what way.
    """
    file = path / NAME
    try:
        manifest = Manifest.from_bytes(file.read_bytes(), file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    for name, record in manifest.files.items() if sizes else ():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if found != record.bytes:
            raise CheckpointError(f"{path / name} has {found} bytes instead of {record.bytes}")
    return manifest


def writing_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is written."""
    return folder / f".writing-{step:010d}"


def publish(folder: Path, step: int) -> Path:
    """Let what was written appear, as the newest of its folder.

    Returns:
        Its path.
    """
    generation = 0
    for newest in published(folder)[-1:]:
        generation = newest.generation + (newest.step >= step)
    path = folder / f"step-{step:010d}{f'.{generation}' if generation else ''}"
    sync_folder(writing_path(folder, step))
    writing_path(folder, step).rename(path)
    sync_folder(folder)
    return path


def prune(folder: Path, keep: int | None, keep_every: int | None) -> list[Path]:
    """Delete what nobody wants any more: all but the last `keep` that are whole, and the newest of
    every `keep_every`-th step. One that is not whole goes with those that are older than all these.
    """
    if keep is None:
        return []
    found = published(folder)
    whole = [item for item in found if _is_whole(item.path)]
    kept = whole[-keep:]
    if keep_every is not None:
        newest = {item.step: item for item in whole}
        kept += [item for step, item in newest.items() if step % keep_every == 0]
    last = whole[-keep:][:1]
    unwanted = [item.path for item in found if item not in kept and (not last or item < last[0])]
    for path in unwanted:
        _delete(path)
    return unwanted


def _is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there, and as long as they were."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def clear(folder: Path) -> None:
    """Delete what a job that ended early has left half written, or half deleted."""
    for entry in list(os.scandir(folder)):
        if _LEFT_BEHIND.fullmatch(entry.name):
            log.info("%s was never finished: deleted", entry.path)
            shutil.rmtree(entry.path, ignore_errors=True)


def _delete(path: Path) -> None:
    """Delete a checkpoint: first it stops being one."""
    aside = path.with_name(f".deleting-{path.name}")
    try:
        path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        log.warning("%s could not be deleted: %s", path, error)


def sync_folder(path: Path) -> None:
    """Let the names in a folder reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, to the disk.

    Raises:
        CheckpointError: the disk is full, or fails.
    """
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error


_PATIENCE_S = 5.0
_held: dict[Path, int] = {}
"""Locks of this process, by folder."""


def lock(folder: Path) -> None:
    """Claim a folder for this process until it ends; asked for again, nothing happens.

    Raises:
        CheckpointError: another job writes to it.
    """
    real = folder.resolve()
    if _is_held(real):
        return
    handle = os.open(real / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _claim(handle)
    except OSError as error:
        who = os.pread(handle, 200, 0).decode(errors="replace").strip()
        os.close(handle)
        if error.errno in _NO_LOCKS:
            log.warning("%s has no locks: see that no other job writes there", folder)
            return
        raise CheckpointError(
            f"another job writes its checkpoints to {folder} ({who or 'who, is not known'}). Give "
            "each job a folder of its own, or end the other one first."
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _held[real] = handle


def _claim(handle: int) -> None:
    """Lock an open file. Workers that a killed process has forked hold its lock a little longer.

    Raises:
        OSError: somebody has locked it.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _is_held(real: Path) -> bool:
    """Whether this process has locked what is now at a path."""
    handle = _held.get(real)
    if handle is None:
        return False
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(real / ".lock")):
            return True
    os.close(_held.pop(real))  # the folder was deleted, and is another now
    return False


def unlock(folder: Path) -> None:
    """Let others write to a folder."""
    handle = _held.pop(folder.resolve(), None)
    if handle is not None:
        os.close(handle)
