"""The engine: tasks on resources that hold bytes in pools, and what an order of them comes to.

One thread issues tasks one after the other. A task starts when what it needs has ended and its
resource is free. Compute runs where it is issued; a transfer is started, runs on its resource when
those before it there are done, and is joined by the first task that needs it.

    order:  gather(1) A gather(2) B         compute  ··A····B
                                            link     1122222
                                            device   ▁▂▂▃▃▃▂▂   bytes

Search, simulation, traces and budgets all ask here, so that there is one answer to when something
runs and to what is held meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from fxzero.graph.stamps import Lane
from fxzero.transfer import LINK, Pool

COMPUTE = "compute"
"""The resource that issues all others, and runs what is computed."""
HOST = "host"
"""The host's cores, where they update parameters beside compute."""


@dataclass(frozen=True)
class Hold:
    """Bytes that live from the issue of a task on."""

    num_bytes: int
    until: tuple[int, ...] = ()
    """They end with the last of these tasks; with none, never."""
    pool: Pool = Pool.DEVICE
    name: str = ""
    kind: str = ""
    """What they are for, to whoever shows them."""
    of_transfer: bool = False
    """Whether a transfer holds them: a parameter that was gathered, a gradient to be reduced."""


@dataclass(frozen=True)
class Task:
    """Something that is issued as a whole."""

    name: str
    lane: Lane = Lane.COMPUTE
    us: float = 0.0
    """How long it occupies its resource."""
    host_us: float = 0.0
    """Of a transfer: what it takes away from compute."""
    after: tuple[int, ...] = ()
    """Tasks that must have ended before it starts."""
    holds: tuple[Hold, ...] = ()
    resource: str = ""
    """What it occupies; by default compute, or for every other lane the link."""
    by_event: bool = False
    """Whether its own resource waits for what it needs, and not compute, which issues it."""

    @property
    def occupies(self) -> str:
        """The resource that it runs on."""
        return self.resource or (COMPUTE if self.lane is Lane.COMPUTE else LINK)

    @property
    def is_transfer(self) -> bool:
        """Whether it runs beside compute."""
        return self.occupies != COMPUTE

    def bytes_in(self, pool: Pool) -> int:
        """All bytes of a pool that live from its issue on."""
        return sum(hold.num_bytes for hold in self.holds if hold.pool is pool)


@dataclass(frozen=True)
class Stretch:
    """What is issued from one task on until another is, of which a step runs several in a row."""

    first: int
    until: int
    runs: int


@dataclass(frozen=True)
class TaskGraph:
    """Tasks, each after what it needs: the order given is a valid one."""

    tasks: tuple[Task, ...]
    budgets: Mapping[Pool, int] = field(default_factory=dict)
    """Most bytes held at once, by pool."""
    stretches: tuple[Stretch, ...] = ()
    """What stands for several runs of itself, one after the other in every order."""

    def __post_init__(self) -> None:
        for i, task in enumerate(self.tasks):
            assert all(before < i for before in task.after), f"{task.name} stands before its needs"

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def budget_bytes(self) -> int | None:
        """The device's budget."""
        return self.budgets.get(Pool.DEVICE)

    def within(self, budgets: Mapping[Pool, int]) -> TaskGraph:
        """The same tasks with other budgets; what is known of them goes with them."""
        other = TaskGraph(self.tasks, budgets, self.stretches)
        own = vars(other).keys()
        vars(other).update({name: known for name, known in vars(self).items() if name not in own})
        return other

    def fits(self, peaks: Mapping[Pool, int]) -> bool:
        """Whether some peaks are within the budgets."""
        return all(peaks.get(pool, 0) <= most for pool, most in self.budgets.items())

    @cached_property
    def dag(self) -> nx.DiGraph:
        """The tasks' needs."""
        dag = nx.DiGraph()
        dag.add_nodes_from(range(len(self.tasks)))
        dag.add_edges_from((b, i) for i, task in enumerate(self.tasks) for b in task.after)
        return dag

    @cached_property
    def needed_by(self) -> list[list[int]]:
        """For each task, those that need it."""
        return [sorted(self.dag.successors(i)) for i in range(len(self.tasks))]

    @cached_property
    def urgency_us(self) -> list[float]:
        """For each task, the longest path from its start to the end of all."""
        longest = [0.0] * len(self.tasks)
        for i in reversed(list(nx.topological_sort(self.dag))):
            after = max((longest[j] for j in self.needed_by[i]), default=0.0)
            longest[i] = self.tasks[i].us + after
        return longest

    @cached_property
    def num_bytes(self) -> list[int]:
        """For each task, the bytes of the device that live from its issue on."""
        return [task.bytes_in(Pool.DEVICE) for task in self.tasks]

    @cached_property
    def begins(self) -> list[tuple[tuple[Pool, int], ...]]:
        """For each task, the bytes that live from its issue on, by pool."""
        found = []
        for task in self.tasks:
            pools = dict.fromkeys(hold.pool for hold in task.holds)
            found.append(tuple((pool, task.bytes_in(pool)) for pool in pools))
        return found

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

    @cached_property
    def resources(self) -> list[str]:
        """For each task, the resource that it runs on."""
        return [task.occupies for task in self.tasks]


@dataclass
class Replay:
    """What an order came to."""

    makespan_us: float
    """Until everything has ended."""
    compute_us: float
    """Until compute is free again: transfers may go on."""
    start_us: list[float]
    """By task."""
    end_us: list[float]
    peaks: dict[Pool, int]
    """Most bytes held at once, by pool."""
    stalls: dict[int, tuple[Lane, float]]
    """By task, how long compute stood still for what it needed, and for which lane."""
    busy_us: dict[Lane, float]
    held_bytes: list[int]
    """In the order of issue, the most of the device that was held while a task was issued."""
    runs: list[int] = field(default_factory=list)
    """By task, how often it runs. Times are those of the first run; what comes behind a stretch
    comes behind all of its runs."""

    @property
    def exposed_us(self) -> float:
        """How long compute stood still."""
        return sum(us for _, us in self.stalls.values())

    @property
    def peak_bytes(self) -> int:
        """The device's peak."""
        return self.peaks.get(Pool.DEVICE, 0)


class Clock:
    """The state of one replay: issue tasks, and see when they run and what is held."""

    __slots__ = ("ended", "free_us", "graph", "held", "missing", "peaks", "stalls")

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.free_us: dict[str, float] = dict.fromkeys((COMPUTE, *graph.resources), 0.0)
        """When each resource is free."""
        self.ended: dict[int, float] = {}
        self.held: dict[Pool, int] = dict.fromkeys(Pool, 0)
        self.peaks: dict[Pool, int] = dict.fromkeys(Pool, 0)
        self.stalls: dict[int, tuple[Lane, float]] = {}
        self.missing = [len(hold.until) for hold in graph.holds]

    def start_us(self, index: int) -> float:
        """When a task would start if it were issued now."""
        ended = self.ended
        start = self.free_us[COMPUTE]
        for before in self.graph.tasks[index].after:
            end = ended[before]
            if end > start:
                start = end
        return max(start, self.free_us[self.graph.resources[index]])

    def issue(self, index: int) -> float:
        """Issue a task; return when it starts."""
        graph, free_us = self.graph, self.free_us
        task = graph.tasks[index]
        host_us = ready = free_us[COMPUTE]
        late = -1
        for before in task.after:
            end = self.ended[before]
            if end > ready:
                ready, late = end, before
        issued_us = host_us if task.by_event else ready
        if late >= 0 and not task.by_event:
            self.stalls[index] = (graph.tasks[late].lane, ready - host_us)
        for pool, num_bytes in graph.begins[index]:
            held = self.held[pool] = self.held[pool] + num_bytes
            if held > self.peaks[pool]:
                self.peaks[pool] = held
        resource = graph.resources[index]
        if resource == COMPUTE:
            start = ready
            free_us[COMPUTE] = end = ready + task.us
        else:
            start = max(ready, free_us[resource])
            free_us[resource] = end = start + task.us
            free_us[COMPUTE] = issued_us + task.host_us
        self.ended[index] = end
        for position in graph.ended_by[index]:
            self.missing[position] -= 1
            if not self.missing[position]:
                hold = graph.holds[position]
                self.held[hold.pool] -= hold.num_bytes
        return start

    def copy(self) -> Clock:
        """The same state again, to try something."""
        other = Clock.__new__(Clock)
        other.graph = self.graph
        other.free_us = dict(self.free_us)
        other.held, other.peaks = dict(self.held), dict(self.peaks)
        other.stalls = dict(self.stalls)
        other.ended = dict(self.ended)
        other.missing = list(self.missing)
        return other

    @property
    def makespan_us(self) -> float:
        """When everything issued so far has ended."""
        return max(self.free_us.values())


def replay(graph: TaskGraph, order: Iterable[int]) -> Replay:
    """Issue tasks in an order.

    Raises:
        KeyError: a task stands before one that it needs.
    """
    clock = Clock(graph)
    starts, ends = [0.0] * len(graph.tasks), [0.0] * len(graph.tasks)
    runs = [1] * len(graph.tasks)
    busy: dict[Lane, float] = defaultdict(float)
    held: list[int] = []
    firsts = {stretch.first: stretch for stretch in graph.stretches}
    current: Stretch | None = None
    later_us = 0.0
    """How much later everything is because stretches have run more than once."""
    for index in order:
        before = clock.held[Pool.DEVICE]
        start = clock.issue(index)
        if current is not None and index == current.until:
            later_us += (current.runs - 1) * (start + later_us - starts[current.first])
            current = None
        if index in firsts:
            current = firsts[index]
        if current is not None:
            runs[index] = current.runs
            if index in clock.stalls:
                lane, us = clock.stalls[index]
                clock.stalls[index] = lane, us * current.runs
        starts[index], ends[index] = start + later_us, clock.ended[index] + later_us
        held.append(before + graph.num_bytes[index])
        busy[graph.tasks[index].lane] += graph.tasks[index].us * runs[index]
    return Replay(
        makespan_us=clock.makespan_us + later_us,
        compute_us=clock.free_us[COMPUTE] + later_us,
        start_us=starts,
        end_us=ends,
        peaks=clock.peaks,
        stalls=clock.stalls,
        busy_us=dict(busy),
        held_bytes=held,
        runs=runs,
    )


def alive_at(graph: TaskGraph, order: Sequence[int], moment: int) -> list[Hold]:
    """What is held while the task at a place of an order is issued."""
    place = {index: position for position, index in enumerate(order)}
    return [
        hold
        for index in order[: moment + 1]
        for hold in graph.tasks[index].holds
        if not hold.until or max(place[end] for end in hold.until) >= moment
    ]
