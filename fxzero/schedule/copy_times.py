"""When nodes compute, and what copies take: by what a schedule is not yet, and copies need to know.

The times are those of compute alone, one node behind the other: nothing waits for transfers. What
has time to be copied by them has time in a step that waits, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

from torch import fx

from fxzero.cost.model import CostModel
from fxzero.cost.throttle import Throttle
from fxzero.graph import Lane, Role, Segment, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.schedule.engine import COMPUTE
from fxzero.schedule.simulate import tasks_of
from fxzero.transfer import Pool, Transfer

SLACK = 1.5
"""How much of its time a copy is given: costs are estimates."""


class Timeline:
    """A graph's compute, one node behind the other.

    Args:
        throttle: what copies are held back to.
        fuses: whether runs of compute are, or will be, compiled regions.
    """

    def __init__(
        self, graph: StepGraph, costs: CostModel, throttle: Throttle, *, fuses: bool
    ) -> None:
        self.costs = costs
        self.throttle = throttle
        self._begin: dict[fx.Node, float] = {}
        self._end: dict[fx.Node, float] = {}
        program = tasks_of(graph, costs, fuses=fuses)
        self._starts: list[float] = []
        self._firsts: list[fx.Node] = []
        now_us = 0.0
        for task, group in zip(program.graph.tasks, program.groups, strict=True):
            own_us = task.us if task.occupies == COMPUTE else 0.0
            self._begin |= dict.fromkeys(group, now_us)
            if own_us:
                self._starts.append(now_us)
                self._firsts.append(group[0])
            now_us += own_us
            self._end |= dict.fromkeys(group, now_us)

    def begin_us(self, node: fx.Node) -> float:
        """When a node, or the run that it is of, begins."""
        return self._begin[node]

    def end_us(self, node: fx.Node) -> float:
        """When it ends."""
        return self._end[node]

    def running_at(self, us: float) -> fx.Node | None:
        """The first node of what runs at some time; None before there is something."""
        place = bisect_right(self._starts, us)
        return self._firsts[place - 1] if place else None

    def next_at(self, us: float) -> fx.Node | None:
        """The first node of what begins at some time or behind it; None if nothing does."""
        place = bisect_left(self._starts, us)
        return self._firsts[place] if place < len(self._firsts) else None

    def copy_us(self, copy: Transfer) -> float:
        """What a copy takes."""
        lane = Lane.H2D if copy.target is Pool.DEVICE else Lane.D2H
        if copy.source is Pool.DISK:
            lane = Lane.READ
        held_back = replace(copy, bytes_per_s=self.throttle.bytes_per_s(lane))
        return self.costs.transfer(held_back).wire_us


def first_compute(graph: StepGraph, segment: Segment) -> fx.Node:
    """The first node of a segment that computes something, or of one without such a node, which
    only passes on, the first that there is."""
    nodes = list(graph.nodes(segment=segment))
    return next((node for node in nodes if stamp_of(node).role is Role.COMPUTE), nodes[0])
