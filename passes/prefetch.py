"""Choose when each transfer starts and where it is joined.

    gather(a); wait(a); A(x, a); gather(b); wait(b); B(y, b)
→   gather(a); gather(b); wait(a); A(x, a); wait(b); B(y, b)

Transfers and runs of compute become tasks with costs (`fxzero.schedule.problem`), and a search
over the whole step orders them for the shortest simulated time within a budget of bytes; of
orders that are about as fast, the one that holds least (`fxzero.schedule.search`). With
`distance`, gathers run a fixed number of buckets ahead instead. What follows a reduce (the sum
over micro-steps, the update) runs as soon as it can, between two runs of compute. The set of
nodes stays as it was: only the order changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxzero.errors import ConfigError, PassError
from fxzero.graph import Lane, StepGraph
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.schedule.problem import Problem, problem_of
from fxzero.schedule.search import Found, best_order, fixed_order
from fxzero.schedule.tasks import TaskGraph, replay


def default_budget(graph: TaskGraph) -> int:
    """What gathers one bucket ahead of their use, and one reduce in flight, would hold."""
    return replay(graph, fixed_order(graph, 1, 1)).peak_bytes


def search(graph: TaskGraph) -> Found:
    """The best order within the budget.

    Raises:
        PassError: there is none.
    """
    found = best_order(graph)
    if found is None:
        least = replay(graph, fixed_order(graph, 0, 0)).peak_bytes
        assert graph.budget_bytes is not None
        raise PassError(
            f"prefetch.budget_bytes={graph.budget_bytes}: no order holds so little. Gathering "
            f"each bucket right before its use and reducing each at once holds {least} bytes. "
            "Raise the budget, or make buckets smaller: bucket.cap_bytes."
        )
    return found


def first_gathers(problem: Problem, order: tuple[int, ...]) -> set[str]:
    """Keys of the parameters that are gathered before any compute."""
    found: set[str] = set()
    for index in order:
        task = problem.graph.tasks[index]
        if task.lane is Lane.COMPUTE:
            break
        if task.lane is Lane.GATHER:
            found.update(p for node in problem.nodes[index] for p in node.meta["fxzero"].params)
    return found


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
    gathers one bucket ahead of their use would hold."""

    def __post_init__(self) -> None:
        for field in ("distance", "reduce_distance"):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ConfigError(f"prefetch.{field}={value} must be 0 or more")
        if self.budget_bytes is not None and self.budget_bytes <= 0:
            raise ConfigError(f"prefetch.budget_bytes={self.budget_bytes} must be positive")

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        cut = graph.loss is None
        problem = problem_of(graph, ctx.costs, budget_bytes=self.budget_bytes, cut=cut)
        tasks = problem.graph
        if self.distance is not None:
            self._warn_of_unused(ctx)
            order = tuple(fixed_order(tasks, self.distance, self.reduce_distance))
            found = Found(order, replay(tasks, order), f"distance {self.distance}")
        else:
            if self.budget_bytes is None:
                tasks = TaskGraph(tasks.tasks, default_budget(tasks))
            found = search(tasks)
        graph.reorder(problem.node_order(found.order, first_gathers(problem, found.order)))
        return Notes(
            tasks=len(tasks),
            by=found.by,
            step_us=round(found.replay.makespan_us),
            exposed_us=round(found.replay.exposed_us),
            held_bytes=found.replay.peak_bytes,
            budget_bytes=tasks.budget_bytes,
        )

    def _warn_of_unused(self, ctx: Context) -> None:
        if self.budget_bytes is not None:
            ctx.warnings.append(
                f"prefetch.budget_bytes={self.budget_bytes} has no effect beside "
                f"prefetch.distance={self.distance}"
            )
