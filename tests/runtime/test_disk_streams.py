"""What moves between disk, host and device: habits of users, faults of disks, and who gives back.

Every case trains beside a step that holds all of it in memory, and compares bit by bit.
"""

from __future__ import annotations

import copy
import errno
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero.disk.scratch import ScratchFile
from fxzero.runtime import disk_streams
from fxzero.runtime.disk_arena import DiskArena, disk_arena_of
from fxzero.runtime.disk_buffers import Ring
from fxzero.runtime.disk_streams import StoredUpdate
from tests.disk.test_store import flip

EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}, "bucket": {"min_bytes": 0}}
DISK: dict[str, Any] = {**EAGER, "memory": "infinity", "disk": {"chunk_bytes": 4096}}


class Training:
    """Three layers in training: buckets of several pieces, of which some hold several tensors."""

    def __init__(self, options: dict[str, Any], width: int = 48, **step: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = (layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh()))
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        loss = nn.functional.mse_loss
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        step = {"options": options, "scheduler": self.scheduler, **step}
        self.step = fxzero.compile_step(self.model, self.optimizer, loss, **step)
        self.width = width
        self.losses: list[Tensor] = []

    def run(self, steps: int = 1, rows: int = 4) -> Training:
        """Train on some more batches."""
        for _ in range(steps):
            torch.manual_seed(len(self.losses))
            self.losses.append(self.step(*torch.randn(2, rows, self.width)).loss)
        return self

    @property
    def arena(self) -> DiskArena:
        """Where it holds what is on disk."""
        found = disk_arena_of(self.optimizer)
        assert found is not None
        return found

    def left(self) -> list[Tensor]:
        """All that there is to compare."""
        parameters = list(self.model.parameters())
        state = [v for p in parameters for v in self.optimizer.state[p].values()]
        return [t.detach().clone() for t in (*self.losses, *parameters, *state)]


@pytest.fixture
def both() -> tuple[Training, Training]:
    """One in memory and one on disk, two steps on."""
    return Training(EAGER).run(2), Training(DISK).run(2)


def same(one: Training, other: Training) -> bool:
    """Whether two trainings have left the same, and no buffer is missing."""
    for training in (one, other):
        arena = disk_arena_of(training.optimizer)
        if arena is not None:
            assert arena.buffers.states.num_free == 12
            assert arena.buffers.params.num_free == 4
    return all(map(torch.equal, one.left(), other.left()))


def is_at_home(training: Training) -> bool:
    """Whether all parameters, and state as large, are on disk."""
    store = training.arena.store
    tensors: list[Tensor] = list(training.model.parameters())
    tensors += [v for p in tensors for v in training.optimizer.state[p].values() if v.dim()]
    return all(store.address <= t.data_ptr() < store.address + store.num_bytes for t in tensors)


def test_what_is_on_disk_is_read_from_disk(
    both: tuple[Training, Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece of every bucket: states once, parameters for forward and for backward."""
    _, disk = both
    reads: list[int] = []
    read = ScratchFile.read

    def counted(self: ScratchFile, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        read(self, offset, buffer)

    monkeypatch.setattr(ScratchFile, "read", counted)
    disk.run()
    layer = 3 * 4096  # 48 * 48 weights and 48 of a bias, in whole blocks
    assert sum(reads) == 3 * 3 * layer + (3 + 2) * layer  # the first layer's backward reads none
    assert is_at_home(disk)
    assert same(*(t.run(1) if t is both[0] else t for t in both))


def test_what_users_write_is_what_the_next_step_begins_with(
    both: tuple[Training, Training],
) -> None:
    """In place, through ``.data``, by other memory, in a part, and in the optimizer's state."""
    for training in both:
        first, second, third, *_ = training.model.parameters()
        with torch.no_grad():
            first.mul_(0.5)
        second.data[3:5] += 1
        third.data = third.data * 0.25
        training.optimizer.state[first]["exp_avg"].add_(1e-3)
        training.optimizer.param_groups[0]["lr"] = 0.02
        training.run(2)
    assert same(*both)
    assert is_at_home(both[1])


def test_checkpoints_travel_both_ways(both: tuple[Training, Training]) -> None:
    """Saved to a file, loaded into the other one, and into itself."""
    for there, back in ((0, 1), (1, 0), (1, 1)):
        file = io.BytesIO()
        source = both[there]
        torch.save((source.model.state_dict(), source.optimizer.state_dict()), file)
        assert len(file.getvalue()) < 3 * source.arena.num_bytes if there else True
        file.seek(0)
        model, optimizer = torch.load(file)
        both[back].model.load_state_dict(model)
        both[back].optimizer.load_state_dict(optimizer)
        for training in both:
            training.run(1)
        assert same(*both)


def test_state_that_is_cleared_begins_anew(both: tuple[Training, Training]) -> None:
    """And goes to disk again."""
    for training in both:
        training.optimizer.state.clear()
        training.run(1)
    assert same(*both)
    assert is_at_home(both[1])


def test_a_backup_by_reference_stays_what_it_is(both: tuple[Training, Training]) -> None:
    """A view of a parameter that has new memory goes on being one; it is updated where it is."""
    for training in both:
        parameter = next(iter(training.model.parameters()))
        parameter.data = parameter.detach().clone()
        view = parameter.detach()
        training.run(2)
        assert torch.equal(view, parameter)
    assert same(*both)
    assert not is_at_home(both[1])


def test_two_shapes_of_batches() -> None:
    """Two graphs find what the other one has left."""
    plain, disk = Training(EAGER), Training(DISK)
    for training in (plain, disk):
        for rows in (4, 8, 4, 8):
            training.run(1, rows)
    assert same(plain, disk)
    assert is_at_home(disk)


def test_over_two_folders_and_a_budget(tmp_path: Any) -> None:
    """Striped, and with a part on the host."""
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    options = {**DISK, "disk": {"paths": folders, "chunk_bytes": 4096, "depth": 2}}
    options |= {"host_budget": 700_000}
    plain, disk = (Training(settings, width=128).run(3) for settings in (EAGER, options))
    assert all(map(torch.equal, plain.left(), disk.left()))
    assert [str(file.folder) for file in disk.arena.store.files] == folders
    assert all(file.num_bytes for file in disk.arena.store.files)
    assert 0 < len(disk.arena.buckets) < 3


@pytest.mark.parametrize("clip", [None, 0.01])
def test_lanes_that_are_held_back(clip: float | None) -> None:
    """Slow disks change when things happen, and nothing else."""
    slow = {**DISK, "throttle": {"read": "5MB/s", "write": "5MB/s"}}
    runs = [Training(options, clip_grad_norm=clip).run(2) for options in (EAGER, slow)]
    assert same(*runs)


# -- what goes wrong


def test_a_changed_bit(both: tuple[Training, Training]) -> None:
    """The step ends, with the place; what was waiting gets its buffers back; a state dict is not
    made of it; a bit that is right again is right."""
    disk = both[1]
    store = disk.arena.store
    of_state = next(p.number for p in store.pieces if p.section.startswith("exp_avg of"))
    of_parameter = next(p.number for p in store.pieces if p.section.startswith("the parameter"))
    for number in (of_state, of_parameter):
        flip(store, number)
        with pytest.raises(fxzero.DiskError, match=r"exp_avg of|the parameter of"):
            disk.run()
        with pytest.raises(fxzero.DiskError, match="are not what was written there"):
            (disk.optimizer if number == of_state else disk.model).state_dict()
        assert disk.arena.buffers.states.num_free == 12
        assert disk.arena.buffers.params.num_free == 4
        flip(store, number)
        disk.model.state_dict()
        disk.optimizer.state_dict()
        disk.run()


def test_a_checkpoint_is_loaded_over_what_has_changed(both: tuple[Training, Training]) -> None:
    """As the message says: every piece is written over, right or not."""
    plain, disk = both
    saved = copy.deepcopy((disk.model.state_dict(), disk.optimizer.state_dict()))
    store = disk.arena.store
    for what in ("the parameter", "exp_avg of", "exp_avg_sq of"):
        flip(store, [p.number for p in store.pieces if p.section.startswith(what)][1])
    with pytest.raises(fxzero.DiskError, match="load a checkpoint"):
        disk.run()
    model, optimizer = copy.deepcopy(saved)
    disk.model.load_state_dict(model)
    disk.optimizer.load_state_dict(optimizer)
    gc.collect()
    disk.optimizer.param_groups[0]["lr"] = plain.optimizer.param_groups[0]["lr"]
    disk.scheduler.load_state_dict(plain.scheduler.state_dict())
    assert same(plain.run(2), disk.run(2))
    assert is_at_home(disk)


def test_a_part_that_is_written_over_does_not_make_the_rest_right() -> None:
    """Loading some parameters blesses no others in the same piece."""
    disk = Training({**DISK, "disk": {"chunk_bytes": 8192}}).run(1)
    store = disk.arena.store
    of_first = "the parameter of 0.weight"
    flip(store, next(p.number for p in store.pieces if p.section.startswith(of_first)), at=4099)
    name, parameter = next(iter(disk.model.named_parameters()))
    part = {name: torch.zeros_like(parameter)[:20]}
    with pytest.raises(RuntimeError, match="size mismatch"):
        disk.model.load_state_dict(part, strict=False)
    with torch.no_grad():
        parameter[0] = 0.0
    with pytest.raises(fxzero.DiskError, match="are not what was written"):
        disk.run()


def test_files_of_buckets_that_are_no_more_are_closed() -> None:
    """One frozen weight after another makes other buckets."""
    training = Training(DISK).run(1)
    stores = [weakref.ref(training.arena.store)]
    for parameter in list(training.model.parameters())[:3]:
        parameter.requires_grad_(False)
        training.run(1)
        stores.append(weakref.ref(training.arena.store))
    gc.collect()
    assert sum(store() is not None for store in stores) == 1


def train_in_child(training: Training, connection: Any) -> None:
    """A step in a forked process."""
    try:
        training.run()
        connection.send("trained")
    except fxzero.DiskError as error:
        connection.send(str(error))


def test_a_forked_process_does_not_train_on_its_parents_files(
    both: tuple[Training, Training],
) -> None:
    """It is refused, and the parent goes on."""
    disk = both[1]
    mine, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=train_in_child, args=(disk, theirs))
    child.start()
    assert mine.poll(60)
    assert "forked from one that holds tensors on disk" in mine.recv()
    child.join()
    assert same(*(t.run() for t in both))


def test_two_threads_with_a_step_each() -> None:
    """Updates are queued in one order on all lanes, whoever comes between their nodes."""
    plain, *others = (Training(options).run(1) for options in (EAGER, DISK, DISK))
    update = StoredUpdate.__call__

    def slowly(self: StoredUpdate, *args: Any) -> Any:
        time.sleep(0.002)
        return update(self, *args)

    with mock.patch.object(StoredUpdate, "__call__", slowly):
        for _ in range(3):
            batch = torch.randn(4, 48), torch.randn(4, 48)
            plain.step(*batch)
            with ThreadPoolExecutor(2) as threads:
                for done in [threads.submit(other.step, *batch) for other in others]:
                    done.result(timeout=60)
    for other in others:
        other.losses = plain.losses
        assert same(plain, other)


def test_writes_that_fail_lose_nothing(
    both: tuple[Training, Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is whole, in memory, and the next one writes what is missing."""
    plain, disk = both
    write = ScratchFile.write
    calls: list[int] = []

    def fails_sometimes(self: ScratchFile, offset: int, buffer: memoryview) -> None:
        calls.append(1)
        if len(calls) % 4 == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, offset, buffer)

    monkeypatch.setattr(ScratchFile, "write", fails_sometimes)
    plain.run()
    with pytest.raises(fxzero.DiskError, match="this step's update is complete") as caught:
        disk.run()
    assert isinstance(caught.value.output, fxzero.StepOutput)
    disk.losses.append(caught.value.output.loss)
    monkeypatch.undo()
    assert same(plain, disk)
    rates = [t.optimizer.param_groups[0]["lr"] for t in (plain, disk)]
    assert rates[0] == rates[1] < 0.01
    assert len(disk.arena.store.changed_pages())
    plain.run()
    assert same(plain, disk.run())
    assert not len(disk.arena.store.changed_pages())


def test_a_disk_that_ends(both: tuple[Training, Training], monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that fails says what was read."""
    disk = both[1]

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ScratchFile, "read", fail)
    with pytest.raises(fxzero.DiskError, match=r"reading .* Input/output error\. What is"):
        disk.run()
    monkeypatch.undo()
    disk.run()


def test_an_interrupt_between_a_read_and_its_update(
    both: tuple[Training, Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an update that never came."""
    disk = both[1]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StoredUpdate, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk.run()
    assert disk.arena.buffers.states.num_free == 12
    monkeypatch.undo()
    disk.run()


def test_no_room_leaves_everything_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is moved."""
    training = Training(DISK)
    before = [p.data_ptr() for p in training.model.parameters()]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(fxzero.DiskError, match="no room for 110592 bytes"):
        training.run()
    assert [p.data_ptr() for p in training.model.parameters()] == before
    monkeypatch.undo()
    assert same(Training(EAGER).run(1), training.run(1))


def test_it_ends_with_its_optimizer() -> None:
    """Files are closed, and nothing keeps them."""
    training = Training(DISK).run(1)
    arena = weakref.ref(training.arena)
    del training
    torch._dynamo.reset()
    gc.collect()
    assert arena() is None


def test_a_model_is_copied_as_ever(both: tuple[Training, Training]) -> None:
    """Its copy has memory of its own."""
    disk = both[1]
    other = copy.deepcopy(disk.model)
    before = [p.detach().clone() for p in disk.model.parameters()]
    disk.run()
    assert all(map(torch.equal, before, other.parameters()))
    assert other.state_dict().keys() == disk.model.state_dict().keys()


def test_who_waits_for_a_buffer_is_told_when_there_is_no_need() -> None:
    """Else it would wait for ever."""
    ring = Ring(1, 4096)
    taken = ring.take()
    assert taken is not None
    assert ring.take(lambda: True) is None
    ring.give(taken)
    assert ring.take() is taken


def test_updates_take_their_pieces_from_the_stream(
    both: tuple[Training, Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from memory that happens to show the same."""
    counted: list[int] = []
    update = disk_streams.States.update

    def count(self: disk_streams.States, *args: Any) -> None:
        counted.append(self.place.num_pieces)
        update(self, *args)

    monkeypatch.setattr(disk_streams.States, "update", count)
    both[1].run()
    assert counted == [3, 3, 3]


KILLED = """
import os, signal, sys
import torch
from fxzero.runtime.disk_streams import StoredUpdate
from tests.runtime.test_disk_streams import DISK, Training

folder = sys.argv[1]
training = Training({**DISK, "disk": {"paths": [folder + "/disk"], "chunk_bytes": 4096}}).run(2)
torch.save((training.model.state_dict(), training.optimizer.state_dict()), folder + "/saved.pt")
StoredUpdate.__call__ = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
training.run()
"""


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Inside of a step; nothing is left on disk, and the bits are those of a run that goes on."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(command, check=False, cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert not list((tmp_path / "disk").iterdir())
    model, optimizer = torch.load(tmp_path / "saved.pt")
    torch.set_num_threads(1)
    whole, resumed = Training(EAGER).run(2), Training(DISK)
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.losses = list(whole.losses)
    assert same(whole.run(2), resumed.run(2))
