"""Which part of a step leaves the device, where that is left to be decided: ``share=auto``.

    rung 0   all on the device              peak 9 GiB, 1.00 s     too much; with recompute 1.21 s
    rung 2   a quarter of the state         peak 8 GiB, 1.00 s     fits
    rung 5   all of it                      peak 5 GiB, 1.04 s     is not looked at

Rungs move more and more to the host: saved values as far as there is time, then state, the buckets
whose gradients come last staying longest (SuperOffload, Lian et al. 2025), then parameters. A try
schedules the whole step and simulates it. Within a memory budget the first rung that fits as it is
is looked for; the ones before it may be faster, with something repeated in backward, and are tried
until one is not. Without a budget as much is moved as makes the step no slower.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxzero.compiler.fitting import Fitting, Scheduled, batch_shapes
from fxzero.compiler.memory_budget import MemoryBudget, TooSmallError
from fxzero.compiler.pipelines import Pipelines
from fxzero.errors import ConfigError
from fxzero.graph import StepGraph
from fxzero.passes import (
    JoinCopies,
    OffloadActivations,
    OffloadDisk,
    OffloadParams,
    OffloadStates,
    Pass,
)
from fxzero.passes.base import Level
from fxzero.schedule.agreement import agree, agreed
from fxzero.schedule.simulate import simulate, simulate_memory
from fxzero.settings import Auto, decided

if TYPE_CHECKING:
    from fxzero.compiler.compilation import Compilation

log = logging.getLogger("fxzero")

WORTH = 0.01
"""Of a step's time: what is no difference."""
KINDS = (OffloadActivations, OffloadStates, OffloadParams)
Offload = OffloadActivations | OffloadStates | OffloadParams


@dataclass(frozen=True)
class Rung:
    """What leaves the device: parts of the bytes that each pass could move."""

    activations: float = 0.0
    states: float = 0.0
    params: float = 0.0
    in_flight: int | None = None
    """See `offload_params.in_flight`."""

    def share_of(self, one: Offload) -> float:
        """The part that a pass moves: what it was told, or what this rung says."""
        if not isinstance(one.share, Auto):
            return decided(one.share)
        kinds = {OffloadActivations: self.activations, OffloadStates: self.states}
        return kinds.get(type(one), self.params)


LADDER = (
    Rung(),
    Rung(1.0),
    *(Rung(1.0, states) for states in (0.25, 0.5, 0.75, 1.0)),
    Rung(1.0, 1.0, 0.5),
    Rung(1.0, 1.0, 1.0),
    Rung(1.0, 1.0, 1.0, in_flight=1),
)
"""From all on the device to all on the host."""


def is_open(pipelines: Pipelines) -> bool:
    """Whether something is to be decided."""
    return any(isinstance(one.share, Auto) for one in _offloads(pipelines))


def _offloads(pipelines: Pipelines) -> list[Offload]:
    return [one for one in pipelines.scheduling if isinstance(one, KINDS)]


def rungs_of(pipelines: Pipelines, planned: frozenset[str]) -> list[tuple[Rung, Pipelines]]:
    """What can be tried, and the passes of each; no two are alike.

    Args:
        planned: passes whose decisions a plan holds: they move what it says.
    """
    if not planned.isdisjoint(one.name for one in _offloads(pipelines)):
        activations, states, params = (float(kind.name in planned) for kind in KINDS)
        rung = Rung(activations, states, params)
        return [(rung, passes_of(pipelines, rung))]
    found: dict[Pipelines, Rung] = {}
    for rung in LADDER:
        shares = {type(one): rung.share_of(one) for one in _offloads(pipelines)}
        if shares.get(OffloadParams, 0.0) <= shares.get(OffloadStates, 0.0):
            found.setdefault(passes_of(pipelines, rung), rung)
    return [(rung, passes) for passes, rung in found.items()]


def passes_of(pipelines: Pipelines, rung: Rung) -> Pipelines:
    """The passes, with what a rung says in the place of what is open."""
    shares = {one.name: rung.share_of(one) for one in _offloads(pipelines)}
    moves = any(shares.values())

    def with_share(one: Pass) -> Pass | None:
        if isinstance(one, KINDS):
            share = shares[one.name]
            return replace(one, share=share) if share else None
        if isinstance(one, OffloadDisk) and not shares.get("offload_states"):
            return None
        if isinstance(one, JoinCopies):
            in_flight = one.in_flight or (rung.in_flight if shares.get("offload_params") else None)
            return replace(one, in_flight=in_flight) if moves else None
        return one

    scheduling = tuple(filter(None, map(with_share, pipelines.scheduling)))
    return replace(pipelines, scheduling=scheduling)


@dataclass(frozen=True)
class Tried:
    """What a rung came to, for whoever shows it."""

    rung: Rung
    step_us: float
    peak_bytes: int
    taken: bool


@dataclass
class Try:
    """A rung that was tried."""

    number: int
    step: Scheduled
    level: Level | None
    """How much is given up for the budget in it."""
    step_us: float
    """What the step takes, simulated, copies and updates on the host among it."""
    peak_bytes: int
    warnings: list[str]
    """What could not take effect in it."""
    budget_bytes: int | None = None
    """What bounds its peak on this rank."""


class Placing:
    """One graph, and the rungs that are tried for it.

    Args:
        compilation: whose passes run, and who keeps what they say.
        budget: what bounds its peak; None if nothing does.
    """

    def __init__(
        self, compilation: Compilation, graph: StepGraph, budget: MemoryBudget | None
    ) -> None:
        self.compilation = compilation
        self.graph = graph
        self.budget = budget
        planned = compilation.context.decisions.planned
        self.rungs = rungs_of(compilation.pipelines, planned)
        self.refusals: dict[int, ConfigError] = {}
        """Rungs that cannot be, with the reason."""
        self.tries: list[Try] = []
        self.warnings = compilation.context.warnings[:]
        """Of before."""

    def run(self) -> int | None:
        """Let the graph become the fastest step that there is.

        Returns:
            What bounds its peak on this rank, if something does.

        Raises:
            ConfigError: nothing fits, or the graph cannot be scheduled at all.
        """
        self.compilation.tries = True
        try:
            best = self._best()
        finally:
            self.compilation.tries = False
        self._become(best)
        return best.budget_bytes

    def _best(self) -> Try:
        shapes = " ".join(map(str, batch_shapes(self.graph)))
        bound = self.budget.text if self.budget is not None else ""
        question = f"placement {bound} of {shapes}: {self.compilation.pipelines}"
        number = agreed(self.graph.identity, question)
        best = self._finished(number) if number is not None else self._search()
        if best is None:
            raise self._too_small()
        number = agree(self.graph.identity, question, best.number)
        if number != best.number:  # another rank was first
            best = self._finished(number)
            if best is None:
                raise self._too_small()
        return best

    def _search(self) -> Try | None:
        if self.budget is None:
            return self._free()
        last = len(self.rungs) - 1
        best: Try | None = None
        end = last
        for number in range(len(self.rungs)):
            best = self._probed(number)
            if best is not None:
                end = number
                break
        if best is None:
            best = self._finished(last)
        for number in reversed(range(end)):
            first = next((t for t in self.tries if t.number == number), None)
            if first is None:
                continue  # refused
            if best is not None and first.step_us > (1 - WORTH) * best.step_us:
                break  # with something repeated it is no faster
            found = self._finished(number)
            if found is None or (best is not None and found.step_us >= best.step_us):
                break
            best = found
        return best

    def _free(self) -> Try | None:
        """The last rung that takes no longer than the first."""
        best: Try | None = None
        for number in range(len(self.rungs)):
            found = self._scheduled(number)
            if found is None:
                continue
            if best is not None and found.step_us > (1 + WORTH) * self.tries[0].step_us:
                break
            best = found
        return best

    def _begin(self, number: int) -> StepGraph:
        rung, passes = self.rungs[number]
        log.info("memory: rung %d, %s", number, rung)
        self.compilation.start_again(passes)
        self.compilation.context.warnings.clear()
        return self.graph.clone()

    def _scheduled(self, number: int) -> Try | None:
        """A rung without a bound; None if it cannot be."""
        graph = self._begin(number)
        try:
            self.compilation.schedule_freely(graph)
        except ConfigError as error:
            self._refuse(number, error)
            return None
        return self._note(number, self._scheduled_now(graph))

    def _probed(self, number: int) -> Try | None:
        """A rung in which nothing is repeated for the budget's sake; None if it does not fit."""
        fitting = self._fitting(number)
        try:
            trial = fitting.probe()
        except ConfigError as error:
            self._refuse(number, error)
            return None
        self._note(number, trial.step)
        fits = trial.peak_bytes <= fitting.budget_bytes
        return self._fitted(number, fitting) if fits else None

    def _finished(self, number: int) -> Try | None:
        """A rung within the budget; None if it is too small, or the rung cannot be."""
        if self.budget is None:
            return self._scheduled(number)
        return self._fitted(number, self._fitting(number))

    def _fitted(self, number: int, fitting: Fitting) -> Try | None:
        try:
            budget_bytes = fitting.run()
        except ConfigError as error:
            self._refuse(number, error)
            return None
        found = self._note(number, self._scheduled_now(fitting.graph))
        found.budget_bytes = budget_bytes
        return found

    def _fitting(self, number: int) -> Fitting:
        assert self.budget is not None
        return Fitting(self.compilation, self._begin(number), self.budget)

    def _refuse(self, number: int, error: ConfigError) -> None:
        self.refusals[number] = error
        log.info("memory: rung %d cannot be: %s", number, error)

    def _scheduled_now(self, graph: StepGraph) -> Scheduled:
        compilation = self.compilation
        decisions = compilation.context.decisions
        return Scheduled(graph, compilation.records[:], decisions, compilation.facts)

    def _note(self, number: int, step: Scheduled) -> Try:
        compilation = self.compilation
        fuses = compilation.config.fuses
        found = Try(
            number,
            step,
            copy.copy(compilation.context.level),
            simulate(step.graph, compilation.context.costs, fuses=fuses).makespan_us,
            simulate_memory(step.graph, fuses=fuses).peak_bytes,
            compilation.context.warnings[:],
        )
        log.info("memory: rung %d: %d bytes, %.0f us", number, found.peak_bytes, found.step_us)
        self.tries.append(found)
        return found

    def _too_small(self) -> ConfigError:
        """What is said where nothing fits: of the rung that moves most."""
        small = [e for e in self.refusals.values() if isinstance(e, TooSmallError)]
        others = [e for e in self.refusals.values() if not isinstance(e, TooSmallError)]
        if not small:
            return others[0]
        least = min(small, key=lambda error: error.least_bytes)
        if not others:
            return least
        return ConfigError(f"{least} More cannot be moved to the host: {others[-1]}")

    def _become(self, best: Try) -> None:
        compilation = self.compilation
        rung, passes = self.rungs[best.number]
        log.info("memory: rung %d is taken: %s", best.number, rung)
        compilation.take(passes)
        compilation.context.warnings[:] = dict.fromkeys([*self.warnings, *best.warnings])
        compilation.warn()
        compilation.rungs = tuple(
            Tried(self.rungs[t.number][0], t.step_us, t.peak_bytes, t is best) for t in self.tries
        )
        compilation.context.level = best.level
        compilation.records[:] = best.step.records
        compilation.context.decisions = best.step.decisions
        compilation.context.scratch.clear()
        compilation.facts = best.step.facts
        self.graph.become(best.step.graph)
