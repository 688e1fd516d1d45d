"""Choose when each transfer starts and where it is joined.

    gather(a); wait(a); A(x, a); gather(b); wait(b); B(y, b)
→   gather(a); gather(b); wait(a); A(x, a); wait(b); B(y, b)

Transfers and runs of compute become tasks with costs (`fxzero.schedule.problem`), and a search
over the whole step orders them for the shortest simulated time within a budget of bytes; of
orders that are about as fast, the one that holds least (`fxzero.schedule.search`). With
`distance`, gathers run a fixed number of buckets ahead instead. Where the budget allows and it
is faster, backward reads what forward gathered (`fxzero.schedule.keep`). What follows a reduce
(the sum over micro-steps, the update) runs as soon as it can, between two runs of compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fxzero.errors import PassError
from fxzero.graph import Lane, StepGraph
from fxzero.graph.step_graph import Transfer
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime.cutout import move_parts_together
from fxzero.schedule.agreement import agree
from fxzero.schedule.keep import keep, keepable
from fxzero.schedule.problem import Outline, Problem
from fxzero.schedule.search import Found, best_order, fixed_order
from fxzero.schedule.tasks import TaskGraph, replay
from fxzero.settings import at_least

KEEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
"""How many buckets to try to keep from forward to backward."""
KEEP_SLACK = 0.03
"""How much slower than the best an order may be if it keeps less."""


@dataclass(frozen=True)
class Choice:
    """A decision for a graph."""

    kept: tuple[Transfer, ...]
    problem: Problem
    found: Found


def default_budget(graph: TaskGraph) -> int:
    """What gathers two buckets ahead of their use, and two reduces in flight, would hold."""
    return replay(graph, fixed_order(graph, 2, 2)).peak_bytes


def names_of(transfers: Sequence[Transfer]) -> frozenset[str]:
    """The buckets that transfers carry."""
    return frozenset(transfer.stamp.bucket for transfer in transfers)


def choose(outline: Outline, candidates: list[Transfer], budget_bytes: int | None) -> Choice:
    """The best order within the budget, with as many parameters kept as make it faster.

    Args:
        candidates: gathers that may go, those first that cost the least memory.
        budget_bytes: None takes `default_budget`.

    Raises:
        PassError: there is no such order.
    """
    if budget_bytes is None:
        budget_bytes = default_budget(outline.problem().graph)
    choices: list[Choice] = []
    for count in (n for n in KEEPS if n <= len(candidates)):
        kept = tuple(candidates[:count])
        problem = outline.problem(budget_bytes, names_of(kept))
        found = best_order(problem.graph)
        if found is None:
            break  # what is kept leaves too little
        choices.append(Choice(kept, problem, found))
    if not choices:
        graph = outline.problem().graph
        least = replay(graph, fixed_order(graph, 0, 0)).peak_bytes
        raise PassError(
            f"prefetch.budget_bytes={budget_bytes}: no order holds so little. Gathering each "
            f"bucket right before its use and reducing each at once holds {least} bytes. Raise "
            "the budget, or make buckets smaller: bucket.cap_bytes."
        )
    limit_us = (1 + KEEP_SLACK) * min(choice.found.replay.makespan_us for choice in choices)
    return next(c for c in choices if c.found.replay.makespan_us <= limit_us)


def first_gathers(problem: Problem, order: Sequence[int]) -> set[str]:
    """Keys of the parameters that are gathered before any compute."""
    found: set[str] = set()
    for index in order:
        if problem.graph.tasks[index].lane is Lane.COMPUTE:
            break
        if index in problem.gathers:
            found.update(problem.gathers[index].stamp.params)
    return found


def question(graph: StepGraph, tasks: TaskGraph) -> str:
    """What must be equal on two ranks for them to decide alike."""
    names = [f"{task.name} {task.after}" for task in tasks.tasks]
    return "\n".join([*names, *(f"{t.launch.target}" for t in graph.transfers())])


@dataclass(frozen=True)
class Prefetch(Pass):
    """Overlap transfers with compute, by cost or by a fixed distance."""

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})

    distance: int | None = None
    """How many buckets ahead of its use a gather starts; 0 starts it right before. None, the
    default, chooses by cost."""
    reduce_distance: int = 1
    """With `distance`: how many reduces may be in flight; 0 joins each one at once."""
    budget_bytes: int | None = None
    """Most bytes of gathered parameters and unreduced gradients at once. The default is what
    gathers two buckets ahead of their use, and two reduces in flight, would hold."""
    keep: bool = True
    """Let backward read what forward gathered where that fits the budget and is faster: between
    stages 2 and 3, in memory and in traffic. False is stage 3 to the letter, and so is a
    `distance`."""

    def __post_init__(self) -> None:
        """Distances count buckets; a budget holds something."""
        super().__post_init__()
        at_least("prefetch.distance", self.distance, 0)
        at_least("prefetch.reduce_distance", self.reduce_distance, 0)
        at_least("prefetch.budget_bytes", self.budget_bytes, 1)

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        move_parts_together(graph)  # so that units are the regions that will be
        cut = graph.loss is None
        outline = Outline(graph, ctx.costs, cut=cut)
        self._warn_of_unused(ctx)
        if self.distance is not None:
            problem = outline.problem()
            order = tuple(fixed_order(problem.graph, self.distance, self.reduce_distance))
            found = Found(order, replay(problem.graph, order), f"distance {self.distance}")
            choice = Choice((), problem, found)
        else:
            choice = self._agreed(graph, outline)
        order = choice.found.order
        first = first_gathers(choice.problem, order)
        keep(graph, list(choice.kept), cut=cut)
        graph.reorder(choice.problem.node_order(order, first))
        result = choice.found.replay
        return Notes(
            tasks=len(choice.problem.graph),
            by=choice.found.by,
            kept=len(choice.kept),
            step_us=round(result.makespan_us),
            exposed_us=round(result.exposed_us),
            held_bytes=result.peak_bytes,
            budget_bytes=choice.problem.graph.budget_bytes,
        )

    def _agreed(self, graph: StepGraph, outline: Outline) -> Choice:
        """Choose, or take what the first rank chose."""
        candidates = keepable(graph) if self.keep else []
        choice = choose(outline, candidates, self.budget_bytes)
        asked = question(graph, outline.problem().graph)
        answer = [len(choice.kept), list(choice.found.order)]
        agreed = agree(graph.identity, asked, answer)
        if agreed == answer:
            return choice
        count, order = agreed
        kept = tuple(candidates[:count])
        problem = outline.problem(choice.problem.graph.budget_bytes, names_of(kept))
        return Choice(kept, problem, Found(tuple(order), replay(problem.graph, order), "agreed"))

    def _warn_of_unused(self, ctx: Context) -> None:
        """Say which settings have no effect beside the others."""
        if self.distance is None and self.reduce_distance != 1:
            ctx.warnings.append(
                f"prefetch.reduce_distance={self.reduce_distance} has no effect without "
                "prefetch.distance: the schedule is made by cost"
            )
        if self.distance is not None and self.budget_bytes is not None:
            ctx.warnings.append(
                f"prefetch.budget_bytes={self.budget_bytes} has no effect beside "
                f"prefetch.distance={self.distance}"
            )
