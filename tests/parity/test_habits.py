"""No habit of real training code trains the wrong thing: right numbers, or an error that says why.

Every habit of `tests.parity.habits` is trained for three steps on two ranks: uncompiled at stages 0
and 3, every third one at stage 3 through ``torch.compile`` or `fxzero.compile_step`, too. At the
other stages and through the other doors an exhaustive run trains it.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from tests.parity.habits import ALL, HABITS, Habit, Run
from tests.parity.harness import Pools
from tests.parity.training import Tensors, assert_same, full, full_parameters, mean_over_ranks

STEPS = 3
Place = tuple[int, str]
"""A stage, and a door."""
OPTIONS = {"lower_regions": {"backend": "eager"}}
CAUGHT_BY = ("InATupleToo", "TiedAfterShard")
"""Habits by whose compiling tests/mutants catches faults."""


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("name", list(HABITS))
def test_habit(ranks: Pools, world: int, name: str) -> None:
    """Where nothing is sharded, and where every read is a gather."""
    expect_nothing_wrong(ranks(world).run(try_habit, name, places(name)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("name", list(HABITS))
def test_habit_through_other_doors(ranks: Pools, world: int, name: str) -> None:
    """And at the other stages."""
    expect_nothing_wrong(ranks(world).run(try_habit, name, other_places(name)))


def expect_nothing_wrong(found: list[list[str]]) -> None:
    """Of any rank."""
    for rank, complaints in enumerate(found):
        assert not complaints, f"rank {rank}\n" + "\n".join(complaints)


def try_habit(name: str, tried: list[Place]) -> list[str]:
    """Job: what is wrong, of some stages and doors."""
    habit = HABITS[name]
    right = any(refusal(habit, zero, door) is None for zero, door in tried)
    expected = train(habit, zero=None, door="reference") if right else {}
    complaints = []
    for zero, door in tried:
        complaint = compare(habit, zero, door, expected)
        if complaint:
            complaints.append(f"zero={zero} {door}: {complaint}")
    return complaints


def places(name: str) -> list[Place]:
    """The stages and doors at which every run tries a habit.

    What it meets at a stage are that stage's parameters, and through a door that door's tracing,
    which is what takes long: what is refused meets one, and every third habit, half of them this
    one, half that one. Those by which faults are caught meet both.
    """
    is_third = list(HABITS).index(name) % 3 == 0
    is_compiled = is_third or bool(HABITS[name].refused)
    return [(0, "eager"), (3, "eager"), *compiling(name)[: 2 if name in CAUGHT_BY else is_compiled]]


def other_places(name: str) -> list[Place]:
    """What an exhaustive run tries besides."""
    everywhere = [*((zero, "eager") for zero in range(4)), *compiling(name)]
    return [place for place in everywhere if place not in places(name)]


def compiling(name: str) -> list[Place]:
    """Doors that compile a habit: one at stage 3, the other one at another stage."""
    doors = [door for door in HABITS[name].doors if door != "eager"]
    turn = list(HABITS).index(name)
    if turn % 2:
        doors.reverse()
    return [*zip((3, turn // 2 % 3), doors, strict=False)]


def refusal(habit: Habit, zero: int, door: str) -> str | None:
    """What fxzero says where it refuses a habit; None where it does not."""
    return habit.refused.get(f"{door} {zero}", habit.refused.get(door))


def compare(habit: Habit, zero: int, door: str, expected: Tensors) -> str:
    """What is wrong at one stage through one door; empty if all is as it should be."""
    refused = refusal(habit, zero, door)
    torch._dynamo.reset()
    try:
        found = train(habit, zero, door)
    except fxzero.FxZeroError as error:
        if refused is None:
            return f"refused: {error}"
        return "" if re.search(refused, str(error)) else f"refused otherwise: {error}"
    if refused is not None:
        return "not refused"
    try:
        assert_same(found, expected, habit.rtol)
    except AssertionError as error:
        return str(error)
    return ""


def train(habit: Habit, zero: int | None, door: str) -> Tensors:
    """Train, and return what was computed: losses, parameters and what the habit kept.

    Args:
        zero: the stage; None for the reference, in one process on all rows.
    """
    torch.manual_seed(0)
    model = habit.build().double()
    kept = habit.before_shard(model)
    if zero is not None:
        fxzero.shard(model, zero=zero)
    habit.after_shard(model)
    optimizer = kept if isinstance(kept, torch.optim.Optimizer) else None
    run = Run(model, model, optimizer or habit.optimizer(model.parameters()))
    if door == "compile":
        run.forward = torch.compile(model, backend="fxzero", options=OPTIONS)  # type: ignore[assignment]
    step = step_of(habit, run, door)
    result: Tensors = {}
    for index in range(STEPS):
        batch = habit.batch(index)
        rows = batch if zero is None else batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = step(rows)
        result[f"loss {index}"] = loss if zero is None else mean_over_ranks(loss)
        habit.after_step(run)
        if isinstance(run.extra, Tensor):
            result[f"extra {index}"] = run.extra
    result |= {f"parameter {name}": p for name, p in full_parameters(model).items()}
    result |= {f"buffer {name}": full(b) for name, b in model.named_buffers()}
    return result


def step_of(habit: Habit, run: Run, door: str) -> Callable[[Tensor], Tensor]:
    """One training step on a batch, through one of the doors."""
    if door == "step":
        compiled = fxzero.compile_step(run.model, run.optimizer, options=OPTIONS)

        def call(batch: Tensor) -> Tensor:
            with warnings.catch_warnings():
                if habit.warns:
                    warnings.filterwarnings("ignore", category=fxzero.FxZeroWarning)
                return compiled(batch).loss

        return call

    def loop(batch: Tensor) -> Tensor:
        loss: Any = habit.loss(run, batch) if habit.loss is not None else run.forward(batch)
        loss.backward()
        habit.after_backward(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        detached: Tensor = loss.detach()
        return detached

    return loop


def test_every_stage_and_door_is_met() -> None:
    """By each habit; and each two of them by an eighth of all habits."""
    met = {name: [*places(name), *other_places(name)] for name in HABITS}
    for name, habit in HABITS.items():
        assert {zero for zero, _ in met[name]} == {0, 1, 2, 3}
        assert {door for _, door in met[name]} == set(habit.doors)
    for zero, door in itertools.product(range(4), ALL):
        assert sum((zero, door) in found for found in met.values()) >= len(HABITS) // 8


def test_the_count() -> None:
    """How many habits there are, and how many of them are refused somewhere."""
    refused = [name for name, habit in HABITS.items() if habit.refused]
    assert len(HABITS) - len(refused) >= 40
    assert len(refused) <= 10
    assert all(isinstance(habit.build(), nn.Module) for habit in HABITS.values())
