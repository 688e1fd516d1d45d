"""Fit a step into a memory budget: try levels, compile what the tries need, agree on one.

    graph ─ passes that look at no level ─┬─ copy, level 0, room usual ─ passes ─► peak, time
                                          ├─ copy, level 7, room usual ─ passes ─► peak, time
                                          └─ …

A try schedules a copy of the whole step and simulates it. Once a level is found its regions are
compiled, whose memory is known then and not estimated; all tries are looked at again, until
nothing new was compiled. The level may be a rank's own, where its batch is another one; what
decides on collectives (the transfers' room, and what is kept in parts) is the first rank's, also
for a rank that compiles again, alone.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxzero._compat import is_symbolic
from fxzero.compiler.largest_parts import has_smaller_parts, largest_shape, take_largest_parts
from fxzero.compiler.level_search import Search, Trial
from fxzero.compiler.memory_budget import MemoryBudget, size_text, too_small
from fxzero.compiler.run import PassRecord
from fxzero.cost.library_workspace import measure
from fxzero.cost.own_step import memory_of_own_step
from fxzero.cost.settings import device_of
from fxzero.errors import ConfigError
from fxzero.graph import Role, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.passes.base import Fact, Level, Room
from fxzero.passes.decisions import Decisions
from fxzero.passes.lower_regions import share_compilation
from fxzero.passes.lower_transfers import lower_transfers, note_sums_in_place, runs_on_gloo
from fxzero.passes.prefetch import Order
from fxzero.passes.recompute import Recompute
from fxzero.passes.repeat_values import Repetitions
from fxzero.regions.region import CACHE
from fxzero.runtime.updates import OwnStep
from fxzero.schedule.agreement import agree, agreed
from fxzero.schedule.keep import bytes_of, keepable
from fxzero.schedule.region_plans import plan_at_peak
from fxzero.schedule.repetition_levels import Levels
from fxzero.schedule.simulate import Memory, simulate, simulate_memory, tasks_of
from fxzero.schedule.storage import regions_of

if TYPE_CHECKING:
    from fxzero.compiler.compilation import Compilation

log = logging.getLogger("fxzero")

Parts = tuple[tuple[str, str], ...]
"""Values that are kept in parts, and along which ranks."""


@dataclass(frozen=True)
class Scheduled:
    """A graph that passes have decided on."""

    graph: StepGraph
    records: list[PassRecord]
    decisions: Decisions
    facts: frozenset[Fact]

    @property
    def order(self) -> Order:
        """When its tasks run."""
        found = self.decisions.made["prefetch"]
        assert isinstance(found, Order)
        return found

    @property
    def parts(self) -> Parts:
        """What it keeps in parts."""
        found = self.decisions.made["recompute"]
        assert isinstance(found, Repetitions)
        return tuple((part.value, part.along) for part in found.parts)


class Fitting:
    """One graph on its way into its budget.

    Args:
        compilation: whose passes run, and who keeps what they say.
    """

    def __init__(self, compilation: Compilation, graph: StepGraph, budget: MemoryBudget) -> None:
        self.compilation = compilation
        self.context = compilation.context
        self.config = compilation.config
        self.passes = compilation.pipelines.scheduling
        self.graph = graph
        self.budget = budget
        device = device_of(graph)
        own_bytes = budget.bytes_of(lambda: self.config.cost.device_bytes(device))
        # Of parameters ranks may have parts of several sizes; of a batch they mostly have not.
        self.about = f"memory {budget.text} of {' '.join(map(str, batch_shapes(graph)))}"
        self.budget_bytes: int = agree(graph.identity, self.about, own_bytes)
        self.standing_bytes = gradients_before(graph)
        self.levels: Levels | None = None
        self.compiled = 0
        """How often regions were compiled."""
        self.fixed: tuple[Room, Parts] | None = None
        """What another rank, or an earlier graph of this structure, has decided."""
        self.start: Scheduled | None = None
        """What all levels begin with."""
        self.probed: Trial[Scheduled] | None = None
        """A trial that was made before the search."""

    def run(self) -> int:
        """Let the graph become the fastest step that fits.

        Returns:
            What bounds its peak on this rank.

        Raises:
            ConfigError: nothing fits.
        """
        self._begin()
        questions = self._questions()
        while True:
            self._take_what_is_decided(questions[0])
            trial = self._search()
            if trial is None and self.fixed is not None and len(questions) > 1:
                del questions[0]  # that was decided for smaller batches
                continue
            if trial is None:
                raise self._too_small()
            decided = _as_json(trial.room, trial.step.parts)
            if agree(self.graph.identity, questions[0], decided) == decided:
                break
        self._become(trial)
        self._warn_of_own_step()
        # Of all ranks the first one's peak is within the budget; this one's batch may be another.
        return max(self.budget_bytes, trial.memory.peak_bytes)

    def probe(self) -> Trial[Scheduled]:
        """The step as it is if nothing is given up for the budget's sake, with its regions
        compiled: what `run` begins with."""
        self._begin()
        self._take_what_is_decided(self._questions()[0])
        trial = self._attempt(0, self._usual_room(), 0)
        if self._compile_regions(trial.step.graph):
            self.compiled += 1
            self._look(trial)
        if self.fixed is None:
            self.probed = trial
        return trial

    def _begin(self) -> None:
        if self.start is not None:
            return
        log.info("memory_budget=%s: %s a rank", self.budget.text, size_text(self.budget_bytes))
        self._warn_of_sizes()
        self._run_first()

    def _questions(self) -> list[str]:
        """What ranks must answer alike; the second one where batches differ."""
        names = " ".join(node.name for node in self.graph.nodes())
        structure = f"memory {self.budget.text} {self.compilation.pipelines}: {names}"
        return [structure, f"{structure} {self.about}"]

    def _usual_room(self) -> Room:
        return self.fixed[0] if self.fixed is not None else Room.USUAL

    def _warn_of_sizes(self) -> None:
        if any(is_symbolic(size) for shape in batch_shapes(self.graph) for size in shape):
            self.context.warnings.append(
                f"memory_budget={self.budget.text!r}: this graph takes batches of any size, and "
                "was fitted to the size that it was compiled for: a larger batch takes more. "
                "Compile with dynamic=False for a graph, and a budget, of each size."
            )

    def _warn_of_own_step(self) -> None:
        """Say it where an optimizer's own step may hold more than anybody knows."""
        for update in self.graph.nodes(role=Role.UPDATE):
            if isinstance(update.target, OwnStep) and memory_of_own_step(update) is None:
                self.context.warnings.append(
                    f"memory_budget={self.budget.text!r} leaves out what {update.target} holds, "
                    "its state and what it makes meanwhile: it does not run on tensors without "
                    "values, on which that would be found out. Allow as much less."
                )
        self.compilation.warn()

    def _run_first(self) -> None:
        """Run what looks at no level, once. Layers of a class may be treated differently later,
        so that all of them are there."""
        self.compilation.unfold(self.graph, leave_out=False)
        until = next(i for i, one in enumerate(self.passes) if isinstance(one, Recompute))
        self.first, self.rest = self.passes[:until], self.passes[until:]
        facts = self.compilation.run(self.graph, self.first, frozenset(), of=self.passes)
        if CACHE.compiles:  # it will run here
            measure(self.graph.graph.nodes)
        records, decisions = self.compilation.records[:], copy.copy(self.context.decisions)
        self.start = Scheduled(self.graph, records, decisions, facts)

    def _take_what_is_decided(self, question: str) -> None:
        found: dict[str, Any] | None = agreed(self.graph.identity, question)
        self.fixed = None
        if found is not None:
            parts = tuple((value, along) for value, along in found["parts"])
            self.fixed = Room(found["room"]), parts
        self.levels = None

    def _search(self) -> Trial[Scheduled] | None:
        """Find the fastest level that fits, by what its regions really take; None if none does."""
        usual = self._usual_room()
        search = self.search = Search(self._attempt, self.budget_bytes, self._rooms(), usual)
        if self.probed is not None and self.fixed is None:
            search.trials.append(self.probed)
        while True:
            trial = search.run(lambda: self.levels)
            known = [trial] if trial is not None else self._before_nothing_fits()
            new = [self._compile_regions(one.step.graph) for one in known]
            if not any(new):
                break
            self.compiled += 1
            for other in search.trials:
                self._look(other)
        # A rank that has compiled other models may know more of its regions than another one.
        mine = None if trial is None else [trial.level, trial.room.value, trial.spare_bytes]
        question = f"{self.about}: level of {self.compilation.pipelines} {self.fixed}"
        found = agree(self.graph.identity, question, mine)
        if found is None:
            return None
        level, room, spare_bytes = found
        return search.take(level, Room(room), spare_bytes)

    def _before_nothing_fits(self) -> list[Trial[Scheduled]]:
        """The tries whose regions are to be known before it is said that nothing fits, as what is
        estimated may be more than what is held: the least, the first, which is what a step without
        a budget would be, and what somebody could do by hand."""
        tried, levels = self.search.trials, self.levels
        by_hand = [t for t in tried if levels is not None and t.level >= levels.by_hand]
        return [self.search.least, tried[0], *by_hand]

    def _too_small(self) -> ConfigError:
        least = self.search.least
        return too_small(
            self.budget,
            self.budget_bytes,
            least.peak_bytes,
            least.memory,
            self.standing_bytes,
            whole=self.graph.loss is not None,
            given=self._given(),
        )

    def _rooms(self) -> frozenset[Room]:
        """What transfers may be given: nothing else than usual where they were told otherwise."""
        if self.fixed is not None:
            return frozenset({self.fixed[0]})
        prefetch = self.config.prefetch
        decided = "prefetch" in self.context.decisions.planned
        if decided or prefetch.budget_bytes is not None or prefetch.distance is not None:
            return frozenset({Room.USUAL})
        if not prefetch.keep:
            return frozenset({Room.USUAL, Room.LEAST})
        return frozenset(Room)

    def _given(self) -> str:
        """What leaves less to decide."""
        fixed = self.context.decisions.replayed & {"recompute", "prefetch"}
        if fixed:
            return f"a plan for {', '.join(sorted(fixed))}"
        return str(self.config.recompute) if self.config.recompute != Recompute() else ""

    def _attempt(self, number: int, room: Room, spare_bytes: int) -> Trial[Scheduled]:
        """Schedule the step at a level."""
        graph = self.graph.clone()
        self.context.scratch.clear()
        assert self.start is not None
        self._restore(self.start)
        parts = None if self.fixed is None else self.fixed[1]
        level = self.context.level = Level(number, room, parts, self.levels, spare_bytes)
        facts = self.compilation.run(graph, self.rest, self.start.facts, of=self.passes)
        self.levels = level.levels
        step = Scheduled(graph, self.compilation.records[:], self.context.decisions, facts)
        again = bytes_of(keepable(graph, graph.transfers()))
        step_us, exposed_us = self._time_of(step)
        trial = Trial(number, room, step, _NOTHING, 0, step_us, exposed_us, again, spare_bytes)
        self._look(trial)
        return trial

    def _time_of(self, step: Scheduled) -> tuple[float, float]:
        """What a step takes, and how long compute stands still in it. The order of its transfers
        between ranks says that; of what copies take its graph knows."""
        if not any(transfer.is_copy for transfer in step.graph.transfers()):
            return step.order.step_us, step.order.exposed_us
        found = simulate(step.graph, self.context.costs, fuses=self.config.fuses)
        return found.makespan_us, found.exposed_us

    def _look(self, trial: Trial[Scheduled]) -> None:
        """Simulate a try's memory, by what is known of its regions now."""
        graph = trial.step.graph
        on_gloo = any(map(runs_on_gloo, graph.transfers()))
        if on_gloo or has_smaller_parts(graph):
            graph = graph.clone()
        if on_gloo:  # what it holds depends on the backend
            lower_transfers(graph)
        elif self.context.on_cpu:
            note_sums_in_place(graph)
        take_largest_parts(graph)  # whoever answers first answers for all
        trial.memory = simulate_memory(graph, fuses=self.config.fuses)
        question = (
            f"{self.about}: {trial.level} {trial.room} {trial.spare_bytes} {self.compiled} "
            f"{self.fixed} {self.compilation.pipelines}"
        )
        peak_bytes = trial.memory.peak_bytes + self.standing_bytes
        trial.peak_bytes = agree(self.graph.identity, question, peak_bytes)
        log.info(
            "memory level %d, room %s, %d bytes to spare: %d bytes at %s, %.0f us",
            trial.level,
            trial.room,
            trial.spare_bytes,
            trial.peak_bytes,
            trial.memory.peak_node,
            trial.step_us,
        )

    def _compile_regions(self, graph: StepGraph) -> bool:
        """Compile what will be regions, or plan those at the peak where nothing is compiled;
        whether there was something new."""
        if not self.config.fuses:
            return False
        if not CACHE.compiles:
            program = tasks_of(graph, self.context.costs, fuses=True)
            return plan_at_peak(graph, program, on_cpu=self.context.on_cpu, sure=0.0)
        before = CACHE.compilations
        CACHE.fill({c.key: c.module for c in share_compilation(regions_of(graph))}, graph.fake_mode)
        return CACHE.compilations > before

    def _restore(self, step: Scheduled) -> None:
        """Let the compilation know of a step, and of no other."""
        self.compilation.records[:] = step.records
        decisions = copy.copy(step.decisions)
        decisions.made = dict(decisions.made)
        decisions.replayed = set(decisions.replayed)
        self.context.decisions = decisions

    def _become(self, trial: Trial[Scheduled]) -> None:
        parts = None if self.fixed is None else self.fixed[1]
        level = Level(trial.level, trial.room, parts, self.levels, trial.spare_bytes)
        self.context.level = level
        self.context.scratch.clear()
        self._restore(trial.step)
        self.graph.become(trial.step.graph)
        self.compilation.facts = trial.step.facts


def _as_json(room: Room, parts: Parts) -> dict[str, Any]:
    return {"room": room.value, "parts": [list(part) for part in parts]}


def gradients_before(graph: StepGraph) -> int:
    """What the gradients of an earlier backward take: in the ordinary loop there may be some, to be
    added to, on the rank with the largest; a whole step keeps none."""
    if graph.loss is not None:
        return 0
    if graph.specs:
        trained = [graph.specs[key] for key in set(graph.gradients.values())]
        trained = [spec for spec in trained if spec.device is None]  # else they are on the host
        return sum(math.prod(largest_shape(spec)) * spec.dtype.itemsize for spec in trained)
    # In one process parameters are inputs like others.
    outputs = graph.output_values[graph.num_forward_outputs :]
    return sum(num_bytes(node) for node in outputs if isinstance(node, fx.Node))


def batch_shapes(graph: StepGraph) -> list[Any]:
    """The shapes of a graph's inputs that are no parameters."""
    nodes = graph.graph.find_nodes(op="placeholder")
    inputs = [node.meta.get("val") for node in nodes if node not in graph.inputs]
    return [value.shape for value in inputs if isinstance(value, torch.Tensor)]


_NOTHING = Memory(0, "", 0, (), (), 0)
