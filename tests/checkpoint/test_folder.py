"""`fxzero.checkpoint.folder`: which checkpoints there are, how one appears, and which go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxzero
from fxzero.checkpoint import folder as folders
from fxzero.checkpoint import saving
from fxzero.checkpoint.folder import clear, lock, prune, publish, published, unlock, writing_path
from fxzero.checkpoint.manifest import NAME, Manifest, hash_blocks
from fxzero.errors import CheckpointError
from tests.checkpoint.runs import hidden, make_run, save_now, visible


def write(folder: Path, step: int) -> Path:
    """A checkpoint appears."""
    path = writing_path(folder, step)
    path.mkdir()
    data = str(step).encode()
    (path / "file").write_bytes(data)
    files = {"file": hash_blocks(data)}
    about = Manifest(step, "now", 1, "a test", 0, {}, files)
    (path / NAME).write_bytes(about.to_bytes())
    return publish(folder, step)


# -- appearing


def test_a_checkpoint_appears_whole(tmp_path: Path) -> None:
    """Before the rename there is none."""
    writing_path(tmp_path, 7).mkdir()
    (writing_path(tmp_path, 7) / "file").write_text("7")
    assert published(tmp_path) == []
    path = publish(tmp_path, 7)
    assert path == tmp_path / "step-0000000007"
    assert (path / "file").read_text() == "7"
    assert hidden(tmp_path) == []


def test_files_are_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power the name stands for whole files."""
    events = []
    run = make_run()
    real_sync, real_rename = os.fsync, Path.rename

    def sync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_sync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"{self.name} -> {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    save_now(run, tmp_path, 3)
    at = events.index(".writing-0000000003 -> step-0000000003")
    files = {path.name for path in (tmp_path / "step-0000000003").iterdir()}
    assert files | {".writing-0000000003"} <= set(events[:at])
    assert events.index("manifest.json") > max(events.index(f) for f in files - {"manifest.json"})
    assert tmp_path.name in events[at + 1 :]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    """Nor is it made."""
    assert published(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_what_else_lies_there_is_no_checkpoint(tmp_path: Path) -> None:
    """Other names, files, links to nowhere."""
    write(tmp_path, 1)
    for name in ("step-2", "step-0000000002.x", "step-0000000002.", "xstep-0000000002", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-0000000003").write_text("a file")
    (tmp_path / "step-0000000004").symlink_to(tmp_path / "nowhere")
    assert visible(tmp_path) == ["step-0000000001"]


def test_what_was_published_after_training_had_gone_back_is_newer(tmp_path: Path) -> None:
    """By its suffix, not by its number."""
    for step in (40, 80, 120):
        write(tmp_path, step)
    write(tmp_path, 60)
    write(tmp_path, 100)
    assert visible(tmp_path)[-2:] == ["step-0000000060.1", "step-0000000100.1"]
    write(tmp_path, 100)  # once more
    write(tmp_path, 120)
    assert visible(tmp_path) == [
        "step-0000000040",
        "step-0000000080",
        "step-0000000120",
        "step-0000000060.1",
        "step-0000000100.1",
        "step-0000000100.2",
        "step-0000000120.2",
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=12))
def test_the_last_one_published_is_always_the_newest(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    """Whatever steps training goes to."""
    folder = tmp_path_factory.mktemp("folder")
    for count, step in enumerate(steps, 1):
        path = write(folder, step)
        assert published(folder)[-1].path == path
        assert len(published(folder)) == count
    shutil.rmtree(folder)


def test_a_relative_folder_is_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes the directory while a checkpoint is written finds it where it was meant."""
    (tmp_path / "elsewhere").mkdir()
    changed, real = threading.Event(), saving._Job.run

    def run(job: saving._Job) -> Path:
        assert changed.wait(60)
        return real(job)

    monkeypatch.setattr(saving._Job, "run", run)
    monkeypatch.chdir(tmp_path)
    under_way = fxzero.checkpoint.save(make_run().state, "checkpoints", step=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    changed.set()
    under_way.wait()
    assert visible(tmp_path / "checkpoints") == ["step-0000000001"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- going


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (None, None, [0, 10, 20, 30, 40, 50]),
        (1, None, [50]),
        (3, None, [30, 40, 50]),
        (9, None, [0, 10, 20, 30, 40, 50]),
        (1, 20, [0, 20, 40, 50]),
        (2, 25, [0, 40, 50]),
        (None, 20, [0, 10, 20, 30, 40, 50]),
    ],
)
def test_the_last_ones_stay_and_every_so_manieth(
    tmp_path: Path, keep: int | None, keep_every: int | None, left: list[int]
) -> None:
    """And nothing of the others."""
    for step in range(0, 60, 10):
        write(tmp_path, step)
    gone = prune(tmp_path, keep, keep_every)
    assert [item.step for item in published(tmp_path)] == left
    assert len(gone) == 6 - len(left)
    assert hidden(tmp_path) == []


def test_of_a_step_that_was_trained_twice_the_newer_stays(tmp_path: Path) -> None:
    """For good, where `keep_every` wants it."""
    for step in (20, 30, 20, 30, 40):
        write(tmp_path, step)
    prune(tmp_path, keep=1, keep_every=20)
    assert visible(tmp_path) == ["step-0000000020.1", "step-0000000040.1"]


def test_one_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    """It would take the place of one from which a run can go on; it goes when that does."""
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    (tmp_path / "step-0000000030" / "file").unlink()
    prune(tmp_path, keep=2, keep_every=None)
    assert [item.step for item in published(tmp_path)] == [20, 30, 40]
    write(tmp_path, 50)
    prune(tmp_path, keep=2, keep_every=None)
    assert [item.step for item in published(tmp_path)] == [40, 50]


def test_keep_counts_in_the_order_of_publishing(tmp_path: Path) -> None:
    """After training has gone back, too."""
    for step in (40, 80, 120, 60):
        write(tmp_path, step)
    prune(tmp_path, keep=2, keep_every=None)
    assert visible(tmp_path) == ["step-0000000120", "step-0000000060.1"]


def test_what_was_left_half_written_or_half_deleted_is_cleared(tmp_path: Path) -> None:
    """By the next save, and nothing else is."""
    run = make_run()
    save_now(run, tmp_path, 1)
    for name in (".writing-0000000002", ".deleting-step-0000000000", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".writing").write_text("somebody else's")
    save_now(run, tmp_path, 2)
    assert visible(tmp_path) == ["step-0000000001", "step-0000000002"]
    assert hidden(tmp_path) == [".writing", "mine"]
    clear(tmp_path)
    assert hidden(tmp_path) == [".writing", "mine"]


def test_what_cannot_be_deleted_is_no_checkpoint_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one must not be found; the save itself has worked."""
    run = make_run()
    save_now(run, tmp_path, 1)
    real = shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save_now(run, tmp_path, 2, keep=1)
    assert visible(tmp_path) == ["step-0000000002"]
    monkeypatch.setattr(shutil, "rmtree", real)
    save_now(run, tmp_path, 3, keep=1)
    assert hidden(tmp_path) == []


# -- two jobs

JOB = """
import sys
from pathlib import Path
from fxzero.checkpoint.folder import lock, unlock
from fxzero.errors import CheckpointError
for line in sys.stdin:
    action, folder = line.split()
    try:
        (lock if action == "lock" else unlock)(Path(folder))
        print("done", flush=True)
    except CheckpointError as error:
        print("refused:", error, flush=True)
"""


class Job:
    """A process that locks folders."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def lock(self, folder: Path) -> str:
        """What it is told."""
        return self._ask(f"lock {folder}")

    def unlock(self, folder: Path) -> str:
        """Let go."""
        return self._ask(f"unlock {folder}")

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Without a word to anybody."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Another job, for all tests that do not kill it: they may run in any order."""
    made = Job()
    yield made
    made.kill()


@pytest.mark.exhaustive
def test_looking_at_the_lock_does_not_let_go_of_it(tmp_path: Path, job: Job) -> None:
    """A copy of the folder, made by the job itself, opens and closes every file in it."""
    lock(tmp_path)
    try:
        assert f"process {os.getpid()} on" in job.lock(tmp_path), "the premise"
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))
        assert f"process {os.getpid()} on" in job.lock(tmp_path)
    finally:
        unlock(tmp_path)
        job.unlock(tmp_path)


@pytest.mark.exhaustive
def test_a_folder_that_was_made_anew_is_locked_anew(tmp_path: Path, job: Job) -> None:
    """Whoever deletes a folder of checkpoints and begins again is alone there too."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    lock(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    lock(folder)
    try:
        assert "refused" in job.lock(folder)
    finally:
        unlock(folder)
        job.unlock(folder)


@pytest.mark.exhaustive
def test_a_folder_is_free_once_it_was_let_go(tmp_path: Path, job: Job) -> None:
    """Each in its turn."""
    for _ in range(2):
        lock(tmp_path)
        assert "refused" in job.lock(tmp_path)
        unlock(tmp_path)
        assert job.lock(tmp_path) == "done"
        with pytest.raises(CheckpointError, match=f"process {job.process.pid} on"):
            lock(tmp_path)
        job.unlock(tmp_path)


def test_a_second_job_is_told_who_writes_there_until_that_one_is_killed(tmp_path: Path) -> None:
    """Nothing is left to be cleaned by hand."""
    job, run = Job(), make_run()
    assert job.lock(tmp_path) == "done"
    with pytest.raises(CheckpointError, match=rf"another job.*process {job.process.pid} on "):
        save_now(run, tmp_path, 1)
    assert visible(tmp_path) == hidden(tmp_path) == []
    job.kill()
    save_now(run, tmp_path, 1)
    assert visible(tmp_path) == ["step-0000000001"]


def test_one_job_may_save_again_and_by_another_path(tmp_path: Path) -> None:
    """A relative path, a link."""
    run = make_run()
    save_now(run, tmp_path / "a", 1)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    save_now(run, tmp_path / "b", 2)
    save_now(run, tmp_path / "b" / ".." / "a", 3)
    assert len(visible(tmp_path / "a")) == 3


def test_a_file_system_without_locks_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parallel ones have none."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folders.fcntl, "lockf", refuse)
    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    save_now(make_run(), tmp_path, 1)
    assert visible(tmp_path) == ["step-0000000001"]
