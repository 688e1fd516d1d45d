"""Give what transfers bring its place in one block of memory, by its known lifetime.

    a = gather([w]); …; release([a])        memory = slab(4096)
    b = gather([v]); …; release([b])    →   a = gather([w], memory, 0); …; vacate([a])
                                            b = gather([v], memory, 0); …; vacate([b])

An allocator learns of each bucket when it comes, and cuts what is free into pieces that fit nothing
else. Which buckets are there at the same time is known before the step runs, so that their places
are laid out once, the largest first, each as low as it fits (what Pisarchyk and Lee 2020 call
greedy by size). Where a fuller slab would lift the step's peak, as buckets are few where most is
held, the slab is as large as the peak allows, and what has no place in it is allocated as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import networkx as nx
import torch
from torch import fx

from fxzero._compat import set_args
from fxzero.cost.model import FixedCosts
from fxzero.graph import Lane, Role, Stamp, StepGraph
from fxzero.graph.slabs import other_bytes, result_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import NotSteadyError, find_loop
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime import coalesced, collectives
from fxzero.runtime.slab import slab, vacate
from fxzero.schedule.simulate import tasks_of
from fxzero.schedule.storage import Storage, Storages, storages_of

_c10d = torch.ops._c10d_functional

INTO: dict[Any, Callable[..., Any]] = {
    collectives.gather: collectives.gather,
    collectives.exchange: collectives.exchange,
    _c10d.all_gather_into_tensor_coalesced.default: coalesced.gather,
    _c10d.reduce_scatter_tensor_coalesced.default: coalesced.reduce_scatter,
}
"""By what launches a transfer, what does so into memory that it is given."""

RELEASE = torch.ops.fxzero.release.default

Span = tuple[int, int]
"""The first and the last of the step's tasks during which something is held."""


@dataclass(frozen=True, eq=False)
class Item:
    """What needs a place."""

    num_bytes: int
    held_bytes: int
    """The same without what aligns its tensors: what it holds where it has no place."""
    spans: tuple[Span, ...]
    """When: several times of what is laid out alike in several micro-steps."""

    def meets(self, other: Item) -> bool:
        """Whether both are there at some time."""
        return any(a <= d and c <= b for a, b in self.spans for c, d in other.spans)

    @property
    def is_apart(self) -> bool:
        """Whether it is there once at a time."""
        spans = sorted(self.spans)
        return all(end < begin for (_, end), (begin, _) in pairwise(spans))


def pack(items: Iterable[Item], capacity: int) -> dict[Item, int]:
    """By item, the byte where its place begins; what the capacity has no room for is left out."""
    placed: dict[Item, int] = {}
    for item in sorted(items, key=lambda one: (-one.num_bytes, one.spans)):
        taken = sorted((at, at + one.num_bytes) for one, at in placed.items() if one.meets(item))
        begin = 0
        for first, end in taken:
            if first - begin >= item.num_bytes:
                break
            begin = max(begin, end)
        if begin + item.num_bytes <= capacity:
            placed[item] = begin
    return placed


def lay_out(items: Iterable[Item], held_bytes: Sequence[int]) -> tuple[dict[Item, int], int]:
    """Places, and the size of a slab that holds them and does not lift the step's peak.

    Args:
        held_bytes: by task, what the step holds where nothing has a place.
    """
    peak = max(held_bytes, default=0)
    items = list(items)
    while items:
        placed = pack(items, peak - _most_beside(items, held_bytes))
        if len(placed) == len(items):
            return placed, max(at + item.num_bytes for item, at in placed.items())
        items = list(placed)  # the others are allocated, which leaves these less room
    return {}, 0


def _most_beside(items: Sequence[Item], held_bytes: Sequence[int]) -> int:
    """The most that is held beside some items from the first one's beginning to the last one's
    end."""
    changes = [0] * (len(held_bytes) + 1)
    for item in items:
        for first, last in item.spans:
            changes[first] += item.held_bytes
            changes[last + 1] -= item.held_bytes
    spans = [span for item in items for span in item.spans]
    window = slice(min(first for first, _ in spans), max(last for _, last in spans) + 1)
    beside = [held - own for held, own in zip(held_bytes, accumulate(changes), strict=False)]
    return max(beside[window])


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a launch needs places for, or several launches that are laid out alike."""

    launches: tuple[fx.Node, ...]
    storages: tuple[Storage, ...]
    """What they bring."""
    results: Item
    others: Item | None
    """Other ranks' rows of gradients, until they are summed."""

    @property
    def items(self) -> tuple[Item, ...]:
        """All of it."""
        return (self.results,) if self.others is None else (self.results, self.others)


def _joint(group: Iterable[Wanted]) -> Wanted:
    """What some launches need that are laid out alike."""
    every = sorted(group, key=lambda one: one.launches)
    first = every[0]
    spans = [one.results.spans[0] for one in every]
    until = [one.others.spans[0] for one in every if one.others is not None]
    return Wanted(
        tuple(one.launches[0] for one in every),
        tuple(storage for one in every for storage in one.storages),
        replace(first.results, spans=tuple(spans)),
        None if first.others is None else replace(first.others, spans=tuple(until)),
    )


def wanted(graph: StepGraph, storages: Storages) -> list[Wanted]:
    """The launches whose results end within the graph, but for those of a step before."""
    position = {node: i for i, group in enumerate(storages.groups) for node in group}
    found = []
    for transfer in graph.transfers():
        launch = transfer.launch
        if not transfer.of_parameters or launch.target not in INTO:
            continue
        receives = launch.target is collectives.exchange
        brought = tuple(storages.of[transfer.wait if receives else launch])
        if any(storage.stays for storage in brought):
            continue
        begin = position[launch]
        end = max(position[node] for storage in brought for node in storage.until())
        held = sum(storage.num_bytes for storage in brought)
        results = Item(result_bytes(launch), held, ((begin, end),))
        others = None
        if receives and other_bytes(launch):
            joined = position[transfer.wait]
            rows = (transfer.record.size - 2) * held
            others = Item(other_bytes(launch), rows, ((begin, joined),))
        found.append(Wanted((launch,), brought, results, others))
    return found


def alike(graph: StepGraph, storages: Storages, found: list[Wanted]) -> list[Wanted]:
    """Lay out the micro-step that stands for several like the one before, and what this one is
    handed like what it hands on: all of them have places, or none.

    Raises:
        NotSteadyError: it stands for none.
    """
    if graph.steady_runs == 1:
        return found
    by_launch = {one.launches[0]: one for one in found}
    of_storage = {storage: one for one in found for storage in one.storages}

    allocated = object()

    def of(node: fx.Node) -> list[object]:
        """Whose beginning or end a node is, one by one."""
        if stamp_of(node).role is Role.LAUNCH:
            return [by_launch.get(node, allocated)]
        tensors: Any = node.args[0] if node.target is RELEASE else ()
        ended = (storages.of[tensor] for tensor in tensors)
        return [next((of_storage[s] for s in own if s in of_storage), allocated) for own in ended]

    loop = find_loop(graph)
    same = nx.Graph()
    same.add_nodes_from(found)
    for earlier, later in zip(loop.before[-len(loop.body) :], loop.body, strict=True):
        same.add_edges_from(zip(of(earlier), of(later), strict=True))
    groups = nx.connected_components(same)
    made = [_joint(group) for group in groups if allocated not in group]
    return [one for one in made if all(item.is_apart for item in one.items)]


def place(graph: StepGraph, chosen: Mapping[Wanted, tuple[int, int]], size: int) -> None:
    """Make the slab, and let launches have their places in it.

    Args:
        chosen: where the results' and the others' places begin.
    """
    launches = {launch: offsets for one, offsets in chosen.items() for launch in one.launches}
    first = min(launches)
    stamp = Stamp(stamp_of(first).phase, lane=Lane.GATHER, role=Role.SLAB, made_by="slab")
    with graph.graph.inserting_before(first):
        memory = graph.call(slab, (size, graph.device), stamp=stamp, name="slab")
    for launch, (results, others) in launches.items():
        receives = launch.target is collectives.exchange
        if INTO[launch.target] is not launch.target:
            (joined,) = (user for user in launch.users if stamp_of(user).role is Role.WAIT)
            joined.target = coalesced.join
        launch.target = INTO[launch.target]
        set_args(launch, (*launch.args, memory, (results, others) if receives else results))


def leave(graph: StepGraph, storages: Storages, placed: set[Storage]) -> None:
    """Let what has a place be left where it would be released, or freed once it was sent."""

    def has_place(tensor: fx.Node) -> bool:
        return not placed.isdisjoint(storages.of.get(tensor, ()))

    for launch in graph.nodes(role=Role.LAUNCH):
        if launch.target is collectives.exchange:
            sent, size, group, own, *rest = launch.args
            assert isinstance(sent, (list, tuple))
            assert isinstance(own, (list, tuple))
            kept = [flag and not has_place(one) for one, flag in zip(sent, own, strict=True)]
            set_args(launch, (sent, size, group, kept, *rest))
    for node in graph.nodes(role=Role.RELEASE):
        if node.target is not RELEASE:
            continue
        tensors: Any = node.args[0]
        left = [tensor for tensor in tensors if has_place(tensor)]
        if not left:
            continue
        stamp = stamp_of(node).but(made_by="slab")
        with graph.graph.inserting_before(node), graph.made_for(node):
            graph.call(vacate, (left,), stamp=stamp, name=f"{node.name}_place", value=())
        if len(left) == len(tensors):
            graph.graph.erase_node(node)
        else:
            set_args(node, ([tensor for tensor in tensors if tensor not in left],))


@dataclass(frozen=True)
class Slab(Pass):
    """Lay out what transfers bring."""

    name: ClassVar[str] = "slab"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT, Fact.LOWERED})

    enabled: bool = False
    """Let gathered parameters and reduced gradients have their places in one block of memory, by
    their known lifetimes, instead of asking the allocator for each bucket. On CPU it holds neither
    more nor less; it is for devices whose allocator's memory falls to pieces."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        storages = storages_of(graph, fuses=ctx.fuses)
        try:
            found = alike(graph, storages, wanted(graph, storages))
        except NotSteadyError:
            return Notes()  # all micro-steps will come, in another graph
        memory = tasks_of(graph, FREE, fuses=ctx.fuses).memory()
        held_bytes = [num_bytes for _, num_bytes in memory.curve]
        placed, size = lay_out([item for one in found for item in one.items], held_bytes)
        chosen = {
            one: (placed[one.results], placed[one.others] if one.others is not None else 0)
            for one in found
            if all(item in placed for item in one.items)
        }
        if not chosen:
            if graph.loss is not None:
                ctx.warnings.append(f"{self} has no effect: {_why_nothing(found)}")
            return Notes(placed=0)
        place(graph, chosen, size)
        leave(graph, storages, {storage for one in chosen for storage in one.storages})
        return Notes(placed=sum(len(one.launches) for one in chosen), of=len(found), bytes=size)


def _why_nothing(found: Sequence[Wanted]) -> str:
    if not found:
        return "nothing is gathered or scattered that ends within the step"
    return (
        f"of {len(found)} transfers none has room beside what the step holds at its peak, which a "
        "slab would lift"
    )


FREE = FixedCosts(0.0, latency_us=0.0)
"""What is held does not depend on what anything takes."""
