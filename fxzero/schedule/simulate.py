"""Replay a scheduled graph: when each node runs, what waits for what, what is held meanwhile.

`tasks_of` makes a task of every region, transfer and wait, in launch order, with costs and with
the storages that begin there; the engine replays them, twenty thousand in a fraction of a second.
Launches that a step leaves to the next one (`fxzero.passes.gather_ahead`) are in flight when
the next begins: two steps are replayed then, and the second one is told of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import fx

from fxzero.cost.model import CostModel, FixedCosts
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.stamps import BESIDE_COMPUTE, stamp_of
from fxzero.graph.steady import STEADY, begins
from fxzero.runtime.ahead import Launch, Take
from fxzero.runtime.delayed import LateUpdate, StartUpdate
from fxzero.schedule import engine
from fxzero.schedule.engine import COMPUTE, HOST, Hold, Stretch, Task, TaskGraph, alive_at
from fxzero.schedule.storage import Kind, Storage, storages_of
from fxzero.transfer import Pool

FREE = frozenset({Role.PART, Role.RELEASE, Role.ROWS, Role.SLAB, Role.WAIT, Role.JOIN})
"""Roles of what takes no time of its own."""


class Span(NamedTuple):
    """When something ran."""

    node: str
    """The node, or the first one of a run."""
    name: str
    layer: str
    lane: Lane
    start_us: float
    us: float
    runs: int = 1
    """How often it runs in a row with what is around it; the times are the first run's."""


class Stall(NamedTuple):
    """When compute stood still for a transfer."""

    node: str
    """What could not run before."""
    lane: Lane
    """The transfer's."""
    start_us: float
    us: float
    """Over all of its runs."""


@dataclass(frozen=True)
class Simulation:
    """The time of one step, replayed."""

    makespan_us: float
    """From one step's beginning to the next one's, when nothing is left to do but transfers."""
    busy_us: dict[str, float]
    """By lane."""
    exposed_us: float
    """How long compute stood still for transfers."""
    exposed_by: dict[str, float]
    """The same by the lane that it waited for."""
    spans: tuple[Span, ...]
    stalls: tuple[Stall, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The figures, without the spans."""
        return {
            "makespan_us": self.makespan_us,
            "busy_us": self.busy_us,
            "exposed_us": self.exposed_us,
            "exposed_by": self.exposed_by,
        }


@dataclass(frozen=True)
class Alive:
    """A storage that is alive."""

    name: str
    kind: Kind
    num_bytes: int


@dataclass(frozen=True)
class Memory:
    """What a graph's run holds over time."""

    peak_bytes: int
    peak_node: str
    """The node during which the peak is reached."""
    resident_bytes: int
    """Inputs, which live throughout."""
    curve: tuple[tuple[str, int], ...]
    """By node, the most bytes held while it runs."""
    alive: tuple[Alive, ...]
    """What is alive at the peak, largest first."""
    transfers_bytes: int
    """The most that transfers hold at once: gathered parameters that will be released, and
    gradients that are still to be reduced. What `prefetch.budget_bytes` bounds."""
    host_bytes: int = 0
    """What is held in the host's memory: the arena, and the disk's buffers."""
    disk_bytes: int = 0
    """What is held on disk. All else is the device's."""
    left_out: tuple[str, ...] = ()
    """Optimizers' own steps of which nobody knows what they hold: it is not counted."""

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by what they are for."""
        found: dict[str, int] = defaultdict(int)
        for item in self.alive:
            found[item.kind.value] += item.num_bytes
        return dict(found)


@dataclass(frozen=True)
class Program:
    """A scheduled graph's tasks, in launch order."""

    graph: TaskGraph
    layers: tuple[str, ...] = ()
    """By task."""
    labels: tuple[str, ...] = ()
    """By task: what a trace calls it."""
    ahead: dict[int, int] | None = None
    """Launches for the next step, by the launch there that they save."""
    resident: tuple[Hold, ...] = ()
    """What lives throughout."""
    groups: tuple[tuple[fx.Node, ...], ...] = ()
    """By task: the nodes that run as one."""
    temporary: Mapping[int, int] = field(default_factory=dict)
    """By task, where there is any: the bytes that it needs beside its results while it runs."""
    left_out: tuple[str, ...] = ()
    """As in `Memory`."""

    def run(self) -> Simulation:
        """Replay one step, or where a step starts something for the next one the second of two."""
        count = len(self.graph)
        tasks = [replace(task, holds=()) for task in self.graph.tasks]
        steps = [tasks]
        if self.ahead:
            steps.append([self._again(i, task, count) for i, task in enumerate(tasks)])
        stretches = [
            self._later(s, n * count) for n in range(len(steps)) for s in self.graph.stretches
        ]
        every_task = tuple(task for step in steps for task in step)
        doubled = TaskGraph(every_task, stretches=tuple(stretches))
        first = len(doubled) - count
        every = engine.replay(doubled, range(len(doubled)))
        # The second step begins when the first one's host is done; the link may still be busy.
        once = TaskGraph(tuple(tasks), stretches=self.graph.stretches)
        begin = engine.replay(once, range(count)).compute_us if first else 0.0
        spans, busy = [], dict[str, float]()
        exposed_by: dict[str, float] = defaultdict(float)
        stalls = []
        for i in range(first, len(doubled)):
            task = doubled.tasks[i]
            if task.us:
                start = every.start_us[i] - begin
                spans.append(self._span(i - first, task, start, every.runs[i]))
                busy[task.lane] = busy.get(task.lane, 0.0) + task.us * every.runs[i]
            if i in every.stalls:
                lane, us = every.stalls[i]
                exposed_by[lane] += us
                start = every.start_us[i] - begin
                stalls.append(Stall(task.name, lane, start - us / every.runs[i], us))
        return Simulation(
            makespan_us=every.compute_us - begin,
            busy_us=busy,
            exposed_us=sum(exposed_by.values()),
            exposed_by=dict(exposed_by),
            spans=tuple(spans),
            stalls=tuple(stalls),
        )

    def _again(self, index: int, task: Task, count: int) -> Task:
        """A task of the second step, which finds in flight what the first has started."""
        assert self.ahead is not None
        if index in self.ahead:
            return replace(task, after=(), us=0.0, host_us=0.0)
        return replace(task, after=tuple(self.ahead.get(b, b + count) for b in task.after))

    @staticmethod
    def _later(stretch: Stretch, tasks: int) -> Stretch:
        """The same of a step that begins some tasks later."""
        return replace(stretch, first=stretch.first + tasks, until=stretch.until + tasks)

    def _span(self, index: int, task: Task, start_us: float, runs: int) -> Span:
        label = self.labels[index] if self.labels else task.name
        layer = self.layers[index] if self.layers else ""
        return Span(task.name, label, layer, task.lane, start_us, task.us, runs)

    def memory(self) -> Memory:
        """What one step holds."""
        order = range(len(self.graph))
        found = engine.replay(self.graph, order)
        always, on_host, on_disk = (
            sum(hold.num_bytes for hold in self.resident if hold.pool is pool)
            for pool in (Pool.DEVICE, Pool.HOST, Pool.DISK)
        )
        peak = max(range(len(order)), key=found.held_bytes.__getitem__, default=None)
        holds = list(self.resident)
        if peak is not None:
            holds += alive_at(self.graph, order, peak)
        alive = [
            Alive(h.name, Kind(h.kind), h.num_bytes)
            for h in holds
            if h.num_bytes and h.pool is Pool.DEVICE
        ]
        alive.sort(key=lambda item: (-item.num_bytes, item.name))
        names = [task.name for task in self.graph.tasks]
        return Memory(
            peak_bytes=always + found.peak_bytes,
            peak_node="" if peak is None else names[peak],
            resident_bytes=always,
            curve=tuple((n, always + b) for n, b in zip(names, found.held_bytes, strict=True)),
            alive=tuple(alive),
            transfers_bytes=self._of_transfers().peak_bytes,
            host_bytes=on_host + found.peaks.get(Pool.HOST, 0),
            disk_bytes=on_disk,
            left_out=self.left_out,
        )

    def _of_transfers(self) -> engine.Replay:
        """The same step, with nothing held but what transfers hold."""
        return self._holding(lambda hold: hold.of_transfer)

    def _holding(self, counts: Callable[[Hold], bool]) -> engine.Replay:
        tasks = [
            replace(task, holds=tuple(filter(counts, task.holds))) for task in self.graph.tasks
        ]
        return engine.replay(TaskGraph(tuple(tasks)), range(len(tasks)))

    def held_by_kind(self) -> dict[str, tuple[int, ...]]:
        """By what memory is for, the most of the device's that is held while each task runs."""
        found = {}
        for kind in Kind:
            always = sum(
                h.num_bytes for h in self.resident if h.kind == kind and h.pool is Pool.DEVICE
            )
            held = self._holding(lambda hold, kind=kind: hold.kind == kind).held_bytes  # type: ignore[misc]
            if always or any(held):
                found[kind.value] = tuple(always + part for part in held)
        return found


def hold_of(storage: Storage, until: Sequence[int]) -> Hold:
    """A storage as the engine sees it."""
    return Hold(
        storage.num_bytes,
        tuple(until),
        storage.pool,
        storage.name,
        storage.kind.value,
        storage.of_transfer,
    )


def tasks_of(graph: StepGraph, costs: CostModel, *, fuses: bool) -> Program:
    """A scheduled graph as tasks in launch order.

    Args:
        fuses: whether runs of compute are, or will be, compiled regions.
    """
    storages = storages_of(graph, fuses=fuses)
    transfers = {t.launch: t for t in graph.transfers()}
    takes = {id(n.target.ahead): n for n in transfers if isinstance(n.target, Take)}
    place = {node: i for i, group in enumerate(storages.groups) for node in group}
    updates = graph.nodes(role=Role.UPDATE)
    late = {n.target.pending: n for n in updates if isinstance(n.target, LateUpdate)}
    ahead: dict[int, int] = {}
    tasks, labels, layers = [], [], []
    for i, group in enumerate(storages.groups):
        node = group[0]
        stamp = stamp_of(node)
        task = Task(node.name, Lane.COMPUTE, resource=COMPUTE)
        if node in transfers or isinstance(node.target, Launch):
            launch = node if node in transfers else takes[id(node.target.ahead)]  # type: ignore[union-attr]
            record = transfers[launch].record
            cost = costs.transfer(record)
            task = replace(
                task,
                lane=stamp.lane,
                us=cost.wire_us,
                host_us=cost.host_us,
                resource=record.resource,
            )
            if launch is not node:
                ahead[place[launch]] = i
            if stamp.lane in BESIDE_COMPUTE:
                after = tuple(place[n] for n in awaited(node, transfers))
                task = replace(task, after=after, by_event=True)
        elif isinstance(node.target, StartUpdate):
            us = costs.update_us(late[node.target.pending])
            task = replace(task, lane=stamp.lane, us=us, resource=HOST, by_event=True)
        elif needs := awaited(node, transfers):
            task = replace(task, lane=stamp.lane, after=tuple(place[n] for n in needs))
            if stamp.lane is Lane.HOST:
                runs = stamp.role is Role.UPDATE and not isinstance(node.target, LateUpdate)
                us = costs.update_us(node) if runs else 0.0
                task = replace(task, us=us, resource=HOST, by_event=True)
        elif stamp.role not in FREE:
            task = replace(task, us=costs.compute_us(group))
        tasks.append(task)
        labels.append(node.name if len(group) == 1 else stamp.layer or "root")
        layers.append(stamp.layer)
    holds: dict[int, list[Hold]] = defaultdict(list)
    resident: list[Hold] = []
    for storage in storages.every:
        ends = storage.until()
        if storage.begin is None and not ends:
            resident.append(hold_of(storage, ()))
            continue
        begin = place[storage.begin] if storage.begin is not None else 0
        holds[begin].append(hold_of(storage, [max(place[n] for n in ends)] if ends else []))
    for node, num_bytes in storages.temporary.items():
        if num_bytes:
            own = Hold(num_bytes, (place[node],), name=node.name, kind=Kind.WORKSPACE.value)
            holds[place[node]].append(own)
    held = tuple(replace(task, holds=tuple(holds[i])) for i, task in enumerate(tasks))
    return Program(
        TaskGraph(held, stretches=_stretches(graph, place)),
        tuple(layers),
        tuple(labels),
        ahead,
        tuple(resident),
        tuple(map(tuple, storages.groups)),
        {place[node]: num_bytes for node, num_bytes in storages.temporary.items() if num_bytes},
        tuple(storages.left_out),
    )


def awaited(node: fx.Node, launches: Collection[fx.Node]) -> list[fx.Node]:
    """What a node waits for of all that runs beside compute: launches, and updates on the host."""
    if stamp_of(node).role is Role.PART:
        return []
    return [
        source
        for source in node.all_input_nodes
        if source in launches
        or (source.op == "call_function" and stamp_of(source).lane is Lane.HOST)
    ]


def _stretches(graph: StepGraph, place: Mapping[fx.Node, int]) -> tuple[Stretch, ...]:
    """What stands for several micro-steps."""
    if graph.steady_runs == 1:
        return ()
    first, until = (
        next(place[node] for node in graph.graph.nodes if begins(node, micro_step))
        for micro_step in (STEADY, STEADY + 1)
    )
    return (Stretch(first, until, graph.steady_runs),)


def simulate(graph: StepGraph, costs: CostModel, *, fuses: bool) -> Simulation:
    """When the nodes of a scheduled graph run."""
    return tasks_of(graph, costs, fuses=fuses).run()


def simulate_memory(graph: StepGraph, *, fuses: bool) -> Memory:
    """What a scheduled graph holds when."""
    return tasks_of(graph, FixedCosts(0.0, latency_us=0.0), fuses=fuses).memory()
