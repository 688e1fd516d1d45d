"""What must hold of a slab: what `verify` asks of transfers that have their places in one.

    memory = slab(4096)
    a = gather([w], memory, 0);  …reads of a…  vacate([a])
    b = gather([v], memory, 0)                  not before nothing reads a

A place is taken from a launch to the last node that reads what arrives there: through views,
through regions that hand on what they were given, and in transfers that sum in place until they
are joined.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxzero.graph.aliases import is_view
from fxzero.graph.belongings import Finding
from fxzero.graph.lanes import ALIGNMENT, aligned
from fxzero.graph.operators import num_bytes, tensor_bytes, writes_memory
from fxzero.graph.stamps import Role, has_stamp, stamp_of
from fxzero.graph.step_graph import StepGraph, sent_by
from fxzero.transfer import TransferKind


def slab_of(launch: fx.Node) -> fx.Node | None:
    """The slab in which a launch has its places; None if it has none."""
    for node in reversed(launch.args):
        if isinstance(node, fx.Node) and has_stamp(node) and stamp_of(node).role is Role.SLAB:
            return node
    return None


def result_bytes(launch: fx.Node) -> int:
    """Bytes of the places of what a launch brings: full tensors, or mean gradients."""
    return sum(aligned(tensor_bytes(value)) for value in launch.meta["val"])


def other_bytes(launch: fx.Node) -> int:
    """Bytes of the places of what an exchange receives beside, until its wait: other ranks' rows of
    gradients."""
    record = stamp_of(launch).transfer
    assert record is not None
    return (record.size - 2) * result_bytes(launch)


Launches = frozenset[fx.Node]

_NONE: Launches = frozenset()


@dataclass
class Taken:
    """A place in a slab, and how long it is taken."""

    begin: int
    """Its first byte."""
    end: int
    launch: fx.Node
    until: fx.Node
    """The last node that reads it."""


def wrong_slabs(graph: StepGraph) -> Iterator[Finding]:
    """Places that are given again before their last reader, or that are not in the slab."""
    for memory in graph.nodes(role=Role.SLAB):
        taken = places_in(memory)
        for place in taken:
            if place.begin < 0 or place.begin % ALIGNMENT or place.end > num_bytes(memory):
                yield Finding(
                    place.launch,
                    f"{place.launch.name} has its place at bytes {place.begin} to {place.end} of "
                    f"{memory.name}, which has {num_bytes(memory)}",
                    f"Begin at multiples of {ALIGNMENT} in a slab that has room for all.",
                )
        yield from _given_twice(memory, taken)
        yield from _freed(memory)


def _given_twice(memory: fx.Node, taken: list[Taken]) -> Iterator[Finding]:
    taken.sort(key=lambda place: place.begin)
    for i, one in enumerate(taken):
        for other in taken[i + 1 :]:
            if other.begin >= one.end:
                break
            first, second = (one, other) if one.launch < other.launch else (other, one)
            if second.launch < first.until or first.launch is second.launch:
                yield Finding(
                    second.launch,
                    f"{second.launch.name} begins at byte {second.begin} of {memory.name}, where "
                    f"{first.launch.name} has bytes {first.begin} to {first.end}, which "
                    f"{first.until.name} is still to read",
                    "Give every transfer a place of its own until its last reader.",
                )


def _freed(memory: fx.Node) -> Iterator[Finding]:
    """Nothing ends the memory of a slab as if it were a tensor's own."""
    for node, _ in _readers(memory):
        if node.op == "call_function" and "fxzero.release" in str(node.target):
            yield Finding(
                node,
                f"{node.name} frees the memory of {memory.name}, in which others have their places",
                "Leave places by fxzero.runtime.slab.vacate.",
            )


def places_in(memory: fx.Node) -> list[Taken]:
    """Every place that is given in a slab, and its last reader."""
    last: dict[fx.Node, fx.Node] = {}
    for node, launches in _readers(memory):
        for launch in launches:
            last[launch] = node
    found: list[Taken] = []
    for launch in memory.users:
        offsets = launch.args[-1]
        begin, *others = offsets if isinstance(offsets, (list, tuple)) else (offsets,)
        assert isinstance(begin, int)
        found.append(Taken(begin, begin + result_bytes(launch), launch, last.get(launch, launch)))
        for start in others if other_bytes(launch) else ():
            assert isinstance(start, int)
            joined = next(u for u in launch.users if stamp_of(u).role is Role.WAIT)
            found.append(Taken(start, start + other_bytes(launch), launch, joined))
    return found


def _readers(memory: fx.Node) -> Iterator[tuple[fx.Node, Launches]]:
    """Every node that reads what lies in a slab, in order, and the launches that have brought it
    there."""
    holds: dict[fx.Node, list[Launches]] = {}
    """By node, one by one, the launches in whose places its tensors lie."""
    sent: dict[fx.Node, Launches] = {}
    """By node, those in whose places lies what is on its way till then."""
    node: fx.Node | None = min(memory.users, default=None)
    while node is not None and node.op != "root":
        read = _NONE.union(*(part for n in node.all_input_nodes for part in holds.get(n, ())))
        if node in memory.users:
            arriving = frozenset({node})
            holds[node] = [arriving] * len(sent_by(node))
            read |= arriving
        elif read:
            holds[node] = list(_handed_on(node, holds))
        if read and node.op != "output" and stamp_of(node).role is Role.LAUNCH:
            ends = (Role.WAIT, Role.RELEASE)  # a copy to the host has landed, whoever waits for it
            sent.update({user: read for user in node.users if stamp_of(user).role in ends})
        read |= sent.get(node, _NONE)
        if read:
            yield node, read
        node = node.next


def _handed_on(node: fx.Node, holds: dict[fx.Node, list[Launches]]) -> Iterator[Launches]:
    """The launches in whose places the tensors lie that a node returns."""
    if node.op == "output":
        return
    first = node.all_input_nodes[0]
    structure = getattr(node.target, "structure", None)
    if structure is not None:  # a region: what it returns of what it was given
        for origin in structure.roots:
            given = node.args[-1 - origin] if origin < 0 else None
            yield _joint(holds.get(given)) if isinstance(given, fx.Node) else _NONE
    elif node.target is operator.getitem:
        own, index = holds.get(first, [_NONE]), node.args[1]
        assert isinstance(index, int)
        yield own[index] if len(own) > 1 else own[0]
    elif stamp_of(node).role is Role.WAIT:
        yield from holds.get(first, ())
    elif stamp_of(node).role is Role.LAUNCH:
        record = stamp_of(node).transfer
        if record is not None and record.kind is TransferKind.ALL_REDUCE:  # sums in place
            yield from (_joint(holds.get(tensor)) for tensor in sent_by(node))
    elif is_view(node) or writes_memory(node):
        yield _joint(holds.get(first))


def _joint(launches: list[Launches] | None) -> Launches:
    return _NONE.union(*(launches or ()))
