"""A disk without room: said with the file's name, nothing half visible, and the next save works.

A small tmpfs, where mounting is allowed; else files may not grow beyond a limit, which fails them
in the same places with another sentence.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from fxzero.checkpoint import saving
from fxzero.errors import CheckpointError
from tests.checkpoint.runs import Run, all_of, hidden, make_run, save_now, visible
from tests.parity.harness import Pools

PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", str(path)],
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("no tmpfs may be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(autouse=True)
def _forget_saves() -> Iterator[None]:
    """What one test's save has met is not the next one's."""
    yield
    saving._running.clear()


def fill(disk: Path, room: int) -> Path:
    """Leave so many bytes."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    with filler.open("wb") as file:
        file.write(bytes(free.f_bavail * free.f_frsize - room))
    return filler


def fill_names(disk: Path, room: int) -> list[Path]:
    """Leave so many files."""
    fillers = [disk / f"filler-{i}" for i in range(os.statvfs(disk).f_favail - room)]
    for filler in fillers:
        filler.touch()
    return fillers


def attempt(run: Run, folder: Path, step: int, asynchronous: bool) -> str | None:
    """Save; what it says, if it fails."""
    before = all_of(run)
    try:
        fxzero.checkpoint.save(run.state, folder, step=step, asynchronous=asynchronous).wait()
    except CheckpointError as error:
        return str(error)
    finally:
        assert all_of(run) == before
        saving._running.clear()
    return None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_wherever_the_room_ends(disk: Path, asynchronous: bool) -> None:
    """From none at all, page by page, until there is enough."""
    folder = disk / "checkpoints"
    run = make_run()
    save_now(run, folder, 1)
    failed = 0
    for pages in range(40):
        filler = fill(disk, pages * PAGE)
        said = attempt(run, folder, 2, asynchronous)
        filler.unlink()
        if said is None:
            break
        failed += 1
        assert str(folder) in said, pages
        assert "No space left" in said, pages
        assert visible(folder) == ["step-0000000001"], pages
        assert hidden(folder) == [], pages
        assert fxzero.checkpoint.load(run.state, folder) is not None
    assert 5 < failed < 40, "the premise: it fails first, and works then"
    assert visible(folder) == ["step-0000000001", "step-0000000002"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_wherever_the_names_end(disk: Path, asynchronous: bool) -> None:
    """A file system may have room for bytes and none for files."""
    folder = disk / "checkpoints"
    run = make_run()
    save_now(run, folder, 1)
    failed = 0
    for room in range(10):
        fillers = fill_names(disk, room)
        said = attempt(run, folder, 2, asynchronous)
        for filler in fillers:
            filler.unlink()
        if said is None:
            break
        failed += 1
        assert str(folder) in said, room
        assert visible(folder) == ["step-0000000001"], room
        assert hidden(folder) == [], room
    assert 3 <= failed < 10
    assert visible(folder) == ["step-0000000001", "step-0000000002"]


def test_the_first_checkpoint_of_a_folder(disk: Path) -> None:
    """There is no room for the folder itself."""
    run = make_run()
    fillers = fill_names(disk, 0)
    said = attempt(run, disk / "new" / "checkpoints", 1, asynchronous=False)
    assert said is not None
    assert str(disk / "new") in said
    for filler in fillers:
        filler.unlink()
    save_now(run, disk / "new" / "checkpoints", 1)


def test_old_ones_that_keep_does_not_want_make_room_for_the_next(disk: Path) -> None:
    """Half written files of the last attempt too."""
    folder = disk / "checkpoints"
    run = make_run(build=lambda: nn.Sequential(nn.Linear(4, 1500), nn.Linear(1500, 2)))
    for step in range(12):  # of 180 kB each
        save_now(run, folder, step, keep=2)
    assert visible(folder) == ["step-0000000010", "step-0000000011"]


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_file_may_not_grow_beyond_a_limit(tmp_path: Path, asynchronous: bool) -> None:
    """Whatever file it is."""
    run = make_run()
    save_now(run, tmp_path, 1)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-0000000001").iterdir()}
    for limit in (0, *(size - 1 for size in sorted(sizes.values()))):
        with files_up_to(limit):
            said = attempt(run, tmp_path, 2, asynchronous)
        assert said is not None
        assert str(tmp_path) in said, limit
        assert visible(tmp_path) == ["step-0000000001"], limit
        assert hidden(tmp_path) == [], limit
    assert attempt(run, tmp_path, 2, asynchronous) is None


# -- on two ranks


def test_on_two_ranks_whichever_has_no_room(ranks: Pools, tmp_path: Path) -> None:
    """All are told, which rank and which file; then all save."""
    ranks(2, timeout_s=120).run(save_without_room_on_one, tmp_path)


def save_without_room_on_one(folder: Path) -> None:
    """Job."""
    torch.manual_seed(0)
    model = fxzero.shard(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2)), zero=3)
    state = fxzero.TrainState(model)
    fxzero.checkpoint.save(state, folder, step=1, asynchronous=False)
    step = 1
    for asynchronous in (True, False):
        for full in (0, 1):
            for limit in (0, 1000, 2500):
                mine = limit if dist.get_rank() == full else 1 << 40
                with files_up_to(mine), pytest.raises(CheckpointError) as caught:
                    fxzero.checkpoint.save(
                        state, folder, step=step + 1, asynchronous=asynchronous
                    ).wait()
                saving._running.clear()
                said = str(caught.value)
                assert str(folder) in said, (full, limit, said)
                dist.barrier()
                assert len(visible(folder)) == step
                assert hidden(folder) == []
                dist.barrier()
        step += 1
        fxzero.checkpoint.save(state, folder, step=step, asynchronous=asynchronous).wait()
        assert len(visible(folder)) == step
    loaded: Any = fxzero.checkpoint.load(state, folder)
    assert loaded.step == step
