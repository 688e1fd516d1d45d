"""Schedules of a pipeline as data: what each rank does, in which order.

    1f1b, 2 stages, 3 micro-steps        rank 0   0F0 0F1 0B0 0F2 0B1 0B2
                                         rank 1   1F0 1B0 1F1 1B1 1F2 1B2

``2F1`` is the forward of stage 2 for micro-step 1. A backward (``B``) may be two: gradients of what
the stage was given (``I``), for which the stage before waits, and those of its weights (``W``),
which nobody waits for (Qi et al. 2023, "Zero bubble pipeline parallelism"). The text is that of
CSV files, a row a rank, in which people bring schedules of their own.

What is in the tables of the literature is made here; what a table comes to, and whether it is one
at all, says `fxzero.pipeline.replay`.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple


class Work(StrEnum):
    """A part of a micro-step in a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENTS = "I"
    """The half of a backward that the stage before waits for."""
    WEIGHT_GRADIENTS = "W"
    """The other half."""


class Action(NamedTuple):
    """What a rank does without a break."""

    stage: int
    """Counted over all ranks: with two chunks a rank, rank 0 of 4 has stages 0 and 4."""
    work: Work
    micro_step: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.micro_step}"


@dataclass(frozen=True)
class Table:
    """What each rank does."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """By stage, the rank that has it."""
        return {action.stage: r for r, row in enumerate(self.ranks) for action in row}

    @cached_property
    def num_stages(self) -> int:
        """How many stages there are in all."""
        return max(self.rank_of, default=-1) + 1

    @cached_property
    def num_micro_steps(self) -> int:
        """How many micro-steps a step has."""
        return max((action.micro_step for row in self.ranks for action in row), default=-1) + 1

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the two halves of a backward are apart."""
        return any(action.work is Work.INPUT_GRADIENTS for row in self.ranks for action in row)

    def needs(self, action: Action) -> list[Action]:
        """What must have ended before an action, on whatever rank."""
        stage, work, micro_step = action
        forward = Action(stage, Work.FORWARD, micro_step)
        half = Work.INPUT_GRADIENTS if self.splits_backward else Work.BACKWARD
        match work:
            case Work.FORWARD:
                return [Action(stage - 1, work, micro_step)] if stage else []
            case Work.WEIGHT_GRADIENTS:
                return [Action(stage, half, micro_step)]
            case _:
                last = stage == self.num_stages - 1
                return [forward] if last else [forward, Action(stage + 1, half, micro_step)]

    def write(self, path: Path) -> None:
        """Write a CSV file."""
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([map(str, row) for row in self.ranks])


_F, _B, _I, _W = Work.FORWARD, Work.BACKWARD, Work.INPUT_GRADIENTS, Work.WEIGHT_GRADIENTS


def in_rounds(
    name: str,
    num_ranks: int,
    num_micro_steps: int,
    chunks: int,
    size: int,
    warm_up: Callable[[int], int],
) -> Table:
    """Forwards in rounds of some micro-steps of one chunk, then the same of the next, backwards
    the other way round; and one of each in turns once a rank is warm.

    Args:
        size: how many micro-steps a round has, or a few more.
        warm_up: by rank, how many forwards come before the first backward beside which one is.
    """
    count = max(num_micro_steps // size, 1)
    begins = [i * num_micro_steps // count for i in range(count + 1)]
    rounds = [range(first, end) for first, end in pairwise(begins)]
    rows = []
    for rank in range(num_ranks):
        stages = [rank + chunk * num_ranks for chunk in range(chunks)]
        forwards = [Action(s, _F, m) for part in rounds for s in stages for m in part]
        backwards = [Action(s, _B, m) for part in rounds for s in stages[::-1] for m in part]
        first = min(warm_up(rank), len(forwards))
        rest = zip_longest(forwards[first:], backwards)
        pairs = [action for pair in rest for action in pair if action is not None]
        rows.append((*forwards[:first], *pairs))
    return Table(name, tuple(rows))


def gpipe(num_ranks: int, num_micro_steps: int) -> Table:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return _all_forwards_first("gpipe", num_ranks, num_micro_steps, 1)


def breadth_first(num_ranks: int, num_micro_steps: int, chunks: int = 2) -> Table:
    """All micro-steps of a chunk before the next chunk: each parameter is gathered once a phase
    (Lamy-Poirier 2023)."""
    return _all_forwards_first("breadth_first", num_ranks, num_micro_steps, chunks)


def _all_forwards_first(name: str, num_ranks: int, num_micro_steps: int, chunks: int) -> Table:
    count = num_micro_steps * chunks
    return in_rounds(name, num_ranks, num_micro_steps, chunks, num_micro_steps, lambda rank: count)


def one_f_one_b(num_ranks: int, num_micro_steps: int) -> Table:
    """A backward as soon as it can be: a rank holds no more micro-steps than there are ranks from
    it to the last (PipeDream-Flush, Narayanan et al. 2021)."""
    return in_rounds(
        "1f1b", num_ranks, num_micro_steps, 1, num_ranks, lambda rank: num_ranks - rank - 1
    )


def interleaved(num_ranks: int, num_micro_steps: int, chunks: int = 2) -> Table:
    """1F1B with several chunks a rank, in rounds of as many micro-steps as there are ranks: less
    idle time, more in flight (Narayanan et al. 2021, section 2.2)."""
    longest = -(-num_micro_steps // max(num_micro_steps // num_ranks, 1))
    return in_rounds(
        "interleaved",
        num_ranks,
        num_micro_steps,
        chunks,
        num_ranks,
        lambda rank: (chunks - 1) * longest + 2 * (num_ranks - rank - 1),
    )


def zb_h1(num_ranks: int, num_micro_steps: int) -> Table:
    """1F1B whose gradients of weights wait for idle time; no rank holds more than 1F1B's first (Qi
    et al. 2023, ZB-H1)."""
    return _Turns(
        "zb_h1",
        num_micro_steps,
        [[rank] for rank in range(num_ranks)],
        begun=[num_ranks - rank for rank in range(num_ranks)],
        unended=num_ranks,
    ).run()


def zbv(num_ranks: int, num_micro_steps: int) -> Table:
    """Two chunks a rank, there and back, so that the last stage is where the first one is (Qi et
    al. 2024, ZB-V)."""
    return _Turns(
        "zbv",
        num_micro_steps,
        [[rank, 2 * num_ranks - 1 - rank] for rank in range(num_ranks)],
        begun=[2 * num_ranks] * num_ranks,
        unended=2 * num_ranks,
    ).run()


TABLES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth_first": breadth_first,
    "zb_h1": zb_h1,
    "zbv": zbv,
}
"""By name, what makes a table for so many ranks and micro-steps."""


class _Turns:
    """Each rank does, unit by unit of time, what is ready: a forward rather than input gradients,
    and these rather than weights', of the stage that is furthest. A forward begins within limits.

    Args:
        stages: by rank, its stages.
        begun: by rank, the most forwards whose input gradients are not there yet.
        unended: the most whose weight gradients are not.
    """

    def __init__(
        self,
        name: str,
        num_micro_steps: int,
        stages: list[list[int]],
        begun: list[int],
        unended: int,
    ) -> None:
        self.num_micro_steps = num_micro_steps
        self.stages = stages
        self.begun = begun
        self.unended = unended
        self.rows: list[list[Action]] = [[] for _ in stages]
        self.done: Counter[tuple[int, Work]] = Counter()
        """By stage and work, of how many micro-steps it has ended."""
        self.shape = Table(name, tuple(tuple(Action(s, _I, 0) for s in own) for own in stages))

    def run(self) -> Table:
        left = len(self.shape.rank_of) * self.num_micro_steps * 3
        while left:
            found = [self._next(rank) for rank in range(len(self.rows))]
            chosen = [(rank, action) for rank, action in enumerate(found) if action is not None]
            assert chosen, f"{self.shape.name}: nothing is ready"
            for rank, action in chosen:
                self.rows[rank].append(action)
                self.done[action.stage, action.work] += 1
            left -= len(chosen)
        return Table(self.shape.name, tuple(map(tuple, self.rows)))

    def _next(self, rank: int) -> Action | None:
        for work in (_F, _I, _W) if self._may_begin(rank) else (_I, _W):
            for stage in reversed(self.stages[rank]):
                action = Action(stage, work, self.done[stage, work])
                if action.micro_step < self.num_micro_steps and self._is_ready(action):
                    return action
        return None

    def _is_ready(self, action: Action) -> bool:
        needs = self.shape.needs(action)
        return all(self.done[need.stage, need.work] > need.micro_step for need in needs)

    def _may_begin(self, rank: int) -> bool:
        forwards, inputs, weights = (
            sum(self.done[stage, work] for stage in self.stages[rank]) for work in (_F, _I, _W)
        )
        return forwards - inputs < self.begun[rank] and forwards - weights < self.unended


def in_flight(table: Table) -> list[int]:
    """By stage, the most micro-steps whose forward has begun and whose backward has not ended."""
    last = Work.WEIGHT_GRADIENTS if table.splits_backward else Work.BACKWARD
    most = [0] * table.num_stages
    for row in table.ranks:
        now = [0] * table.num_stages
        for action in row:
            now[action.stage] += (action.work is Work.FORWARD) - (action.work is last)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most
