"""Ranks that are late, dead, stopped or elsewhere: an error on every living rank, or a warning.

Limits are a tenth of what they are by default: the judge looks every 0.1 s, ranks that wait for
each other are told after 1 s, a silent one is asked after 2 s.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from fxzero._compat import default_store
from fxzero.errors import ConfigError, RankLostError, RanksDisagreeError
from fxzero.ranks import lost, watch
from fxzero.ranks.status import Limits
from tests.parity.harness import Pools, RanksFailedError
from tests.parity.sharded import compile_eagerly
from tests.tiers import exhaustive

SOON = Limits(warn=1.0, look=0.3, deadlock=1.0, stopped=2.0, probe=3.0, beat=0.2, sample=0.1)
HERE = "test_watch.py"

on_two_and_three = pytest.mark.parametrize("world", [2, *exhaustive(3)])


def stepping(compiled: bool = True) -> Callable[[], None]:
    """A function that takes a training step; one was taken."""
    watch.start(SOON)
    torch.manual_seed(0)
    model = fxzero.shard(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), zero=3)
    called = compile_eagerly(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        called(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.model = model  # type: ignore[attr-defined]
    step()
    return step


def all_have_come() -> None:
    """Wait until every rank is here, without a collective that a death next to it could break."""
    store, rank = default_store(), dist.get_rank()
    here = [f"tests/here/{peer}" for peer in range(dist.get_world_size())]
    store.set(here[rank], b"")
    store.wait(here)


def raised(action: Callable[[], object]) -> tuple[str, str, float]:
    """The kind of error, its message, and how long it took."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


class Said(logging.Handler):
    """What the logger ``fxzero`` was told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.then: Callable[[], object] = lambda: None
        """Called after each line."""
        logging.getLogger("fxzero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())
        self.then()


def check_the_living(error: RanksFailedError, world: int) -> None:
    """All ranks but one have found what they should; else what each of them says is shown whole."""
    if str(error).count("AssertionError: as expected") < world - 1:
        pytest.fail(str(error), pytrace=False)


def die(compiled: bool) -> None:
    """Job: rank 1 is killed between two steps."""
    step = stepping(compiled)
    all_have_come()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = raised(lambda: [step() for _ in range(3)])
    assert found[0] == "RankLostError", found
    # With beats of 0.2 s a rank that has just raised may be silent too on a busy machine.
    assert re.search(r"rank (0, )?1(, 2)? has died", found[1]), found
    assert HERE in found[1]
    where = "gather.forward.0" if compiled else "gather 0/0.weight"
    # A closed connection is noticed as soon as the run is announced, if the news is there by then.
    assert where in found[1] or "(before its first bucket)" in found[1], found
    assert "run " in found[1]
    raise AssertionError(f"as expected: {found}")  # the pool is of no more use


@on_two_and_three
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_rank_that_dies(ranks: Pools, world: int, compiled: bool) -> None:
    """Every living rank names it, the run, the bucket and its own line."""
    with pytest.raises(RanksFailedError) as caught:
        ranks(world).run(die, compiled)
    check_the_living(caught.value, world)


def wait_for_one_that_gave_up() -> None:
    """Job: rank 1 dies, rank 2 gives up, and rank 0 waits for rank 2."""
    stepping()
    all_have_come()
    found = ("", "", 0.0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif dist.get_rank() == 2:
        running = watch.current()
        assert running is not None
        running.fail("it gave up")
        # In life, and with open connections, for as long as it is waited for.
        default_store().wait(["tests/found"], timedelta(seconds=30))
    else:
        found = raised(lambda: dist.recv(torch.empty(1), 2))
        default_store().set("tests/found", b"")
    assert found[2] < 20, found
    raise AssertionError(f"as expected: {found}")


@pytest.mark.parametrize("world", [3])
def test_a_wait_is_ended_though_the_next_rank_has_died(ranks: Pools, world: int) -> None:
    """Receiving from a dead rank closes no connection: the wait was ended by ending the process."""
    with pytest.raises(RanksFailedError) as caught:
        ranks(world).run(wait_for_one_that_gave_up)
    assert str(caught.value).count("AssertionError: as expected: ('R") == 1, caught.value


def wait_holding_a_sentinel() -> None:
    """Job: rank 1 is a little late; what rank 0's callers hold meanwhile must go when they do."""
    step = stepping()
    sample = 0.8
    watch.start(replace(SOON, look=3.0, sample=sample))

    class Sentinel:
        pass

    def train(late: float) -> weakref.ref[Sentinel]:
        held = Sentinel()
        if dist.get_rank() == 1:
            time.sleep(late * sample)
        step()
        return weakref.ref(held)

    for late in (1.2, 1.4, 1.6, 1.8):
        sentinel = train(late)
        for _ in range(10):  # the judge may be in the middle of a look
            if sentinel() is not None:
                time.sleep(0.02 * sample)
        assert sentinel() is None


def test_a_wait_that_is_looked_at_keeps_nothing_alive(ranks: Pools) -> None:
    """A frame that the judge held kept a step's activations: 55 MB of a benchmark's 320."""
    ranks(2).run(wait_holding_a_sentinel)


def suspend() -> None:
    """Job: rank 1 is stopped between two steps."""
    step = stepping()
    all_have_come()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = raised(lambda: [step() for _ in range(3)])
    assert found[0] == "RankLostError", found
    assert "rank 1 has stopped" in found[1], found
    assert HERE in found[1], found
    assert found[2] < 40, found
    raise AssertionError(f"as expected: {found}")


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
def test_a_rank_that_is_stopped(ranks: Pools, world: int) -> None:
    """Every living rank says so."""
    with pytest.raises(RanksFailedError) as caught:
        ranks(world).run(suspend)
    check_the_living(caught.value, world)


def wait_elsewhere(what: str) -> tuple[tuple[str, str, float], list[str]]:
    """Job: rank 0 does alone what all must do; the others go on, or wait in a barrier."""
    step = stepping()
    model: nn.Module = step.model  # type: ignore[attr-defined]
    said = Said()

    def go() -> None:
        if dist.get_rank() == 0:
            if what == "evaluate":
                step()
            elif what == "print":
                print(next(model.parameters()).full_tensor())  # type: ignore[attr-defined]
            elif what == "one more step":
                step()
        if what == "print":
            step()
        else:
            dist.barrier()

    return raised(go), said.lines


def check_elsewhere(what: str) -> None:
    """Job: all ranks are told, and not by the transport after its own patience."""
    (kind, message, took), lines = wait_elsewhere(what)
    told = "\n".join([message, *lines])
    assert kind in ("RanksDisagreeError", "RuntimeError"), (kind, message, lines)
    assert "ranks wait for each other" in told, (kind, told)
    for rank in range(dist.get_world_size()):
        assert f"rank {rank}: waits in " in told
    assert HERE in told
    assert "evaluate" in told
    assert took < 40
    raise AssertionError(f"as expected: {kind}")


@on_two_and_three
@pytest.mark.parametrize("what", ["evaluate", "print", *exhaustive("one more step")])
def test_ranks_that_wait_in_different_places(ranks: Pools, world: int, what: str) -> None:
    """Nobody hangs, and each rank's place is named on all of them."""
    with pytest.raises(RanksFailedError) as caught:
        ranks(world).run(check_elsewhere, what)
    assert str(caught.value).count("AssertionError: as expected") == world, caught.value


def check_among_many_groups() -> None:
    """Job: as in a program whose meshes have many axes, or that has trained many models."""
    for _ in range(24):
        dist.new_group()
    check_elsewhere("one more step")


def test_many_groups_are_no_work(ranks: Pools) -> None:
    """Each has a thread that wakes up for nothing: ranks were never told of what all waited for."""
    with pytest.raises(RanksFailedError) as caught:
        ranks(2).run(check_among_many_groups)
    assert str(caught.value).count("AssertionError: as expected") == 2, caught.value


def be_late(how: str, times: int) -> list[str]:
    """Job: rank 1 takes much longer than any limit, once or again."""
    step = stepping()
    said = Said()
    for _ in range(times):
        if dist.get_rank() == 1:
            if how == "asleep":
                time.sleep(5)
            else:
                sum(range(250_000_000))  # one call in C that holds Python's lock
        step()
    return said.lines


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("how", "times"), [("asleep", 1), *exhaustive(("asleep", 2), ("holding the lock", 2))]
)
def test_a_rank_that_is_only_late(ranks: Pools, world: int, how: str, times: int) -> None:
    """It is waited for, and whoever waits says for whom; where, if it can tell."""
    waiting, late = ranks(world).run(be_late, how, times)
    assert not late
    assert any("rank 0 has waited for" in line and "gather.forward.0" in line for line in waiting)
    if how == "asleep":
        assert any("rank 1 is busy at" in line and HERE in line for line in waiting)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf", ""])
def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It is refused by name."""
    monkeypatch.setenv("FXZERO_WARN_S", text)
    with pytest.raises(ConfigError, match=r"FXZERO_WARN_S=.* must be a positive number of seconds"):
        Limits.from_environment()


def test_the_limits() -> None:
    """By default an error comes within 40 s."""
    limits = Limits.from_environment()
    assert limits.warn == 30
    assert limits.look + limits.stopped + limits.probe + 2 * limits.beat < 40
    assert limits.look + limits.deadlock + 3 * limits.beat < 40


def test_errors_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the transport's are explained."""
    error = RuntimeError("size mismatch")
    assert lost.explained(error) is error
    assert issubclass(RankLostError, RuntimeError)
    assert issubclass(RanksDisagreeError, RuntimeError)
