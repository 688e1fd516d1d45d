"""From a step graph to tasks, and from an order of tasks back to nodes.

unit      a run of compute of one layer, which will be one region; a layer whose parameters
          come in several buckets is split where it first reads a later one
gather    launched on its own, joined before the first unit that reads it, held until the
          last one has
reduce    launched after the unit that makes its gradient, which is held until its join
join      the wait of a reduce, and the updates that wait for nothing else
tail      what waits for several reduces: the gradients' norm, clipping, and so on
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from fxzero.cost.model import CostModel, message_of
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import Transfer
from fxzero.schedule.tasks import Hold, Task, TaskGraph


@dataclass(frozen=True)
class Problem:
    """A step graph as tasks."""

    graph: TaskGraph
    nodes: tuple[tuple[fx.Node, ...], ...]
    """By task: what is placed where it is issued."""
    joins: dict[int, tuple[fx.Node, ...]]
    """By compute task: what joins the gathers that it is the first to read."""
    releases: dict[int, tuple[fx.Node, ...]]
    """By compute task: what it is the last to read."""
    followers: tuple[fx.Node, ...]
    """What runs as soon as it can, between two units."""
    gathers: dict[int, Transfer]
    """By gather task."""

    def node_order(self, order: Sequence[int], first: Collection[str] = ()) -> list[fx.Node]:
        """All call nodes in the order that an order of tasks means.

        Args:
            first: keys of parameters whose updates go before those of others.
        """
        out: list[fx.Node] = []
        boundaries: set[fx.Node] = set()
        joined: set[fx.Node] = set()
        for index in order:
            joins = [n for n in self.joins.get(index, ()) if n not in joined]
            joined.update(joins)
            nodes = [n for n in self.nodes[index] if not n._erased]
            boundaries.update(joins, nodes[:1])
            if self.graph.tasks[index].is_transfer:
                boundaries.update(nodes)
            releases = [n for n in self.releases.get(index, ()) if not n._erased]
            boundaries.update(releases)
            out += [*joins, *nodes, *releases]
        return with_followers(out, self.followers, boundaries, first)


class _Lifetime(NamedTuple):
    """How long a gathered parameter is read."""

    key: tuple[str, int]
    """The parameter's key, and the micro-step."""
    num_bytes: int
    """0 where it lives for the whole step anyway."""
    last_unit: int | None


@dataclass
class _Unit:
    nodes: list[fx.Node]
    needs: list[int] = field(default_factory=list)
    """Positions of gathers."""
    reads: list[int] = field(default_factory=list)
    """Positions of reduces whose results it reads."""


class Outline:
    """A step graph's units and transfers with their costs, from which problems are made.

    Args:
        cut: whether forward and backward will be run apart, so that nothing of backward can
            be launched in forward.
    """

    def __init__(self, graph: StepGraph, costs: CostModel, *, cut: bool) -> None:
        self.step = graph
        self.costs = costs
        transfers = [t for t in graph.transfers() if t.stamp.phase is not Phase.OPTIMIZER]
        self.gathers = [t for t in transfers if t.stamp.lane is Lane.GATHER]
        self.reduces = [t for t in transfers if t.stamp.lane is Lane.REDUCE]
        self.moved = {node for t in transfers for node in nodes_of(t)}
        nodes = list(graph.nodes())
        self.followers = [n for n in nodes if is_follower(n) and n not in self.moved]
        self.releases = [n for n in nodes if stamp_of(n).role is Role.RELEASE]
        apart = {*self.moved, *self.followers, *self.releases}
        self.compute = [n for n in nodes if n not in apart]
        self.position = {node: i for i, node in enumerate(self.compute)}
        self.first_use = [self._first_use(t) for t in self.gathers]
        self.units, self.unit_of = self._units()
        self.unit_us = [costs.compute_us(unit.nodes) for unit in self.units]
        self.transfer_costs = {t.launch: costs.transfer(message_of(graph, t)) for t in transfers}
        self.made_by = [self._unit_after(sources_of(t), set()) for t in self.reduces]
        self.second_of = self._second_stages()
        self.follower_us, self.tail_us = self._follower_costs()
        self.wait_lifetimes = [self._wait_lifetimes(t) for t in self.gathers]
        self.ending = self._endings()
        self.end_of_forward = self._end_of_forward() if cut else None

    def _first_use(self, transfer: Transfer) -> int | None:
        """The position of the first compute node that reads a transfer's results."""
        users = (self.position.get(u) for n in transfer.results for u in n.users)
        return min((p for p in users if p is not None), default=None)

    def _units(self) -> tuple[list[_Unit], list[int]]:
        """Runs of one layer, split where a later bucket of the layer is first read."""
        begins: list[bool] = []
        for i, node in enumerate(self.compute):
            before = stamp_of(self.compute[i - 1]) if i else None
            stamp = stamp_of(node)
            begins.append(
                before is None or (before.layer, before.segment) != (stamp.layer, stamp.segment)
            )
        starts: list[int] = []
        for i, new in enumerate(begins):
            starts.append(i if new else starts[-1])
        begun: set[tuple[str, object]] = set()
        joined_at: list[int | None] = []
        for transfer, use in zip(self.gathers, self.first_use, strict=True):
            key = (transfer.stamp.layer, transfer.stamp.segment)
            if use is None:
                joined_at.append(None)
            elif key in begun:
                begins[use] = True
                joined_at.append(use)
            else:
                joined_at.append(starts[use])
            begun.add(key)
        units: list[_Unit] = []
        unit_of: list[int] = []
        for node, new in zip(self.compute, begins, strict=True):
            if new:
                units.append(_Unit([]))
            units[-1].nodes.append(node)
            unit_of.append(len(units) - 1)
        for i, position in enumerate(joined_at):
            if position is not None:
                units[unit_of[position]].needs.append(i)
        for i, transfer in enumerate(self.reduces):
            use = self._first_use(transfer)
            if use is not None:
                units[unit_of[use]].reads.append(i)
        return units, unit_of

    def _unit_after(self, nodes: Iterable[fx.Node], seen: set[fx.Node]) -> int:
        """The last unit that nodes depend on, through followers and transfers; -1 for none."""
        last = -1
        for node in nodes:
            if node in seen:
                continue
            seen.add(node)
            if node in self.position:
                last = max(last, self.unit_of[self.position[node]])
            elif node.op == "call_function" and stamp_of(node).role is not Role.RELEASE:
                last = max(last, self._unit_after(node.all_input_nodes, seen))
        return last

    def _joins_behind(self) -> dict[fx.Node, frozenset[int]]:
        """For each follower, the reduces that it waits for."""
        result_of = {n: i for i, t in enumerate(self.reduces) for n in nodes_of(t)}
        behind: dict[fx.Node, frozenset[int]] = {}
        for node in self.followers:
            found: set[int] = set()
            for source in node.all_input_nodes:
                if source in result_of:
                    found.add(result_of[source])
                else:
                    found |= behind.get(source, frozenset())
            behind[node] = frozenset(found)
        return behind

    def _second_stages(self) -> list[list[int]]:
        """For each reduce, those whose results it sends on: across replicas."""
        join_of = {n: i for i, t in enumerate(self.reduces) for n in join_nodes(t)}
        return [
            sorted({join_of[s] for s in _through_followers(sources_of(t)) if s in join_of} - {i})
            for i, t in enumerate(self.reduces)
        ]

    def _follower_costs(self) -> tuple[dict[int, float], float]:
        """What followers take, by the one reduce that they wait for; and those of the tail."""
        behind = self._joins_behind()
        follower_us: dict[int, float] = defaultdict(float)
        tail: list[fx.Node] = []
        for node in self.followers:
            waits = behind[node]
            if len(waits) == 1:
                follower_us[next(iter(waits))] += self.costs.compute_us([node])
            else:
                tail.append(node)
        # Transfers of the optimizer phase: the norm's sum, which everything waits for.
        blocking = self.step.transfers(phase=Phase.OPTIMIZER)
        wires = (self.costs.transfer(message_of(self.step, t)).wire_us for t in blocking)
        return follower_us, self.costs.compute_us(tail) + sum(wires)

    def _wait_lifetimes(self, transfer: Transfer) -> list[_Lifetime]:
        """For each full parameter of a gather, which one it is and how long it is read."""
        found = []
        for wait in transfer.waits:
            stamp = stamp_of(wait)
            (key, *_) = stamp.params
            amount = num_bytes(wait) if self.step.specs[key].zero == 3 else 0
            last = self._last_unit(readers(wait))
            found.append(_Lifetime((key, stamp.micro_step), amount, last))
        return found

    def _endings(self) -> dict[int, list[fx.Node]]:
        """By unit, the releases after it."""
        ending: dict[int, list[fx.Node]] = defaultdict(list)
        for release in self.releases:
            last = self._last_unit(_readers_of(release))
            ending[len(self.units) if last is None else last].append(release)
        return ending

    def _end_of_forward(self) -> int | None:
        """The last unit of forward."""
        forward = (
            u for u, unit in enumerate(self.units) if stamp_of(unit.nodes[0]).phase is Phase.FORWARD
        )
        return max(forward, default=None)

    def _last_unit(self, nodes: Iterable[fx.Node]) -> int | None:
        positions = [self.position[node] for node in nodes if node in self.position]
        return self.unit_of[max(positions)] if positions else None

    def problem(self, budget_bytes: int | None = None, kept: Collection[str] = ()) -> Problem:
        """The tasks, in the graph's own order.

        Args:
            budget_bytes: most bytes of gathered parameters and unreduced gradients at once.
            kept: buckets of backward that shall not be gathered: it reads what forward gathered.
        """
        dropped = (
            {i for i, t in enumerate(self.gathers) if t.stamp.bucket in kept} if kept else set()
        )
        makes: dict[int, list[int]] = defaultdict(list)
        for r, maker in enumerate(self.made_by):
            makes[maker].append(r)
        plan: list[tuple[str, int]] = []
        placed: set[int] = set()
        for u, unit in enumerate(self.units):
            plan += [("gather", i) for i in unit.needs if i not in dropped]
            for r in sorted(unit.reads):
                self._plan_reduce(r, placed, plan)
            plan.append(("unit", u))
            for r in makes[u]:
                if all(s in placed for s in self.second_of[r]):
                    self._plan_reduce(r, placed, plan)
        for r in range(len(self.reduces)):
            self._plan_reduce(r, placed, plan)
        never_read = (i for i, use in enumerate(self.first_use) if use is None)
        plan += [("gather", i) for i in never_read if i not in dropped]
        plan.append(("tail", 0))
        return _Problem(self, plan, makes, dropped).make(budget_bytes)

    def _plan_reduce(self, r: int, placed: set[int], plan: list[tuple[str, int]]) -> None:
        if r in placed:
            return
        for first in self.second_of[r]:
            self._plan_reduce(first, placed, plan)
        placed.add(r)
        plan += [("reduce", r), ("join", r)]


@dataclass
class _Problem:
    """A problem in the making."""

    outline: Outline
    plan: list[tuple[str, int]]
    """What becomes a task, in a valid order."""
    makes: dict[int, list[int]]
    """By unit, the reduces of its gradients."""
    dropped: set[int]
    """Gathers that do not happen."""

    def __post_init__(self) -> None:
        self.index = {what: i for i, what in enumerate(self.plan)}
        self.read_again = {
            lifetime.key: lifetime.last_unit
            for i in self.dropped
            for lifetime in self.outline.wait_lifetimes[i]
        }

    def make(self, budget_bytes: int | None) -> Problem:
        outline = self.outline
        kinds = {
            "unit": self.unit,
            "gather": self.gather,
            "reduce": self.reduce,
            "join": self.join,
            "tail": self.tail,
        }
        tasks, nodes = [], []
        for kind, i in self.plan:
            task, placed = kinds[kind](i)
            tasks.append(task)
            nodes.append(tuple(placed))
        units = {self.index["unit", u]: unit for u, unit in enumerate(outline.units)}
        return Problem(
            TaskGraph(tuple(tasks), budget_bytes),
            tuple(nodes),
            joins={
                me: tuple(
                    n
                    for g in unit.needs
                    if g not in self.dropped
                    for n in join_nodes(outline.gathers[g])
                )
                for me, unit in units.items()
            },
            releases={
                self.index["unit", u]: tuple(nodes)
                for u, nodes in outline.ending.items()
                if u < len(outline.units)
            },
            followers=tuple(outline.followers),
            gathers={
                self.index["gather", i]: transfer
                for i, transfer in enumerate(outline.gathers)
                if i not in self.dropped
            },
        )

    def unit(self, u: int) -> tuple[Task, list[fx.Node]]:
        outline, index = self.outline, self.index
        unit = outline.units[u]
        after = [index["unit", u - 1]] if u else []
        after += [index["gather", g] for g in unit.needs if g not in self.dropped]
        after += [index["join", r] for r in unit.reads]
        holds = tuple(
            Hold(sum(map(num_bytes, outline.reduces[r].tensors)), (index["join", r],))
            for r in self.makes[u]
            if not outline.second_of[r]
        )
        stamp = stamp_of(unit.nodes[0])
        name = f"{stamp.layer or 'root'} {stamp.phase.value}"
        us = outline.unit_us[u]
        return Task(name, Lane.COMPUTE, us, after=tuple(after), holds=holds), unit.nodes

    def gather(self, i: int) -> tuple[Task, list[fx.Node]]:
        outline = self.outline
        transfer = outline.gathers[i]
        cost = outline.transfer_costs[transfer.launch]
        until: dict[int, int] = defaultdict(int)
        for lifetime in outline.wait_lifetimes[i]:
            last = lifetime.last_unit
            if transfer.stamp.phase is Phase.FORWARD:
                last = self.read_again.get(lifetime.key, last)
            if last is not None and lifetime.num_bytes:
                until[last] += lifetime.num_bytes
        holds = tuple(Hold(amount, (self.index["unit", u],)) for u, amount in until.items())
        after: tuple[int, ...] = ()
        if outline.end_of_forward is not None and transfer.stamp.phase is Phase.BACKWARD:
            after = (self.index["unit", outline.end_of_forward],)
        nodes = launch_nodes(transfer)
        if outline.first_use[i] is None:
            nodes += join_nodes(transfer)
        return Task(_name(transfer), Lane.GATHER, cost.wire_us, cost.host_us, after, holds), nodes

    def reduce(self, r: int) -> tuple[Task, list[fx.Node]]:
        outline = self.outline
        transfer = outline.reduces[r]
        cost = outline.transfer_costs[transfer.launch]
        after = {self.index["join", first] for first in outline.second_of[r]}
        if outline.made_by[r] >= 0:
            after.add(self.index["unit", outline.made_by[r]])
        task = Task(_name(transfer), Lane.REDUCE, cost.wire_us, cost.host_us, tuple(sorted(after)))
        return task, launch_nodes(transfer)

    def join(self, r: int) -> tuple[Task, list[fx.Node]]:
        transfer = self.outline.reduces[r]
        us = self.outline.follower_us.get(r, 0.0)
        after = (self.index["reduce", r],)
        return Task(f"join {_name(transfer)}", Lane.COMPUTE, us, after=after), join_nodes(transfer)

    def tail(self, _: int) -> tuple[Task, list[fx.Node]]:
        outline = self.outline
        after = [self.index["join", r] for r in range(len(outline.reduces))]
        after += [self.index["unit", len(outline.units) - 1]] if outline.units else []
        task = Task("tail", Lane.COMPUTE, outline.tail_us, after=tuple(after))
        return task, outline.ending.get(len(outline.units), [])


def _name(transfer: Transfer) -> str:
    return transfer.stamp.bucket or transfer.launch.name


def is_follower(node: fx.Node) -> bool:
    """Whether a node runs as soon as it can, between two units."""
    stamp = stamp_of(node)
    return stamp.phase is Phase.OPTIMIZER or stamp.role is Role.ACCUMULATE


def nodes_of(transfer: Transfer) -> list[fx.Node]:
    """All nodes that exist for a transfer."""
    return [*launch_nodes(transfer), *join_nodes(transfer)]


def launch_nodes(transfer: Transfer) -> list[fx.Node]:
    """What starts a transfer."""
    return [*transfer.prepare, transfer.launch]


def join_nodes(transfer: Transfer) -> list[fx.Node]:
    """What joins a transfer."""
    return [*transfer.parts, *transfer.waits, *transfer.finish]


def sources_of(transfer: Transfer) -> list[fx.Node]:
    """What a transfer reads from outside of itself."""
    own = set(transfer.prepare)
    return [n for node in launch_nodes(transfer) for n in node.all_input_nodes if n not in own]


def _through_followers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and what followers among them read."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node in found:
            continue
        found.add(node)
        if node.op == "call_function" and is_follower(node):
            queue += node.all_input_nodes
    return found


def _readers_of(release: fx.Node) -> set[fx.Node]:
    """Everything that reads what a release ends, through views."""
    found: set[fx.Node] = set()
    queue = list(release.all_input_nodes)
    while queue:
        for user in queue.pop().users:
            if user is release or user in found:
                continue
            found.add(user)
            if is_view(user):
                queue.append(user)
    return found


def with_followers(
    order: Sequence[fx.Node],
    followers: Sequence[fx.Node],
    boundaries: Collection[fx.Node],
    first: Collection[str] = (),
) -> list[fx.Node]:
    """Put each follower where what it reads is there, and what it changes has been read.

    Args:
        boundaries: the nodes of `order` before which there is room.
        first: keys of parameters whose updates go before others that are ready too.
    """
    missing = {node: _awaited(node) for node in followers}
    waiting: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, needed in missing.items():
        for source in needed:
            waiting[source].append(node)
    chosen = set(first)
    rank = {node: (chosen.isdisjoint(stamp_of(node).params), i) for i, node in enumerate(followers)}
    ready = [rank[node] for node, needed in missing.items() if not needed]
    heapq.heapify(ready)
    out: list[fx.Node] = []

    def emit(node: fx.Node) -> None:
        out.append(node)
        for follower in waiting.pop(node, ()):
            missing[follower].discard(node)
            if not missing[follower]:
                heapq.heappush(ready, rank[follower])

    def flush() -> None:
        while ready:
            emit(followers[heapq.heappop(ready)[1]])

    for node in order:
        if node in boundaries:
            flush()
        emit(node)
    flush()
    assert len(out) == len(order) + len(followers), "followers wait for each other"
    return out


def _awaited(node: fx.Node) -> set[fx.Node]:
    """What must run before a follower: its sources, and all readers of what it changes."""
    needed = {n for n in node.all_input_nodes if n.op == "call_function"}
    if stamp_of(node).role is Role.UPDATE:
        changed = [
            source
            for source in node.all_input_nodes
            if source.op == "placeholder" and stamp_of(source).phase is not Phase.OPTIMIZER
        ]
        needed |= {reader for reader in readers(*changed) if reader < node}
    return needed - {node}


def readers(*sources: fx.Node) -> set[fx.Node]:
    """Everything that reads nodes' memory: through views, and in collectives until joined."""
    found: set[fx.Node] = set()
    queue = list(sources)
    while queue:
        for user in queue.pop().users:
            if user in found or user.op == "output":
                continue
            found.add(user)
            if is_view(user) or stamp_of(user).role in (Role.PREPARE, Role.LAUNCH, Role.PART):
                queue.append(user)
    return found
