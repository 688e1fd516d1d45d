"""Replay a scheduled graph with a cost model: when each node runs, and what waits for what.

`Program.of` asks for every cost once; `Program.run` replays them in milliseconds, twenty
thousand nodes included. Launches that a step leaves to the next one
(`fxzero.passes.gather_ahead`) are in flight when the next begins: two steps are replayed, and
the second one is told of.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torch import fx

from fxzero.cost.model import CostModel, message_of
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.runtime.ahead import Launch, Take
from fxzero.runtime.cutout import runs


class Do(StrEnum):
    """What a step of a program does."""

    COMPUTE = "compute"
    LAUNCH = "launch"
    WAIT = "wait"
    AHEAD = "ahead"
    """Launches for the next step."""


class Event(NamedTuple):
    """One step of a program."""

    do: Do
    node: str
    name: str
    layer: str
    lane: Lane
    us: float
    host_us: float
    transfer: str
    """Which transfer it launches or joins."""


class Span(NamedTuple):
    """When something ran."""

    node: str
    """The node, or the first one of a run."""
    name: str
    layer: str
    lane: Lane
    start_us: float
    us: float


@dataclass(frozen=True)
class Simulation:
    """One step, replayed."""

    makespan_us: float
    """From one step's beginning to the next one's, when nothing is left to do but transfers."""
    busy_us: dict[str, float]
    """By lane."""
    exposed_us: float
    """How long compute stood still for transfers."""
    exposed_by: dict[str, float]
    """The same by the lane that it waited for."""
    spans: tuple[Span, ...]

    def to_json(self) -> dict[str, Any]:
        """The figures, without the spans."""
        return {
            "makespan_us": self.makespan_us,
            "busy_us": self.busy_us,
            "exposed_us": self.exposed_us,
            "exposed_by": self.exposed_by,
        }


@dataclass(frozen=True)
class Program:
    """A scheduled graph's events, in launch order, with their costs."""

    events: tuple[Event, ...]

    @staticmethod
    def of(graph: StepGraph, costs: CostModel, *, fuses: bool) -> Program:
        """Ask a cost model about every node.

        Args:
            fuses: whether runs of compute are, or will be, compiled regions.
        """
        transfers = {t.launch: t for t in graph.transfers()}
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        run_of: dict[fx.Node, list[fx.Node]] = {}
        if fuses:
            run_of = {node: run for run in runs(nodes) for node in run}
        joined: dict[fx.Node, str] = {}
        ahead: dict[int, tuple[float, float]] = {}
        for launch, transfer in transfers.items():
            for wait in transfer.waits:
                joined[wait] = launch.name
            if isinstance(launch.target, Take):
                cost = costs.transfer(message_of(graph, transfer))
                ahead[id(launch.target.ahead)] = (cost.wire_us, cost.host_us)
        taken = {id(n.target.ahead): n.name for n in nodes if isinstance(n.target, Take)}
        events: list[Event] = []
        for node in nodes:
            stamp = stamp_of(node)
            where = (node.name, node.name, stamp.layer, stamp.lane)
            if node in transfers:
                cost = costs.transfer(message_of(graph, transfers[node]))
                events.append(Event(Do.LAUNCH, *where, cost.wire_us, cost.host_us, node.name))
            elif isinstance(node.target, Launch):
                wire_us, host_us = ahead[id(node.target.ahead)]
                launch = taken[id(node.target.ahead)]
                events.append(Event(Do.AHEAD, *where, wire_us, host_us, launch))
            elif node in joined:
                events.append(Event(Do.WAIT, *where, 0.0, 0.0, joined[node]))
            elif stamp.role not in (Role.PART, Role.RELEASE):
                run = run_of.get(node, [node])
                if run[0] is node:
                    us = costs.compute_us(run)
                    if us:
                        name = node.name if len(run) == 1 else stamp.layer or "root"
                        what = (node.name, name, stamp.layer, Lane.COMPUTE)
                        events.append(Event(Do.COMPUTE, *what, us, 0.0, ""))
        return Program(tuple(events))

    def run(self) -> Simulation:
        """Replay two steps and tell of the second."""
        host_us, link_us, ends, _ = self._replay(0.0, {})
        # The second step begins when the first one's host is done; the link may still be busy.
        carried = {name: end - host_us for name, end in ends.items() if name.startswith("next ")}
        carried = {name.removeprefix("next "): end for name, end in carried.items()}
        return self._replay(max(link_us - host_us, 0.0), carried)[3]

    def _replay(
        self, link_us: float, carried: dict[str, float]
    ) -> tuple[float, float, dict[str, float], Simulation]:
        """One step: when host and link are done, when each transfer ends, and what to tell.

        Args:
            carried: when launches of the step before end, by their names.
        """
        host_us = 0.0
        ends = dict(carried)
        exposed = 0.0
        busy: dict[str, float] = defaultdict(float)
        exposed_by: dict[str, float] = defaultdict(float)
        spans: list[Span] = []
        for do, node, name, layer, lane, us, event_host_us, transfer in self.events:
            if do is Do.COMPUTE:
                spans.append(Span(node, name, layer, lane, host_us, us))
                busy[lane] += us
                host_us += us
            elif do is Do.WAIT:
                late = ends.get(transfer, 0.0) - host_us
                if late > 0:
                    exposed += late
                    exposed_by[lane] += late
                    host_us += late
            else:
                if do is Do.LAUNCH and transfer in carried:
                    continue  # in flight since the last step
                start = max(host_us, link_us)
                link_us = start + us
                ends[transfer if do is Do.LAUNCH else f"next {transfer}"] = link_us
                busy[lane] += us
                spans.append(Span(node, name, layer, lane, start, us))
                host_us += event_host_us
        result = Simulation(host_us, dict(busy), exposed, dict(exposed_by), tuple(spans))
        return host_us, link_us, ends, result


def simulate(graph: StepGraph, costs: CostModel, *, fuses: bool) -> Simulation:
    """Replay a scheduled graph."""
    return Program.of(graph, costs, fuses=fuses).run()
