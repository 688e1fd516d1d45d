"""From a step graph to tasks, and from an order of tasks back to nodes.

unit      a run of compute of one layer: see `inventory`
gather    launched on its own, joined before the first unit that reads it, held until the
          last one has
reduce    launched after the unit that makes its gradient, which is held until its join
join      the wait of a reduce, and the updates that wait for nothing else
tail      what waits for several reduces: the gradients' norm, clipping, and so on
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxzero.cost.model import TransferCost
from fxzero.graph import Lane, Phase
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import STEADY, UNROLLED
from fxzero.graph.step_graph import TransferNodes
from fxzero.schedule.engine import Hold, Stretch, Task, TaskGraph
from fxzero.schedule.followers import with_followers
from fxzero.schedule.inventory import Inventory, join_nodes, launch_nodes
from fxzero.schedule.keep import first_of
from fxzero.schedule.storage import Storage
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


def problem_of(
    inventory: Inventory, budget_bytes: int | None = None, kept: Collection[str] = ()
) -> Problem:
    """The tasks of an inventory, in the graph's own order; made once for what is kept.

    Args:
        budget_bytes: most bytes of gathered parameters and unreduced gradients at once.
        kept: buckets that shall not be gathered: what the gather before has brought is read.
    """
    problem = inventory.problems.get(frozenset(kept))
    if problem is None:
        problem = inventory.problems[frozenset(kept)] = _made(inventory, kept)
    if budget_bytes is None:
        return problem
    return replace(problem, graph=problem.graph.within({Pool.DEVICE: budget_bytes}))


def _made(inventory: Inventory, kept: Collection[str]) -> Problem:
    dropped = {i for i, t in enumerate(inventory.gathers) if kept and t.stamp.bucket in kept}
    makes: dict[int, list[int]] = defaultdict(list)
    for r, maker in enumerate(inventory.made_by):
        makes[maker].append(r)
    plan: list[tuple[str, int]] = []
    placed: set[int] = set()
    for u, unit in enumerate(inventory.units):
        plan += [("gather", i) for i in unit.needs if i not in dropped]
        for r in sorted(unit.reads):
            _plan_reduce(inventory, r, placed, plan)
        plan.append(("unit", u))
        for r in makes[u]:
            if all(s in placed for s in inventory.second_of[r]):
                _plan_reduce(inventory, r, placed, plan)
    for r in range(len(inventory.reduces)):
        _plan_reduce(inventory, r, placed, plan)
    never_read = (i for i, use in enumerate(inventory.first_use) if use is None)
    plan += [("gather", i) for i in never_read if i not in dropped]
    plan.append(("tail", 0))
    return _Problem(inventory, plan, makes, dropped).make()


def _plan_reduce(
    inventory: Inventory, r: int, placed: set[int], plan: list[tuple[str, int]]
) -> None:
    if r in placed:
        return
    for first in inventory.second_of[r]:
        _plan_reduce(inventory, first, placed, plan)
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
        self.joined_before = self.inventory.joined_before()

    def make(self) -> Problem:
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
        holds = self.holds()
        every = tuple(replace(task, holds=tuple(holds[i])) for i, task in enumerate(tasks))
        micro_steps = self.micro_steps() if inventory.step.steady_runs > 1 else ()
        return Problem(
            TaskGraph(every, stretches=self.stretch(micro_steps)),
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
        gone = {part: None for i in self.dropped for part in inventory.gathers[i].parts}
        last: dict[Storage, Storage] = {}
        """Of what is kept, the last of what is not gathered again: it ends when that would."""
        for part in gone:
            (dropped,) = storages.of[part]
            last[storages.of[first_of(part, inventory.before, gone)][0]] = dropped
        not_there = {storages.of[part][0] for part in gone}
        found: dict[int, dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
        for storage in storages.every:
            if not storage.of_transfer or storage in not_there:
                continue
            assert storage.begin is not None
            until = last.get(storage, storage).until()
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
        after += [index["join", r] for r in (*unit.reads, *self.joined_before.get(u, ()))]
        stamp = stamp_of(unit.nodes[0])
        name = f"{stamp.layer or 'root'} {stamp.phase.value}"
        us = inventory.unit_us[u]
        return Task(name, Lane.COMPUTE, us, after=tuple(after)), unit.nodes

    def gather(self, i: int) -> tuple[Task, list[fx.Node]]:
        inventory = self.inventory
        transfer = inventory.gathers[i]
        cost = inventory.transfer_costs[transfer.launch]
        made_by = inventory.kept_by[i]
        if inventory.end_of_forward is not None and transfer.stamp.phase is Phase.BACKWARD:
            made_by = inventory.end_of_forward
        made_by = max(made_by, inventory.makes_room.get(i, -1))
        after = (self.index["unit", made_by],) if made_by >= 0 else ()
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
