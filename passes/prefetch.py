"""Start each gather some buckets early, and join each reduce some buckets late.

    gather(a); wait(a); A(x, a); gather(b); wait(b); B(y, b)
→   gather(a); gather(b); wait(a); A(x, a); wait(b); B(y, b)        (distance 1)

Waits go to the beginning of the layer that needs them, launches before the wait of the
bucket `distance` earlier. A reduce is launched where its layer's backward ends and
joined after `reduce_distance` further launches, so that the full gradients in flight
stay bounded. In a whole step, what follows a reduce (the sum over micro-steps, the update)
runs as soon as it can, between two layers. The set of nodes stays as it was: only the order
changes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from torch import fx

from fxzero.errors import ConfigError
from fxzero.graph import Lane, Phase, Role, Segment, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import Transfer
from fxzero.passes.base import Context, Fact, Notes, Pass


class Slot(IntEnum):
    """What goes first between two compute nodes: free, then launch, then join."""

    RELEASE = 0
    LAUNCH_GATHER = 1
    REDUCE = 2
    JOIN_GATHER = 3


class Timeline:
    """One segment's compute nodes in order, and what is to be placed between them."""

    def __init__(self, graph: StepGraph, segment: Segment) -> None:
        self.transfers = graph.transfers(segment=segment)
        moved = {node for t in self.transfers for node in _all(t)}
        nodes = [n for n in graph.nodes(segment=segment) if not is_follower(n)]
        self.releases = [n for n in nodes if stamp_of(n).role is Role.RELEASE]
        self.compute = [n for n in nodes if n not in moved and n not in set(self.releases)]
        self.position = {node: i for i, node in enumerate(self.compute)}
        self.start = self._run_starts()
        self.slots: dict[tuple[int, Slot], list[fx.Node]] = defaultdict(list)

    def _run_starts(self) -> list[int]:
        """For each position, where the run of its layer begins; and one past each run's end."""
        starts: list[int] = []
        for i, node in enumerate(self.compute):
            same = i > 0 and stamp_of(self.compute[i - 1]).layer == stamp_of(node).layer
            starts.append(starts[-1] if same else i)
        return starts

    def run_end(self, position: int) -> int:
        """One past the last node of the run that holds `position`."""
        end = position + 1
        while end < len(self.compute) and self.start[end] == self.start[position]:
            end += 1
        return end

    def boundaries(self) -> set[fx.Node]:
        """Compute nodes that begin a run, and everything that is no compute."""
        begins = {self.compute[position] for position in set(self.start)}
        return begins | {node for nodes in self.slots.values() for node in nodes}

    def first_use(self, nodes: list[fx.Node]) -> int:
        """The position of the first compute node that reads one of `nodes`."""
        users = (self.position.get(u) for n in nodes for u in n.users)
        return min((p for p in users if p is not None), default=len(self.compute))

    def last_source(self, nodes: list[fx.Node]) -> int:
        """One past the position of the last compute node that makes one of `nodes`."""
        ends = [0]
        for node in nodes:
            if node in self.position:
                ends.append(self.position[node] + 1)
            elif node.op == "call_function" and is_follower(node):
                ends.append(self.last_source(node.all_input_nodes))
        return max(ends)

    def place(self, position: int, slot: Slot, nodes: list[fx.Node]) -> None:
        """Put nodes before the compute node at `position`."""
        self.slots[position, slot] += nodes

    def order(self) -> list[fx.Node]:
        """All nodes in their new order."""
        out: list[fx.Node] = []
        for i in range(len(self.compute) + 1):
            for slot in Slot:
                out += self.slots.get((i, slot), [])
            if i < len(self.compute):
                out.append(self.compute[i])
        return out


def is_follower(node: fx.Node) -> bool:
    """Whether a node runs as soon as it can, between two runs of compute."""
    stamp = stamp_of(node)
    return stamp.phase is Phase.OPTIMIZER or stamp.role is Role.ACCUMULATE


def with_followers(
    order: list[fx.Node], followers: list[fx.Node], boundaries: set[fx.Node]
) -> list[fx.Node]:
    """Put each follower where what it reads is there, and what it changes has been read.

    Args:
        boundaries: the nodes of `order` before which there is room.
    """
    missing = {node: _awaited(node) for node in followers}
    waiting: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, needed in missing.items():
        for source in needed:
            waiting[source].append(node)
    rank = {node: i for i, node in enumerate(followers)}
    ready = [rank[node] for node, needed in missing.items() if not needed]
    out: list[fx.Node] = []

    def emit(node: fx.Node) -> None:
        out.append(node)
        for follower in waiting.pop(node, ()):
            missing[follower].discard(node)
            if not missing[follower]:
                heapq.heappush(ready, rank[follower])

    def flush() -> None:
        while ready:
            emit(followers[heapq.heappop(ready)])

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
        for source in node.all_input_nodes:
            if source.op == "placeholder" and stamp_of(source).phase is not Phase.OPTIMIZER:
                needed |= {reader for reader in readers(source) if reader < node}
    return needed - {node}


def readers(source: fx.Node) -> set[fx.Node]:
    """Everything that reads a node's memory: through views, and in collectives until joined."""
    found: set[fx.Node] = set()
    queue = [source]
    while queue:
        for user in queue.pop().users:
            if user in found or user.op == "output":
                continue
            found.add(user)
            if is_view(user) or stamp_of(user).role in (Role.PREPARE, Role.LAUNCH, Role.PART):
                queue.append(user)
    return found


def _all(transfer: Transfer) -> list[fx.Node]:
    return [
        *transfer.prepare,
        transfer.launch,
        *transfer.parts,
        *transfer.waits,
        *transfer.finish,
    ]


def _launch(transfer: Transfer) -> list[fx.Node]:
    return [*transfer.prepare, transfer.launch]


def _join(transfer: Transfer) -> list[fx.Node]:
    return [*transfer.parts, *transfer.waits, *transfer.finish]


def place_gathers(timeline: Timeline, distance: int) -> int:
    """Put waits where their layer begins and launches `distance` buckets before."""
    gathers = [t for t in timeline.transfers if t.stamp.lane is Lane.GATHER]
    waits_at: list[int] = []
    begun: set[str] = set()
    for transfer in gathers:
        use = timeline.first_use(transfer.results)
        # A layer too large for one bucket waits for its later ones where they are used.
        first = transfer.stamp.layer not in begun and use < len(timeline.start)
        begun.add(transfer.stamp.layer)
        waits_at.append(timeline.start[use] if first else use)
    ordered = sorted(range(len(gathers)), key=lambda i: (waits_at[i], i))
    for rank, i in enumerate(ordered):
        launch_at = waits_at[ordered[rank - distance]] if rank >= distance else 0
        timeline.place(launch_at, Slot.LAUNCH_GATHER, _launch(gathers[i]))
        timeline.place(waits_at[i], Slot.JOIN_GATHER, _join(gathers[i]))
    return len(gathers)


def place_reduces(timeline: Timeline, distance: int) -> int:
    """Launch reduces where their layer ends and join each `distance` launches later."""
    reduces = [t for t in timeline.transfers if t.stamp.lane is Lane.REDUCE]
    joined = {node for t in reduces for node in _join(t)}
    first_stage = [t for t in reduces if joined.isdisjoint(_sources(t))]
    # Across replicas: launched as soon as the reduce-scatter inside the group is joined.
    second_stage = {n: t for t in reduces if t not in first_stage for n in _sources(t)}
    launches: list[tuple[int, int, Transfer]] = []
    for i, transfer in enumerate(first_stage):
        made = timeline.last_source(_sources(transfer))
        at = timeline.run_end(made - 1) if made > 0 else 0
        launches.append((min(at, timeline.first_use(transfer.results)), i, transfer))
    in_flight: list[Transfer] = []
    missing = {t.launch: set(_sources(t)) for t in second_stage.values()}

    def join_oldest(at: int) -> None:
        transfer = in_flight.pop(0)
        timeline.place(at, Slot.REDUCE, _join(transfer))
        for node in _join(transfer):
            after = second_stage.get(node)
            if after is None:
                continue
            missing[after.launch].discard(node)
            if not missing[after.launch]:
                timeline.place(at, Slot.REDUCE, _launch(after))
                in_flight.append(after)

    for at, _, transfer in sorted(launches, key=lambda launch: launch[:2]):
        while in_flight and len(in_flight) >= max(distance, 1):
            join_oldest(at)
        timeline.place(at, Slot.REDUCE, _launch(transfer))
        in_flight.append(transfer)
        read_in_graph = timeline.first_use(transfer.results) < len(timeline.compute)
        while in_flight and (distance == 0 or read_in_graph):
            join_oldest(at)
    while in_flight:
        join_oldest(len(timeline.compute))
    return len(reduces)


def _sources(transfer: Transfer) -> list[fx.Node]:
    """What a transfer reads from outside of itself."""
    own = set(transfer.prepare)
    return [n for node in _launch(transfer) for n in node.all_input_nodes if n not in own]


def place_releases(timeline: Timeline) -> None:
    """Put each release where the run of its last reader ends."""
    for release in timeline.releases:
        readers = _readers(release)
        last = max((timeline.position[n] for n in readers if n in timeline.position), default=-1)
        at = timeline.run_end(last) if last >= 0 else len(timeline.compute)
        timeline.place(at, Slot.RELEASE, [release])


def _readers(release: fx.Node) -> set[fx.Node]:
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


@dataclass(frozen=True)
class Prefetch(Pass):
    """Overlap transfers with compute by a fixed distance in buckets."""

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})

    distance: int = 1
    """How many buckets ahead of its use a gather starts; 0 starts it right before."""
    reduce_distance: int = 1
    """How many reduces may be in flight; 0 joins each one at once."""

    def __post_init__(self) -> None:
        for field in ("distance", "reduce_distance"):
            if getattr(self, field) < 0:
                raise ConfigError(f"prefetch.{field}={getattr(self, field)} must be 0 or more")

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        gathers = reduces = 0
        order: list[fx.Node] = []
        boundaries: set[fx.Node] = set()
        for segment in graph.segments():
            timeline = Timeline(graph, segment)
            gathers += place_gathers(timeline, self.distance)
            reduces += place_reduces(timeline, self.reduce_distance)
            place_releases(timeline)
            order += timeline.order()
            boundaries |= timeline.boundaries()
        followers = [node for node in graph.nodes() if is_follower(node)]
        graph.reorder(with_followers(order, followers, boundaries))
        return Notes(gathers=gathers, reduces=reduces, followers=len(followers))
