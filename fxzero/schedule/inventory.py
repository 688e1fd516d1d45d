"""What a step graph is made of, to whoever schedules it: units and transfers, with their costs.

unit      a run of compute of one layer, which will be one region; a layer whose parameters
          come in several buckets is split where it first reads a later one
follower  what runs as soon as it can between two units: the sum over micro-steps, an update
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxzero.cost.model import CostModel
from fxzero.graph import Lane, Phase, Role, Segment, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.stamps import BESIDE_COMPUTE, stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.schedule.followers import is_follower, through_followers
from fxzero.schedule.keep import gathered_before
from fxzero.schedule.storage import storages_of
from fxzero.transfer import TransferKind


@dataclass
class Unit:
    """A run of compute, and what it waits for."""

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
        self.transfers = every = graph.transfers()
        transfers = [t for t in every if t.is_placed]
        self.before = gathered_before(graph, every)
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
            if not (t.is_placed or t.is_copy or t.stamp.phase is Phase.OPTIMIZER)
        }
        self.unit_us = [self._unit_cost(unit.nodes) for unit in self.units]
        self.transfer_costs = {t.launch: costs.transfer(t.record) for t in transfers}
        self._units_after: dict[fx.Node, int] = {}
        """By node, what `_unit_after` has found: a norm depends on everything, and every update on
        the norm."""
        self.kept_by = [
            self._unit_after(sources_of(t)) if t.of_activations else -1 for t in self.gathers
        ]
        """By gather, the unit that makes what it sends; -1 for a parameter's, there at once."""
        self.made_by = [self._unit_after(sources_of(t)) for t in self.reduces]
        self.made_at = {n: self._unit_after([n]) for n in self.followers}
        self.second_of = self._second_stages()
        self.follower_us, self.tail_us = self._follower_costs()
        self.ending = self._endings()
        self.makes_room = self._makes_room()
        self.end_of_forward = self._end_of_forward() if cut else None
        self.problems: dict[frozenset[str], Any] = {}
        """What `fxzero.schedule.problem` has made of it, by the buckets that are kept."""

    def _first_use(self, transfer: TransferNodes) -> int | None:
        """The position of the first compute node that reads a transfer's results."""
        users = (self.position.get(u) for n in transfer.results for u in n.users)
        return min((p for p in users if p is not None), default=None)

    def _units(self) -> tuple[list[Unit], list[int]]:
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
            elif transfer.of_activations:  # joined with what is there first: it splits no region
                joined_at.append(starts[use])
                continue
            elif key in begun:
                begins[use] = True
                joined_at.append(use)
            else:
                joined_at.append(starts[use])
            begun.add(key)
        units: list[Unit] = []
        unit_of: list[int] = []
        for node, new in zip(self.compute, begins, strict=True):
            if new:
                units.append(Unit([]))
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

    def _unit_after(self, nodes: Iterable[fx.Node]) -> int:
        """The last unit that nodes depend on, through followers and transfers; -1 for none."""
        known = self._units_after
        stack = list(nodes)
        wanted = tuple(stack)
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
            elif node in self.position:
                known[node] = self.unit_of[self.position[node]]
            elif node.op != "call_function" or stamp_of(node).role is Role.RELEASE:
                known[node] = -1
            elif unknown := [source for source in node.all_input_nodes if source not in known]:
                stack += unknown
            else:
                known[node] = max((known[source] for source in node.all_input_nodes), default=-1)
        return max((known[node] for node in wanted), default=-1)

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
            if stamp_of(node).lane in BESIDE_COMPUTE:
                continue
            waits = behind[node]
            if len(waits) == 1:
                follower_us[next(iter(waits))] += self.costs.compute_us([node])
            else:
                tail.append(node)
        # Transfers of the optimizer phase: the norm's sum, which everything waits for.
        blocking = [t for t in self.step.transfers(phase=Phase.OPTIMIZER) if not t.is_copy]
        wires = (self.costs.transfer(t.record).wire_us for t in blocking)
        return follower_us, self.costs.compute_us(tail) + sum(wires)

    def _endings(self) -> dict[int, list[fx.Node]]:
        """By unit, the releases after it."""
        ending: dict[int, list[fx.Node]] = defaultdict(list)
        for release in self.releases:
            last = self._last_unit(_readers_of(release))
            ending[len(self.units) if last is None else last].append(release)
        return ending

    def _makes_room(self) -> dict[int, int]:
        """By gather of a block, the last unit that reads the block before the one before it: of a
        parameter no more than two blocks are there, one that is read and one on its way."""
        found: dict[int, int] = {}
        before: dict[tuple[str, Segment], list[int]] = defaultdict(list)
        for i, transfer in enumerate(self.gathers):
            if not self.step.is_block(transfer) or self.first_use[i] is None:
                continue
            owner = self.step.owner_of(transfer.stamp.params[0])
            before[owner, transfer.stamp.segment].append(i)
        for gathers in before.values():
            gathers.sort(key=lambda i: self.first_use[i] or 0)
            for earlier, later in zip(gathers, gathers[2:], strict=False):
                users = through_views(self.gathers[earlier].results)
                last, use = self._last_unit(users), self.first_use[later]
                if last is not None and use is not None and last < self.unit_of[use]:
                    found[later] = last
        return found

    def joined_before(self) -> dict[int, list[int]]:
        """By unit, the reduces that are to be joined before it: of a parameter in blocks the full
        gradient of one block is there, and no more."""
        found: dict[int, list[int]] = defaultdict(list)
        before: dict[tuple[str, Segment, TransferKind], int] = {}
        for r, transfer in sorted(enumerate(self.reduces), key=lambda pair: self.made_by[pair[0]]):
            if not self.step.is_block(transfer):
                continue
            owner = self.step.owner_of(transfer.stamp.params[0])
            key = (owner, transfer.stamp.segment, transfer.record.kind)
            if key in before and self.made_by[before[key]] < self.made_by[r]:
                found[self.made_by[r]].append(before[key])
            before[key] = r
        return found

    def _end_of_forward(self) -> int | None:
        """The last unit of forward."""
        forward = (
            u for u, unit in enumerate(self.units) if stamp_of(unit.nodes[0]).phase is Phase.FORWARD
        )
        return max(forward, default=None)

    def _last_unit(self, nodes: Iterable[fx.Node]) -> int | None:
        positions = [self.position[node] for node in nodes if node in self.position]
        return self.unit_of[max(positions)] if positions else None


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
    return through_views(release.all_input_nodes) - {release}


def through_views(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Everything that reads nodes, through views."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        for user in queue.pop().users:
            if user in found:
                continue
            found.add(user)
            if is_view(user):
                queue.append(user)
    return found
