"""`fxzero.checkpoint.Checkpoints`: a loop that saves, is told to stop, and goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from fxzero.checkpoint import Checkpoints, saving, staging
from fxzero.errors import CheckpointError, ConfigError, FxZeroWarning, HostMemoryError
from tests.checkpoint.runs import Counting, Run, all_of, hidden, make_run, visible
from tests.parity.harness import Pools


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What one test's save has met, and its handlers, are not the next one's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    saving._running.clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def steps_in(folder: Path) -> list[int]:
    """What is published."""
    return [int(name[5:15]) for name in visible(folder)]


def train(run: Run, checkpoints: Checkpoints, until: int, tell: Mapping[int, Any] = {}) -> int:
    """The loop of the docstring.

    Args:
        tell: what to do during a step.

    Returns:
        How many steps were trained.
    """
    done = first = checkpoints.resume()
    for number in range(first, until):
        run.train()
        done = number + 1
        if done in tell:
            tell[done]()
        if checkpoints.after_step(done):
            break
    return done


def tell(number: signal.Signals) -> Any:
    """A signal comes to this process."""
    return lambda: os.kill(os.getpid(), number)


# -- every, keep


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_so_many_steps(tmp_path: Path, asynchronous: bool) -> None:
    """The last ones stay, and each can be gone on from to the bit."""
    run = make_run()
    expected = {}
    with Checkpoints(
        run.state, tmp_path, every=2, keep=2, keep_every=6, asynchronous=asynchronous
    ) as checkpoints:
        assert checkpoints.resume() == 0
        for step in range(1, 12):
            run.train()
            assert not checkpoints.after_step(step)
            expected[step] = all_of(run)
    assert steps_in(tmp_path) == [6, 8, 10]
    assert hidden(tmp_path) == []
    for step in (6, 8, 10):
        other = make_run(9)
        fxzero.checkpoint.load(other.state, tmp_path, step=step)
        assert all_of(other) == expected[step]


def test_without_every_nothing_is_saved_but_the_end(tmp_path: Path) -> None:
    """And that once."""
    run = make_run()
    with Checkpoints(run.state, tmp_path) as checkpoints:
        assert train(run, checkpoints, 5) == 5
        assert steps_in(tmp_path) == []
        checkpoints.finish(5)
        checkpoints.finish(5)
    assert steps_in(tmp_path) == [5]


def test_the_end_is_not_saved_twice(tmp_path: Path) -> None:
    """Where it was time to save anyway."""
    run = make_run()
    with Checkpoints(run.state, tmp_path, every=5) as checkpoints:
        train(run, checkpoints, 5)
        checkpoints.finish(5)
    assert visible(tmp_path) == ["step-0000000005"]


@pytest.mark.parametrize(
    "settings", [{"every": 0}, {"every": -1}, {"every": 2.0}, {"every": True}, {"keep": 0}]
)
def test_numbers_that_are_none(tmp_path: Path, settings: Any) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Checkpoints(make_run().state, tmp_path, **settings)


# -- resume


def test_a_loop_goes_on(tmp_path: Path) -> None:
    """From the newest; one undisturbed has trained the same."""
    undisturbed = make_run()
    undisturbed.train(7)
    expected = all_of(undisturbed)
    run = make_run()
    with Checkpoints(run.state, tmp_path, every=2) as checkpoints:
        train(run, checkpoints, 5)
    other = make_run(3)
    with Checkpoints(other.state, tmp_path, every=2) as checkpoints:
        assert train(other, checkpoints, 7) == 7
    assert all_of(other) == expected
    assert visible(tmp_path) == ["step-0000000002", "step-0000000004", "step-0000000006"]


def test_ways_to_resume(tmp_path: Path) -> None:
    """In a folder that has none, and in one that has."""
    run = make_run()
    with Checkpoints(run.state, tmp_path / "a") as checkpoints:
        assert checkpoints.resume() == checkpoints.resume("auto") == 0
        assert checkpoints.resume("never") == 0
        assert checkpoints.resume(fxzero.checkpoint.Resume.NEVER) == 0
        with pytest.raises(CheckpointError, match=f"{tmp_path / 'a'} has no checkpoint"):
            checkpoints.resume("must")
        with pytest.raises(ConfigError, match=r"resume='atuo'.*auto"):
            checkpoints.resume("atuo")
        run.train()
        checkpoints.finish(1)
        assert checkpoints.resume("auto") == checkpoints.resume("must") == 1
        with pytest.raises(CheckpointError, match=r"step-0000000001\).*begins anew"):
            checkpoints.resume("never")


def test_after_a_fall_back_the_step_is_saved_again(tmp_path: Path) -> None:
    """And the newer one, which is whole, is taken from then on."""
    run = make_run()
    with Checkpoints(run.state, tmp_path, every=1) as checkpoints:
        train(run, checkpoints, 3)
    expected = all_of(run)
    (tmp_path / "step-0000000003" / "values.json").write_text("struck")
    other = make_run(4)
    with Checkpoints(other.state, tmp_path, every=1) as checkpoints:
        train(other, checkpoints, 3)
    assert all_of(other) == expected
    assert visible(tmp_path)[-1] == "step-0000000003.1"
    loaded: Any = fxzero.checkpoint.load(make_run(5).state, tmp_path)
    assert (loaded.step, loaded.skipped) == (3, ())


# -- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    """After the step that is running; and a later run goes on from there."""
    run = make_run()
    with Checkpoints(run.state, tmp_path, every=10) as checkpoints:
        assert train(run, checkpoints, 20, {3: tell(number)}) == 3
        assert checkpoints.told_by is number
        assert steps_in(tmp_path) == [3], "it is on disk before the loop ends"
    expected = all_of(run)
    other = make_run(4)
    with Checkpoints(other.state, tmp_path) as checkpoints:
        assert checkpoints.resume() == 3
    assert all_of(other) == expected


def test_a_second_sigint_does_what_it_did_before(tmp_path: Path) -> None:
    """Schedulers, and torchrun, send others to a rank several times, and mean one."""
    heard: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {n: signal.signal(n, lambda number, frame: heard.append(number)) for n in numbers}
    try:
        with Checkpoints(make_run().state, tmp_path, signals=numbers):
            for number in numbers:
                tell(number)()
            assert heard == []
            for number in numbers:
                tell(number)()
            assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_as_before_once_it_is_over(tmp_path: Path, told: bool, fails: bool) -> None:
    """After an error too; ignored ones, default ones, those of a user."""
    befores = [signal.SIG_IGN, signal.SIG_DFL, lambda number, frame: None]
    for before in befores:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR1, before)
        try:
            with Checkpoints(make_run().state, tmp_path):
                assert signal.getsignal(signal.SIGTERM) is not before
                if told:
                    tell(signal.SIGTERM)()
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert fails
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGUSR1) is before


def test_other_signals_or_none(tmp_path: Path) -> None:
    """As the user says."""
    before = signal.getsignal(signal.SIGTERM)
    run = make_run()
    with Checkpoints(run.state, tmp_path, signals=[signal.SIGUSR2]) as checkpoints:
        assert signal.getsignal(signal.SIGTERM) is before
        assert train(run, checkpoints, 4, {2: tell(signal.SIGUSR2)}) == 2


def test_in_a_thread_no_signal_is_heard(tmp_path: Path) -> None:
    """Python has handlers in the main thread alone: it saves nevertheless."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run = make_run()
            with Checkpoints(run.state, tmp_path, every=1) as checkpoints:
                train(run, checkpoints, 2)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    assert steps_in(tmp_path) == [1, 2]


# -- what fails


class FailsOnce(Counting):
    """Cannot say where it is, once."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.fails = True

    def state_dict(self) -> dict[str, Any]:
        """A function, or an error."""
        if not self.fails:
            return super().state_dict()
        if self.error is not None:
            raise self.error
        return {"position": print}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("error", [None, ValueError("a bug of the loader")])
def test_a_save_that_fails_is_a_warning(
    tmp_path: Path, asynchronous: bool, error: Exception | None
) -> None:
    """Training goes on, and the next one is there."""
    run, loader = make_run(), FailsOnce(error)
    state = fxzero.TrainState(run.model, run.optimizer, loader=loader)
    with Checkpoints(state, tmp_path, every=1, asynchronous=asynchronous) as checkpoints:
        run.train()
        with pytest.warns(FxZeroWarning, match=r"(?s)loader.*Training goes on"):
            checkpoints.after_step(1)
        loader.fails = False
        run.train()
        checkpoints.after_step(2)
        checkpoints.finish(2)
    assert steps_in(tmp_path) == [2]


class Room:
    """A disk that is full while it says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        real = os.fsync

        def sync(handle: int) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", sync)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Of the test."""
    return Room(monkeypatch)


def wait_until_done(checkpoints: Checkpoints) -> None:
    """Until what was begun last is written, or has failed; nobody has looked yet."""
    deadline = time.monotonic() + 60
    while checkpoints.saving is not None and not checkpoints.saving.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_a_warning_and_the_next_one_is_there(
    tmp_path: Path, room: Room, asynchronous: bool
) -> None:
    """Once, not for every later step."""
    run = make_run()
    room.full = True

    def until_five(checkpoints: Checkpoints) -> None:
        for step in range(1, 6):
            run.train()
            if step == 4:
                wait_until_done(checkpoints)
                room.full = False
            assert not checkpoints.after_step(step)

    with Checkpoints(run.state, tmp_path, every=2, asynchronous=asynchronous) as checkpoints:
        with pytest.warns(FxZeroWarning, match="(?s)No space left.*Training goes on") as warned:
            until_five(checkpoints)
        assert len(warned) == 1
        checkpoints.finish(5)
    assert steps_in(tmp_path) == [4, 5]


@pytest.mark.parametrize("how", ["signal", "finish"])
def test_the_last_one_is_written_although_the_one_before_failed(
    tmp_path: Path, room: Room, how: str
) -> None:
    """There is room again: what is asked for last is tried, whatever the one before has met."""
    run = make_run()
    with Checkpoints(run.state, tmp_path, every=2) as checkpoints:
        room.full = True
        for step in (1, 2):
            run.train()
            checkpoints.after_step(step)
        wait_until_done(checkpoints)
        room.full = False
        run.train()
        if how == "signal":
            tell(signal.SIGTERM)()
            with pytest.warns(FxZeroWarning, match="No space left"):
                assert checkpoints.after_step(3)
        else:
            assert not checkpoints.after_step(3)
            with pytest.warns(FxZeroWarning, match="No space left"):
                checkpoints.finish(3)
        assert steps_in(tmp_path) == [3]


def test_the_last_step_is_tried_again_where_its_own_save_failed(tmp_path: Path, room: Room) -> None:
    """It was time to save, there was no room, and the run is over: there is room now."""
    run = make_run()
    with Checkpoints(run.state, tmp_path, every=2) as checkpoints:
        room.full = True
        for step in (1, 2):
            run.train()
            checkpoints.after_step(step)
        wait_until_done(checkpoints)
        room.full = False
        with pytest.warns(FxZeroWarning, match="No space left"):
            checkpoints.finish(2)
    assert steps_in(tmp_path) == [2]


def test_the_last_one_fails(tmp_path: Path, room: Room) -> None:
    """That is an error; and the handlers are as before."""
    before = signal.getsignal(signal.SIGTERM)
    run = make_run()
    room.full = True

    def loop() -> None:
        with Checkpoints(run.state, tmp_path) as checkpoints:
            train(run, checkpoints, 3, {2: tell(signal.SIGTERM)})

    with pytest.raises(CheckpointError, match="No space left"):
        loop()
    assert run.loader.position == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_memory_for_the_copy_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has memory enough to train."""

    def refuse(name: str, like: torch.Tensor) -> torch.Tensor:
        raise HostMemoryError(f"there are no {like.nbytes} bytes for {name}")

    run = make_run()
    with Checkpoints(run.state, tmp_path, every=1) as checkpoints:
        run.train()
        with monkeypatch.context() as patch:
            patch.setattr(staging, "_empty", refuse)
            with pytest.warns(FxZeroWarning, match="(?s)no .* bytes.*Training goes on"):
                checkpoints.after_step(1)
        run.train()
        checkpoints.after_step(2)
    assert steps_in(tmp_path) == [2]


def test_an_error_of_training_is_the_one_that_is_seen(tmp_path: Path, room: Room) -> None:
    """Not that of a checkpoint that was being written."""
    run = make_run()
    room.full = True

    def loop() -> None:
        with Checkpoints(run.state, tmp_path, every=1) as checkpoints:
            checkpoints.after_step(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()


# -- two ranks


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_rank_stops_both_at_one_step(
    ranks: Pools, tmp_path: Path, told: int
) -> None:
    """With a checkpoint of that step, from which both go on."""
    found = ranks(2, timeout_s=120).run(stop_one, tmp_path, told)
    assert found[0][0] == found[1][0]
    (step, steps), _ = found
    assert 3 <= step <= 5
    assert steps == [step]


def stop_one(folder: Path, told: int) -> tuple[int, list[int]]:
    """Job."""
    torch.manual_seed(0)
    model = fxzero.shard(nn.Linear(4, 4), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    state = fxzero.TrainState(model, optimizer)
    done = 0
    before = signal.getsignal(signal.SIGTERM)
    only = [signal.SIGTERM]  # the pool has its own use for SIGUSR1
    with Checkpoints(state, folder, every=100, signals=only) as checkpoints:
        for number in range(checkpoints.resume(), 20):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            done = number + 1
            if done == 3 and dist.get_rank() == told:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.after_step(done):
                break
    assert signal.getsignal(signal.SIGTERM) is before
    dist.barrier()
    with Checkpoints(state, folder, signals=only) as checkpoints:
        assert checkpoints.resume("must") == done
    return done, steps_in(folder)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", ["unsayable", "raises"])
def test_a_save_that_fails_on_one_rank_is_a_warning_on_both(
    ranks: Pools, tmp_path: Path, asynchronous: bool, kind: str
) -> None:
    """Both go on, both stop; nobody waits for the other."""
    ranks(2, timeout_s=60).run(fail_on_one, tmp_path, asynchronous, kind)


def fail_on_one(folder: Path, asynchronous: bool, kind: str) -> None:
    """Job."""
    torch.manual_seed(0)
    model = fxzero.shard(nn.Linear(4, 4), zero=3)
    loader = FailsOnce(ValueError("a bug of the loader") if kind == "raises" else None)
    loader.fails = dist.get_rank() == 1
    state = fxzero.TrainState(model, loader=loader)
    saving._running.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FxZeroWarning)
        with Checkpoints(
            state, folder, every=2, asynchronous=asynchronous, signals=()
        ) as checkpoints:
            for step in range(1, 6):
                checkpoints.after_step(step)
                if step == 2:
                    loader.fails = False
            checkpoints.finish(5)
    texts = [str(w.message) for w in caught if issubclass(w.category, FxZeroWarning)]
    assert len(texts) == 1, texts
    assert "loader" in texts[0]
    assert dist.get_rank() == 1 or "rank 1" in texts[0]
    assert steps_in(folder) == [4, 5]


def test_a_forked_child_ends_by_a_signal(tmp_path: Path) -> None:
    """It has the handler too, and nothing to save."""
    fork = multiprocessing.get_context("fork")
    with Checkpoints(make_run().state, tmp_path):
        began = fork.Event()
        child = fork.Process(target=sleep_from, args=(began,))
        child.start()
        assert began.wait(20)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM


def sleep_from(began: Any) -> None:
    """A child's whole life."""
    began.set()
    time.sleep(60)
