"""Tasks on lanes, and what happens when they are issued in some order.

One host thread issues tasks one after the other. Compute runs where it is issued; a transfer
is started, runs on the link when the transfers before it are done, and is joined by the first
task that needs it. Transfers of all lanes share the link, as they share a process group.

    order:  gather(1) A gather(2) B         compute  ··A····B
                                            link     1122222
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from fxzero.graph.stamps import Lane


@dataclass(frozen=True)
class Hold:
    """Bytes that live from the issue of a task on."""

    num_bytes: int
    until: tuple[int, ...] = ()
    """They end with the last of these tasks; with none, never."""


@dataclass(frozen=True)
class Task:
    """Something that is issued as a whole."""

    name: str
    lane: Lane = Lane.COMPUTE
    us: float = 0.0
    """On its lane; a transfer's is its time on the link."""
    host_us: float = 0.0
    """Of a transfer: what it takes away from compute."""
    after: tuple[int, ...] = ()
    """Tasks that must have ended before it starts."""
    holds: tuple[Hold, ...] = ()

    @property
    def num_bytes(self) -> int:
        """All bytes that live from its issue on."""
        return sum(hold.num_bytes for hold in self.holds)

    @property
    def is_transfer(self) -> bool:
        """Whether it runs on the link."""
        return self.lane is not Lane.COMPUTE


@dataclass(frozen=True)
class TaskGraph:
    """Tasks, each after what it needs: the order given is a valid one."""

    tasks: tuple[Task, ...]
    budget_bytes: int | None = None
    """Most bytes held at once."""

    def __post_init__(self) -> None:
        for i, task in enumerate(self.tasks):
            assert all(before < i for before in task.after), f"{task.name} stands before its needs"

    def __len__(self) -> int:
        return len(self.tasks)

    @cached_property
    def dag(self) -> nx.DiGraph:
        """The tasks' needs."""
        dag = nx.DiGraph()
        dag.add_nodes_from(range(len(self.tasks)))
        dag.add_edges_from((b, i) for i, task in enumerate(self.tasks) for b in task.after)
        return dag

    @cached_property
    def followers(self) -> list[list[int]]:
        """For each task, those that need it."""
        return [sorted(self.dag.successors(i)) for i in range(len(self.tasks))]

    @cached_property
    def urgency_us(self) -> list[float]:
        """For each task, the longest path from its start to the end of all."""
        longest = [0.0] * len(self.tasks)
        for i in reversed(list(nx.topological_sort(self.dag))):
            after = max((longest[j] for j in self.followers[i]), default=0.0)
            longest[i] = self.tasks[i].us + after
        return longest

    @cached_property
    def num_bytes(self) -> list[int]:
        """For each task, the bytes that live from its issue on."""
        return [task.num_bytes for task in self.tasks]

    @cached_property
    def holds(self) -> list[Hold]:
        """Everything that is held, and that ends."""
        return [hold for task in self.tasks for hold in task.holds if hold.until]

    @cached_property
    def ended_by(self) -> list[list[int]]:
        """For each task, positions in `holds` of what may end with it."""
        ended: list[list[int]] = [[] for _ in self.tasks]
        for position, hold in enumerate(self.holds):
            for end in hold.until:
                ended[end].append(position)
        return ended


@dataclass
class Replay:
    """What an order came to."""

    makespan_us: float
    start_us: list[float]
    """By task."""
    end_us: list[float]
    peak_bytes: int
    exposed_us: float
    """How long compute stood still for transfers."""
    busy_us: dict[Lane, float] = field(default_factory=dict)


class Clock:
    """The state of one replay: issue tasks, and see when they run."""

    __slots__ = ("ended", "exposed_us", "graph", "held", "host_us", "link_us", "missing", "peak")

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.host_us = 0.0
        self.link_us = 0.0
        self.ended: dict[int, float] = {}
        self.held = 0
        self.peak = 0
        self.exposed_us = 0.0
        self.missing = [len(hold.until) for hold in graph.holds]

    def start_us(self, index: int) -> float:
        """When a task would start if it were issued now."""
        task = self.graph.tasks[index]
        start = self.host_us
        for before in task.after:
            start = max(start, self.ended[before])
        return max(start, self.link_us) if task.is_transfer else start

    def issue(self, index: int) -> float:
        """Issue a task; return when it starts."""
        task = self.graph.tasks[index]
        ready = self.host_us
        for before in task.after:
            ready = max(ready, self.ended[before])
        self.exposed_us += ready - self.host_us
        self.held += self.graph.num_bytes[index]
        self.peak = max(self.peak, self.held)
        if task.is_transfer:
            start = max(ready, self.link_us)
            self.link_us = end = start + task.us
            self.host_us = ready + task.host_us
        else:
            start = ready
            self.host_us = end = ready + task.us
        self.ended[index] = end
        for position in self.graph.ended_by[index]:
            self.missing[position] -= 1
            if not self.missing[position]:
                self.held -= self.graph.holds[position].num_bytes
        return start

    def copy(self) -> Clock:
        """The same state again, to try something."""
        other = Clock.__new__(Clock)
        other.graph = self.graph
        other.host_us, other.link_us = self.host_us, self.link_us
        other.held, other.peak, other.exposed_us = self.held, self.peak, self.exposed_us
        other.ended = dict(self.ended)
        other.missing = list(self.missing)
        return other

    @property
    def makespan_us(self) -> float:
        """When everything issued so far has ended."""
        return max(self.host_us, self.link_us)


def replay(graph: TaskGraph, order: Iterable[int]) -> Replay:
    """Issue tasks in an order.

    Raises:
        KeyError: a task stands before one that it needs.
    """
    clock = Clock(graph)
    starts = [0.0] * len(graph.tasks)
    busy = dict.fromkeys(Lane, 0.0)
    for index in order:
        starts[index] = clock.issue(index)
        busy[graph.tasks[index].lane] += graph.tasks[index].us
    ends = [clock.ended[i] for i in range(len(graph.tasks))]
    return Replay(clock.makespan_us, starts, ends, clock.peak, clock.exposed_us, busy)
