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

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from fxzero.cost.model import CostModel, TransferCost
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import STEADY, UNROLLED
from fxzero.graph.step_graph import TransferNodes
from fxzero.schedule.engine import Hold, Stretch, Task, TaskGraph
from fxzero.schedule.followers import is_follower, through_followers, with_followers
from fxzero.schedule.keep import gathered_in, key_of
from fxzero.schedule.storage import Storage, storages_of
from fxzero.transfer import Pool


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
    gathers: dict[int, TransferNodes]
    """By gather task."""
    micro_steps: tuple[dict[tuple[str, int], int], ...] = ()
    """By micro-step, its tasks by what they are: the third unit, the first gather."""

    def is_steady(self, order: Sequence[int]) -> bool:
        """Whether an order does in the steady micro-step what it does in the one before, so that
        it can stand for others. True of a graph in which it stands for itself alone."""
        if not self.graph.stretches:
            return True
        (steady,) = self.graph.stretches
        what = {
            task: (s, key) for s, own in enumerate(self.micro_steps) for key, task in own.items()
        }
        place = {task: position for position, task in enumerate(order)}
        begins = [place[self.micro_steps[s]["unit", 0]] for s in (STEADY - 1, STEADY, STEADY + 1)]
        before, now = order[begins[0] : begins[1]], order[begins[1] : begins[2]]
        if len(before) != len(now) or steady.first != order[begins[1]]:
            return False
        if {what[task][1] for task in now if task in what} != self.micro_steps[STEADY].keys():
            return False  # something of it was done for several micro-steps at once
        for mine, theirs in zip(before, now, strict=True):
            if mine not in what or theirs not in what:
                return False
            (early, key), (late, other) = what[mine], what[theirs]
            if key != other or late - early != 1 or abs(late - STEADY) > 1:
                return False  # or it reaches further than into the next micro-step
        return True

    def names(self) -> list[str]:
        """The tasks' names, each its own: the second of a name is ``"name #2"``."""
        seen: Counter[str] = Counter()
        found = []
        for task in self.graph.tasks:
            seen[task.name] += 1
            found.append(task.name if seen[task.name] == 1 else f"{task.name} #{seen[task.name]}")
        return found

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


@dataclass
class _Unit:
    nodes: list[fx.Node]
    needs: list[int] = field(default_factory=list)
    """Positions of gathers."""
    reads: list[int] = field(default_factory=list)
    """Positions of reduces whose results it reads."""


class Inventory:
    """A step graph's units and transfers with their costs, from which problems are made.

    Args:
        cut: whether forward and backward will be run apart, so that nothing of backward can
            be launched in forward.
    """

    def __init__(self, graph: StepGraph, costs: CostModel, *, cut: bool, fuses: bool) -> None:
        self.step = graph
        self.storages = storages_of(graph, fuses=fuses)
        self.costs = costs
        every = graph.transfers()
        transfers = [t for t in every if t.of_parameters]
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
        self.own_us = {
            t.launch: costs.transfer(t.record).wire_us
            for t in every
            if not t.of_parameters and t.stamp.phase is not Phase.OPTIMIZER
        }
        self.unit_us = [self._unit_cost(unit.nodes) for unit in self.units]
        self.transfer_costs = {t.launch: costs.transfer(t.record) for t in transfers}
        self.made_by = [self._unit_after(sources_of(t), set()) for t in self.reduces]
        self.made_at = {n: self._unit_after([n], set()) for n in self.followers}
        self.second_of = self._second_stages()
        self.follower_us, self.tail_us = self._follower_costs()
        self.ending = self._endings()
        self.end_of_forward = self._end_of_forward() if cut else None

    def _first_use(self, transfer: TransferNodes) -> int | None:
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

    def _unit_cost(self, nodes: Sequence[fx.Node]) -> float:
        """What a unit takes. A model's own collectives stay where its author has put them, and
        are taken to be waited for at once."""
        if not self.own_us:
            return self.costs.compute_us(nodes)
        moving = (Role.LAUNCH, Role.WAIT, Role.PART)
        computes = [node for node in nodes if stamp_of(node).role not in moving]
        return self.costs.compute_us(computes) + sum(self.own_us.get(node, 0.0) for node in nodes)

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
            sorted({join_of[s] for s in through_followers(sources_of(t)) if s in join_of} - {i})
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
        wires = (self.costs.transfer(t.record).wire_us for t in blocking)
        return follower_us, self.costs.compute_us(tail) + sum(wires)

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

    inventory: Inventory
    plan: list[tuple[str, int]]
    """What becomes a task, in a valid order."""
    makes: dict[int, list[int]]
    """By unit, the reduces of its gradients."""
    dropped: set[int]
    """Gathers that do not happen."""

    def __post_init__(self) -> None:
        self.index = {what: i for i, what in enumerate(self.plan)}

    def make(self, budget_bytes: int | None) -> Problem:
        inventory = self.inventory
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
        units = {self.index["unit", u]: unit for u, unit in enumerate(inventory.units)}
        budgets = {} if budget_bytes is None else {Pool.DEVICE: budget_bytes}
        holds = self.holds()
        every = tuple(replace(task, holds=tuple(holds[i])) for i, task in enumerate(tasks))
        micro_steps = self.micro_steps() if inventory.step.steady_runs > 1 else ()
        return Problem(
            TaskGraph(every, budgets, self.stretch(micro_steps)),
            tuple(nodes),
            joins={
                me: tuple(
                    n
                    for g in unit.needs
                    if g not in self.dropped
                    for n in join_nodes(inventory.gathers[g])
                )
                for me, unit in units.items()
            },
            releases={
                self.index["unit", u]: tuple(nodes)
                for u, nodes in inventory.ending.items()
                if u < len(inventory.units)
            },
            followers=tuple(inventory.followers),
            gathers={
                self.index["gather", i]: transfer
                for i, transfer in enumerate(inventory.gathers)
                if i not in self.dropped
            },
            micro_steps=micro_steps,
        )

    def micro_steps(self) -> tuple[dict[tuple[str, int], int], ...]:
        """By micro-step, its tasks by kind and by their number among those of their kind."""
        inventory = self.inventory
        found: list[dict[tuple[str, int], int]] = [{} for _ in range(UNROLLED)]
        numbers: Counter[tuple[int, str]] = Counter()
        for kind, i in self.plan:
            if kind == "tail":
                continue
            if kind == "unit":
                node = inventory.units[i].nodes[0]
            else:
                node = (inventory.gathers if kind == "gather" else inventory.reduces)[i].launch
            micro_step = stamp_of(node).micro_step
            found[micro_step][kind, numbers[micro_step, kind]] = self.index[kind, i]
            numbers[micro_step, kind] += 1
        return tuple(found)

    def stretch(self, micro_steps: tuple[dict[tuple[str, int], int], ...]) -> tuple[Stretch, ...]:
        """From the steady micro-step's first unit to that of the one behind it."""
        runs = self.inventory.step.steady_runs
        if runs == 1:
            return ()
        first, until = (micro_steps[s]["unit", 0] for s in (STEADY, STEADY + 1))
        return (Stretch(first, until, runs),)

    def holds(self) -> dict[int, list[Hold]]:
        """By task, what transfers hold from its issue on: the storages of the graph, seen from
        tasks. So what a budget bounds is what a simulation counts."""
        inventory = self.inventory
        storages = inventory.storages
        place = self._places()
        again: dict[Storage, Storage] = {}
        gone: set[Storage] = set()
        if self.dropped:
            first = {k: storages.of[p][0] for k, (p, _) in gathered_in(inventory.step).items()}
            for i in self.dropped:
                for part in inventory.gathers[i].parts:
                    (dropped,) = storages.of[part]
                    gone.add(dropped)
                    again[first[key_of(part)]] = dropped
        found: dict[int, dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
        for storage in storages.every:
            if not storage.of_transfer or storage in gone:
                continue
            assert storage.begin is not None
            until = again.get(storage, storage).until()
            ends = tuple(sorted({place[node] for node in until if node in place}))
            found[place[storage.begin]][ends] += storage.num_bytes
        return defaultdict(
            list,
            {
                task: [Hold(num_bytes, ends, of_transfer=True) for ends, num_bytes in holds.items()]
                for task, holds in found.items()
            },
        )

    def _places(self) -> dict[fx.Node, int]:
        """By node, the task with which it runs."""
        inventory, index = self.inventory, self.index
        tail = index["tail", 0]
        place: dict[fx.Node, int] = {}
        for u, unit in enumerate(inventory.units):
            place |= dict.fromkeys(unit.nodes, index["unit", u])
        for u, releases in inventory.ending.items():
            place |= dict.fromkeys(releases, index.get(("unit", u), tail))
        for i, transfer in enumerate(inventory.gathers):
            if i not in self.dropped:
                use = inventory.first_use[i]
                place |= dict.fromkeys(launch_nodes(transfer), index["gather", i])
                joined = index["gather", i] if use is None else place[inventory.compute[use]]
                place |= dict.fromkeys(join_nodes(transfer), joined)
        for r, transfer in enumerate(inventory.reduces):
            place |= dict.fromkeys(launch_nodes(transfer), index["reduce", r])
            place |= dict.fromkeys(join_nodes(transfer), index["join", r])
        for node, unit_before in inventory.made_at.items():
            place[node] = index.get(("unit", unit_before), tail)
        return place

    def unit(self, u: int) -> tuple[Task, list[fx.Node]]:
        inventory, index = self.inventory, self.index
        unit = inventory.units[u]
        after = [index["unit", u - 1]] if u else []
        after += [index["gather", g] for g in unit.needs if g not in self.dropped]
        after += [index["join", r] for r in unit.reads]
        stamp = stamp_of(unit.nodes[0])
        name = f"{stamp.layer or 'root'} {stamp.phase.value}"
        us = inventory.unit_us[u]
        return Task(name, Lane.COMPUTE, us, after=tuple(after)), unit.nodes

    def gather(self, i: int) -> tuple[Task, list[fx.Node]]:
        inventory = self.inventory
        transfer = inventory.gathers[i]
        cost = inventory.transfer_costs[transfer.launch]
        after: tuple[int, ...] = ()
        if inventory.end_of_forward is not None and transfer.stamp.phase is Phase.BACKWARD:
            after = (self.index["unit", inventory.end_of_forward],)
        nodes = launch_nodes(transfer)
        if inventory.first_use[i] is None:
            nodes += join_nodes(transfer)
        return _transfer_task(transfer, cost, after), nodes

    def reduce(self, r: int) -> tuple[Task, list[fx.Node]]:
        inventory = self.inventory
        transfer = inventory.reduces[r]
        cost = inventory.transfer_costs[transfer.launch]
        after = {self.index["join", first] for first in inventory.second_of[r]}
        if inventory.made_by[r] >= 0:
            after.add(self.index["unit", inventory.made_by[r]])
        return _transfer_task(transfer, cost, tuple(sorted(after))), launch_nodes(transfer)

    def join(self, r: int) -> tuple[Task, list[fx.Node]]:
        transfer = self.inventory.reduces[r]
        us = self.inventory.follower_us.get(r, 0.0)
        after = (self.index["reduce", r],)
        return Task(f"join {_name(transfer)}", Lane.COMPUTE, us, after=after), join_nodes(transfer)

    def tail(self, _: int) -> tuple[Task, list[fx.Node]]:
        inventory = self.inventory
        after = [self.index["join", r] for r in range(len(inventory.reduces))]
        after += [self.index["unit", len(inventory.units) - 1]] if inventory.units else []
        task = Task("tail", Lane.COMPUTE, inventory.tail_us, after=tuple(after))
        return task, inventory.ending.get(len(inventory.units), [])


def _transfer_task(transfer: TransferNodes, cost: TransferCost, after: tuple[int, ...]) -> Task:
    resource = transfer.record.resource
    name, lane = _name(transfer), transfer.stamp.lane
    return Task(name, lane, cost.wire_us, cost.host_us, after, resource=resource)


def _name(transfer: TransferNodes) -> str:
    return transfer.stamp.bucket or transfer.launch.name


def nodes_of(transfer: TransferNodes) -> list[fx.Node]:
    """All nodes that exist for a transfer."""
    return [*launch_nodes(transfer), *join_nodes(transfer)]


def launch_nodes(transfer: TransferNodes) -> list[fx.Node]:
    """What starts a transfer."""
    return [*transfer.prepare, transfer.launch]


def join_nodes(transfer: TransferNodes) -> list[fx.Node]:
    """What joins a transfer."""
    return [transfer.wait, *transfer.parts, *transfer.finish]


def sources_of(transfer: TransferNodes) -> list[fx.Node]:
    """What a transfer reads from outside of itself."""
    own = set(transfer.prepare)
    return [n for node in launch_nodes(transfer) for n in node.all_input_nodes if n not in own]


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
