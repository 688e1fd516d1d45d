"""Choose when each transfer starts and where it is joined.

    gather(a); wait(a); A(x, a); gather(b); wait(b); B(y, b)
→   gather(a); gather(b); wait(a); A(x, a); wait(b); B(y, b)

Transfers and runs of compute become tasks with costs (`fxzero.schedule.problem`), and a search
over the whole step orders them for the shortest simulated time within a budget of bytes; of
orders that are about as fast, the one that holds least (`fxzero.schedule.search`). With
`distance`, gathers run a fixed number of buckets ahead instead. Where the budget allows and it
is faster, backward reads what forward gathered, and the next micro-step what this one did
(`fxzero.schedule.keep`). What follows a reduce (the sum over micro-steps, the update) runs as soon
as it can, between two runs of compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fxzero.errors import ConfigError, PassError
from fxzero.graph import Lane, StepGraph
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.base import KEPT_SHARE, Context, Fact, Notes, Room
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.outline import split_at_buckets
from fxzero.regions.cutout import move_parts_together
from fxzero.schedule.engine import Replay, TaskGraph, replay
from fxzero.schedule.inventory import Inventory
from fxzero.schedule.keep import Round, bytes_of, keep, keepable
from fxzero.schedule.problem import Problem, problem_of
from fxzero.schedule.search import FoundOrder, best_order, fixed_order
from fxzero.settings import at_least

KEEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
"""How many to try to keep until they are gathered next, of what is alike in all micro-steps."""
KEEP_SLACK = 0.03
"""How much slower than the best an order may be if it holds less."""


@dataclass(frozen=True)
class Choice:
    """A decision for a graph."""

    kept: tuple[Round, ...]
    problem: Problem
    found: FoundOrder


def default_budget(graph: TaskGraph) -> int:
    """What gathers two buckets ahead of their use, and two reduces in flight, would hold."""
    return replay(graph, fixed_order(graph, 2, 2)).peak_bytes


def least_budget(graph: TaskGraph) -> int:
    """What gathering each bucket right before its use and reducing each at once would hold."""
    return replay(graph, fixed_order(graph, 0, 0)).peak_bytes


def budget_for(room: Room, graph: TaskGraph, candidates: Sequence[Round]) -> int:
    """What transfers may hold.

    Args:
        candidates: gathers, for each of which the one before it could stand.
    """
    if room is Room.LEAST:
        return least_budget(graph)
    return default_budget(graph) + int(KEPT_SHARE.get(room, 0) * bytes_of(candidates))


def names_of(rounds: Iterable[Round]) -> frozenset[str]:
    """The buckets that gathers carry."""
    return frozenset(transfer.stamp.bucket for transfers in rounds for transfer in transfers)


def choose(
    inventory: Inventory,
    candidates: Sequence[Round],
    budget_bytes: int,
    share: float | None = None,
) -> Choice:
    """The best order within the budget, with as many parameters kept as make it faster.

    Args:
        candidates: gathers that may go, those first that cost the least memory.
        share: how many of them shall go; None tries several numbers.

    Raises:
        PassError: there is no such order.
    """
    choices: list[Choice] = []
    every = len(candidates)
    counts = (*KEEPS, every) if share is None else (int(share * every),)
    for count in sorted({min(n, every) for n in counts}):
        if choices and _is_about_as_fast_as_any(choices[0].found.replay):
            held_bytes = choices[0].found.replay.peak_bytes
            if count < every or bytes_of(candidates) >= held_bytes:
                continue  # nothing to win, but where one copy of all is less than several of some
        kept = tuple(candidates[:count])
        problem = problem_of(inventory, budget_bytes, names_of(kept))
        found = best_order(problem.graph, problem.is_steady)
        if found is None:
            break  # what is kept leaves too little
        choices.append(Choice(kept, problem, found))
    if not choices:
        least = least_budget(problem_of(inventory).graph)
        raise PassError(
            f"prefetch.budget_bytes={budget_bytes}: no order holds so little. Gathering each "
            f"bucket right before its use and reducing each at once holds {least} bytes. Raise "
            "the budget, or make buckets smaller: bucket.cap_bytes."
        )
    limit_us = (1 + KEEP_SLACK) * min(choice.found.replay.makespan_us for choice in choices)
    fast = [choice for choice in choices if choice.found.replay.makespan_us <= limit_us]
    return min(fast, key=lambda choice: choice.found.replay.peak_bytes)


def _is_about_as_fast_as_any(replay: Replay) -> bool:
    """Whether no order is so much faster that it would be taken: compute has little to wait for."""
    return replay.makespan_us <= (1 + KEEP_SLACK) * replay.busy_us.get(Lane.COMPUTE, 0.0)


def first_gathers(problem: Problem, order: Sequence[int]) -> set[str]:
    """Keys of the parameters that are gathered before any compute."""
    found: set[str] = set()
    for index in order:
        if problem.graph.tasks[index].lane is Lane.COMPUTE:
            break
        if index in problem.gathers:
            found.update(problem.gathers[index].stamp.params)
    return found


@dataclass(frozen=True)
class Order(Decision):
    """When each task of a step is issued."""

    kept: tuple[str, ...]
    """Buckets that are not gathered: what the gather before has brought is read."""
    order: tuple[str, ...]
    """The tasks, in the order in which they are issued."""
    by: str
    """How the order was found."""
    step_us: float
    """By the cost model."""
    exposed_us: float
    """How long compute stands still for transfers."""
    held_bytes: int
    """The most that gathered parameters and unreduced gradients take at once."""
    budget_bytes: int | None


@dataclass(frozen=True)
class Prefetch(DecidingPass[Order]):
    """Overlap transfers with compute, by cost or by a fixed distance."""

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})
    decides: ClassVar[type[Any]] = Order

    distance: int | None = None
    """How many buckets ahead of its use a gather starts; 0 starts it right before. None, the
    default, chooses by cost."""
    reduce_distance: int = 1
    """With `distance`: how many reduces may be in flight; 0 joins each one at once."""
    budget_bytes: int | None = None
    """Most bytes of gathered parameters and unreduced gradients at once. The default is what
    gathers two buckets ahead of their use, and two reduces in flight, would hold; under a
    `memory_budget` more or less, whichever is faster within it."""
    keep: bool = True
    """Let backward read what forward gathered, and the next micro-step what this one did, where
    that fits the budget and is faster: between stages 2 and 3, in memory and in traffic. False is
    stage 3 to the letter, and so is a `distance`."""

    def __post_init__(self) -> None:
        """Distances count buckets; a budget holds something."""
        super().__post_init__()
        at_least("prefetch.distance", self.distance, 0)
        at_least("prefetch.reduce_distance", self.reduce_distance, 0)
        at_least("prefetch.budget_bytes", self.budget_bytes, 1)

    def question(self, graph: StepGraph, ctx: Context) -> str:
        """Ranks order alike where they have the same tasks, whatever those take there."""
        inventory = self._inventory(graph, ctx)
        names = [f"{task.name} {task.after}" for task in problem_of(inventory).graph.tasks]
        room = "" if ctx.level is None else ctx.level.room
        return "\n".join([room, *names, *(str(t.record.kind) for t in inventory.transfers)])

    def decide(self, graph: StepGraph, ctx: Context) -> Order:
        """Search for an order, and for what to keep."""
        inventory = self._inventory(graph, ctx)
        self._warn_of_unused(ctx)
        if self.distance is not None:
            problem = problem_of(inventory)
            order = tuple(fixed_order(problem.graph, self.distance, self.reduce_distance))
            found = FoundOrder(order, replay(problem.graph, order), f"distance {self.distance}")
            choice = Choice((), problem, found)
        else:
            candidates = keepable(graph, inventory.transfers) if self.keep else []
            budget_bytes, share = self.budget_bytes, None
            if budget_bytes is None:
                room = Room.USUAL if ctx.level is None else ctx.level.room
                budget_bytes = budget_for(room, problem_of(inventory).graph, candidates)
                share = KEPT_SHARE.get(room)
                if room is Room.LEAST:
                    candidates = []
            choice = choose(inventory, candidates, budget_bytes, share)
        result = choice.found.replay
        names = choice.problem.names()
        return Order(
            kept=tuple(t.stamp.bucket for transfers in choice.kept for t in transfers),
            order=tuple(names[index] for index in choice.found.order),
            by=choice.found.by,
            step_us=result.makespan_us,
            exposed_us=result.exposed_us,
            held_bytes=result.peak_bytes,
            budget_bytes=choice.problem.graph.budget_bytes,
        )

    def apply(self, graph: StepGraph, decision: Order, ctx: Context) -> Notes:
        """Put the nodes into the order that a decision means.

        Raises:
            ConfigError: it is no order of this graph's tasks.
        """
        cut = graph.loss is None
        inventory = self._inventory(graph, ctx)
        kept = _kept(graph, inventory.transfers, decision.kept)
        problem = problem_of(inventory, kept={*decision.kept})
        order = _indices(problem, decision.order)
        first = first_gathers(problem, order)
        keep(graph, kept, inventory.transfers, cut=cut)
        graph.reorder(problem.node_order(order, first))
        ctx.scratch.pop(self.name, None)
        return Notes(
            tasks=len(problem.graph),
            by=decision.by,
            kept=len(kept),
            step_us=round(decision.step_us),
            exposed_us=round(decision.exposed_us),
            held_bytes=decision.held_bytes,
            budget_bytes=decision.budget_bytes,
        )

    def _inventory(self, graph: StepGraph, ctx: Context) -> Inventory:
        """The graph's units and transfers, made once for each graph."""
        known = ctx.scratch.get(self.name)
        if isinstance(known, Inventory) and known.step is graph:
            return known
        move_parts_together(graph)  # so that units are the regions that will be
        if split_at_buckets(graph):
            move_parts_together(graph)  # casts of gradients came between some
        made = Inventory(graph, ctx.costs, cut=graph.loss is None, fuses=ctx.fuses)
        ctx.scratch[self.name] = made
        return made

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


def _kept(
    graph: StepGraph, transfers: Sequence[TransferNodes], names: Sequence[str]
) -> list[TransferNodes]:
    """The transfers of the buckets that are kept.

    Raises:
        ConfigError: one cannot be.
    """
    candidates = {t.stamp.bucket: t for kept in keepable(graph, transfers) for t in kept}
    for name in names:
        if name not in candidates:
            known = ", ".join(candidates) or "none"
            raise ConfigError(
                f"the plan keeps bucket {name!r}, and could keep: {known}. Where buckets were "
                "changed, drop prefetch: it is then decided anew."
            )
    if len({*names}) < len(names):
        raise ConfigError(f"the plan keeps a bucket twice: {', '.join(names)}")
    return [candidates[name] for name in names]


def _indices(problem: Problem, names: Sequence[str]) -> list[int]:
    """An order of tasks by their names.

    Raises:
        ConfigError: a task is missing, or twice there, or stands before what it needs.
    """
    index = {name: i for i, name in enumerate(problem.names())}
    if sorted(names) != sorted(index):
        strange = sorted({*names} ^ {*index}) or sorted({n for n in names if [*names].count(n) > 1})
        raise ConfigError(
            f"the plan's order must name each of {len(index)} tasks once; look at "
            f"{', '.join(strange[:4])}. Where buckets were changed, drop the order of prefetch: it "
            "is then made anew."
        )
    order = [index[name] for name in names]
    place = {task: position for position, task in enumerate(order)}
    for task in order:
        for before in problem.graph.tasks[task].after:
            if place[before] > place[task]:
                tasks = problem.names()
                raise ConfigError(
                    f"the plan's order has {tasks[task]!r} before {tasks[before]!r}, which it needs"
                )
    return order
