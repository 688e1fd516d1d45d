"""Files without names: they are gone with their process, and what is wrong is said before."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxzero.disk import scratch
from fxzero.disk.scratch import BLOCK, DiskSettings, ScratchFile, pages
from fxzero.errors import ConfigError, DiskError, FxZeroWarning, HostMemoryError


def filled(byte: int, blocks: int = 1) -> memoryview:
    """Blocks of one byte."""
    memory = pages(blocks * BLOCK)
    memory[:] = bytes([byte]) * len(memory)
    return memory


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Past the page cache, where the file system allows it."""
    file = ScratchFile(tmp_path, 4 * BLOCK)
    file.write(BLOCK, filled(7, 2))
    found = pages(4 * BLOCK)
    file.read(0, found)
    assert bytes(found) == bytes(BLOCK) + b"\7" * 2 * BLOCK + bytes(BLOCK)


def test_it_has_no_name(tmp_path: Path) -> None:
    """The folder is made, and stays empty."""
    folder = tmp_path / "new" / "folder"
    file = ScratchFile(folder, BLOCK)
    assert not list(folder.iterdir())
    assert os.fstat(file.fd).st_nlink == 0


def test_it_closes_with_its_object(tmp_path: Path) -> None:
    """Its room is free then."""
    file = ScratchFile(tmp_path, BLOCK)
    fd = file.fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


KILLED = """
import os, signal, sys
from pathlib import Path
from fxzero.disk import scratch
if sys.argv[2] == "named":
    real = os.open
    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *args, **kwargs)
    os.open = refuse
    os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
file = scratch.ScratchFile(Path(sys.argv[1]), 1 << 20)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["nameless", "named"])
def test_a_killed_process_leaves_nothing(tmp_path: Path, how: str) -> None:
    """Nothing at all; killed between a name and its end, nothing that the next run does not
    remove. What is locked by a process that lives is left alone."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), how], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == (how == "named")
    ScratchFile(tmp_path, BLOCK)
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Only leftovers are removed."""
    (tmp_path / "model.pt").write_text("mine")
    ScratchFile(tmp_path, BLOCK)
    assert (tmp_path / "model.pt").read_text() == "mine"


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """The message names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"no file can be made in .*/file: it is no folder"):
        ScratchFile(tmp_path / "file", BLOCK)


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is written, with what is asked and what there is."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"no room for 4096 bytes, \d+ are free. Nothing was moved"):
        ScratchFile(tmp_path, 4096)


def test_a_file_system_that_wants_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning, and the same bytes."""
    monkeypatch.setattr(scratch.os, "O_DIRECT", 0)
    real = os.preadv
    refused: list[int] = []

    def refuse_once(*args: Any) -> int:
        if not refused:
            refused.append(1)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*args)

    monkeypatch.setattr(os, "preadv", refuse_once)
    with pytest.warns(FxZeroWarning, match="refuses direct I/O"):
        file = ScratchFile(tmp_path, BLOCK)
    assert not file.is_direct
    file.write(0, filled(3))
    found = pages(BLOCK)
    file.read(0, found)
    assert bytes(found) == b"\3" * BLOCK


def test_parts_of_a_read_and_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that moves less than it was asked to is asked again."""
    file = ScratchFile(tmp_path, 4 * BLOCK)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda fd, buffers, offset, real=real: real(fd, [buffers[0][:BLOCK]], offset)
        )
    file.write(0, filled(9, 4))
    found = pages(4 * BLOCK)
    file.read(0, found)
    assert bytes(found) == b"\x09" * 4 * BLOCK


def test_the_end_of_a_file(tmp_path: Path) -> None:
    """A file that somebody has truncated is no endless loop."""
    file = ScratchFile(tmp_path, 2 * BLOCK)
    os.ftruncate(file.fd, BLOCK)
    with pytest.raises(OSError, match=f"ends at byte {BLOCK}"):
        file.read(0, pages(2 * BLOCK))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_bytes": 5000}, "disk.chunk_bytes=5000 must be a multiple of 4096"),
        ({"chunk_bytes": 0}, "disk.chunk_bytes=0 must be a multiple of 4096"),
        ({"depth": 0}, "disk.depth=0 must be positive"),
        ({"paths": ("",)}, "disk.paths has an empty path"),
        (
            {"paths": ("/tmp/a", "/tmp/b/../a")},
            "disk.paths=['/tmp/a', '/tmp/b/../a'] names /tmp/a twice",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    """A sentence each."""
    with pytest.raises(ConfigError) as caught:
        DiskSettings(**settings)
    assert str(caught.value).startswith(message)


def test_memory_that_there_is_not() -> None:
    """More than any process may map."""
    with pytest.raises(HostMemoryError, match=f"{1 << 60} bytes of pool host at once"):
        pages(1 << 60)


def test_a_limit_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that there is has nothing to do with it."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskError, match=r"8192 bytes, which is larger than a file may be.*ulimit"):
        ScratchFile(tmp_path, 8192)
