"""The memory of a scheduled graph, by the life of each storage.

Walks the graph in launch order. A storage begins where the node that owns it runs and ends
after the last node that reads it, through views too; a release ends it earlier. What counts
besides the values of nodes:

    gather       the full tensors, from the launch on
    exchange     on gloo, the other ranks' rows, from the launch to the wait; what was sent until
                 then
    region       its temporaries while it runs: buffers that fusion leaves in memory
    operator     what it says that it allocates: see `fxzero.cost.workspace`
    inputs       parameters, optimizer state and the batch live throughout

Caching allocators, code and library buffers are not counted.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from fxzero.cost.analytic import flops_of
from fxzero.cost.workspace import workspace_bytes
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import num_bytes, tensor_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.runtime import collectives
from fxzero.runtime.cutout import runs
from fxzero.runtime.regions import Region


class Kind(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    INPUTS = "inputs"
    GATHERED = "gathered"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"


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

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by what they are for."""
        found: dict[str, int] = defaultdict(int)
        for item in self.alive:
            found[item.kind.value] += item.num_bytes
        return dict(found)


@dataclass
class _Storage:
    name: str
    num_bytes: int
    kind: Kind
    readers: int = 0
    """Uses that are still to come."""
    resident: bool = False


class _Walk:
    def __init__(self, graph: StepGraph, *, fuses: bool) -> None:
        self.graph = graph
        self.fuses = fuses
        self.storage: dict[fx.Node, list[_Storage]] = {}
        self.alive: dict[int, _Storage] = {}
        self.now = 0
        self.peak = 0
        self.peak_node = ""
        self.at_peak: list[_Storage] = []
        self.curve: list[tuple[str, int]] = []

    def make(self, node: fx.Node, amount: int, kind: Kind) -> _Storage:
        made = _Storage(node.name, amount, kind)
        self.alive[id(made)] = made
        self.now += amount
        return made

    def end(self, storage: _Storage) -> None:
        if id(storage) in self.alive:
            del self.alive[id(storage)]
            self.now -= storage.num_bytes

    def look(self, name: str, extra: int = 0) -> None:
        """Note how much is held now, and `extra` for the moment."""
        held = self.now + extra
        self.curve.append((name, held))
        if held > self.peak:
            self.peak, self.peak_node = held, name
            self.at_peak = list(self.alive.values())
            if extra:
                self.at_peak.append(_Storage(name, extra, Kind.WORKSPACE))

    def kind_of(self, node: fx.Node) -> Kind:
        stamp = stamp_of(node)
        if stamp.lane is Lane.GATHER:
            return Kind.GATHERED
        if stamp.lane is Lane.REDUCE or any(
            user.op == "call_function" and stamp_of(user).lane is Lane.REDUCE for user in node.users
        ):
            return Kind.GRADIENTS
        if stamp.phase is Phase.FORWARD:
            return Kind.ACTIVATIONS
        return Kind.WORKSPACE

    def inputs(self) -> None:
        """What is there before the first node runs."""
        for node in self.graph.graph.find_nodes(op="placeholder"):
            source = node.meta.get("fxzero_source")
            if node in self.graph.inputs:
                kind = Kind.PARAMETERS
            elif source is not None and source[0] == "state":
                kind = Kind.OPTIMIZER_STATE
            else:
                kind = Kind.INPUTS
            storage = self.make(node, num_bytes(node), kind)
            storage.resident = True
            self.storage[node] = [storage]

    def run(self) -> Memory:
        """Walk the graph."""
        self.inputs()
        resident = self.now
        last_use = _last_uses(self.graph)
        nodes = [n for n in self.graph.graph.nodes if n.op in ("call_function", "get_attr")]
        groups = _groups(nodes) if self.fuses else [[node] for node in nodes]
        for group in groups:
            if len(group) > 1:
                self._run_group(group)
            else:
                self._run_node(group[0])
            for node in group:
                for source in (*node.all_input_nodes, node):
                    if last_use.get(source) is node:
                        self._forget(source, last_use)
        names = [Alive(s.name, s.kind, s.num_bytes) for s in self.at_peak if s.num_bytes]
        names.sort(key=lambda item: (-item.num_bytes, item.name))
        return Memory(self.peak, self.peak_node, resident, tuple(self.curve), tuple(names))

    def _forget(self, node: fx.Node, last_use: dict[fx.Node, fx.Node | None]) -> None:
        """A node's value is not read any more."""
        for storage in self.storage.get(node, ()):
            storage.readers -= 1
            if storage.readers <= 0 and not storage.resident:
                self.end(storage)

    def _own(self, node: fx.Node, storages: list[_Storage]) -> None:
        self.storage[node] = storages
        for storage in storages:
            storage.readers += 1

    def _alias(self, node: fx.Node, source: fx.Node) -> None:
        self._own(node, list(self.storage.get(source, [])))

    def _run_node(self, node: fx.Node) -> None:
        stamp = stamp_of(node) if node.op == "call_function" else None
        if stamp is not None and stamp.role is Role.RELEASE:
            self.look(node.name)
            for source in node.all_input_nodes:
                for storage in self.storage.get(source, ()):
                    self.end(storage)
            self._own(node, [])
            return
        if stamp is not None and stamp.role is Role.LAUNCH:
            self._launch(node)
        elif stamp is not None and stamp.role is Role.WAIT:
            self._wait(node)
        elif isinstance(node.target, Region):
            self._region(node)
        elif node.target is operator.getitem:
            self._part(node)
        elif is_view(node) or _writes_first(node):
            self._alias(node, node.all_input_nodes[0])
        else:
            values = node.meta.get("val")
            count = values if isinstance(values, (list, tuple)) else (values,)
            kind = self.kind_of(node) if node.op == "call_function" else Kind.INPUTS
            self._own(node, [self.make(node, tensor_bytes(value), kind) for value in count])
            self.look(node.name, workspace_bytes(node))
            return
        self.look(node.name)

    def _run_group(self, group: list[fx.Node]) -> None:
        """A run that will be one region: its outputs, and what it needs meanwhile."""
        inside = set(group)
        outputs = [n for n in group if any(user not in inside for user in n.users)]
        before = self.now
        for node in group:
            if is_view(node) and node.target is not operator.getitem:
                base = node.all_input_nodes[0]
                if base in self.storage:
                    self._alias(node, base)
                    continue
            if node.target is operator.getitem and node.all_input_nodes[0] in inside:
                continue
            if node in outputs or any(
                user.target is operator.getitem and user in outputs for user in node.users
            ):
                self._run_outputs(node, inside)
        for node in outputs:
            if node not in self.storage:
                self._own(node, [self.make(node, num_bytes(node), self.kind_of(node))])
        made = self.now - before
        self.look(group[0].name, max(region_bytes(group) - made, 0))

    def _run_outputs(self, node: fx.Node, inside: set[fx.Node]) -> None:
        values = node.meta.get("val")
        if isinstance(values, (list, tuple)):
            for user in node.users:
                if user.target is operator.getitem and any(u not in inside for u in user.users):
                    self._own(user, [self.make(user, num_bytes(user), self.kind_of(user))])
            return
        self._own(node, [self.make(node, num_bytes(node), self.kind_of(node))])

    def _region(self, node: fx.Node) -> None:
        region = node.target
        assert isinstance(region, Region)
        values: Sequence[Any] = node.meta["val"]
        storages: list[list[_Storage]] = []
        by_root: dict[int, list[_Storage]] = {}
        parts = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        made = 0
        for position, (value, root) in enumerate(zip(values, region.structure.roots, strict=True)):
            if root < 0:
                source = node.args[-1 - root]
                storages.append(self.storage.get(source, []))  # type: ignore[arg-type]
                continue
            if root not in by_root:
                part = parts.get(position)
                kind = self.kind_of(part) if part is not None else Kind.WORKSPACE
                by_root[root] = [self.make(part or node, tensor_bytes(value), kind)]
                made += tensor_bytes(value)
            storages.append(by_root[root])
        node.meta["fxzero_parts"] = storages
        self._own(node, [s for group in by_root.values() for s in group])
        self.look(node.name, max(node.meta.get("fxzero_region_bytes", 0) - made, 0))

    def _part(self, node: fx.Node) -> None:
        source, position = node.args
        assert isinstance(source, fx.Node)
        parts = source.meta.get("fxzero_parts")
        if parts is not None:
            self._own(node, list(parts[position]))
            return
        storages = self.storage.get(source, [])
        if is_view(source):
            self._own(node, list(storages))  # a part of a split: all of them look at one memory
            return
        chosen = storages[position : position + 1] if isinstance(position, int) else storages
        self._own(node, list(chosen))

    def _launch(self, node: fx.Node) -> None:
        """What a collective fills, and what it keeps of what it sends."""
        if stamp_of(node).lane is Lane.GATHER:
            waits = _waits(node)
            self._own(node, [self.make(w, num_bytes(w), Kind.GATHERED) for w in waits])
            return
        sent = node.all_input_nodes
        if node.target is collectives.exchange:
            size = node.args[1]
            assert isinstance(size, int)
            full = num_bytes(sent[0])
            received = self.make(node, full - full // size, Kind.GRADIENTS)
            own = [s for n in sent for s in self.storage.get(n, ())]
            self._own(node, [received, *own])
        elif node.target is collectives.all_reduce:
            own = [s for n in sent for s in self.storage.get(n, ())]
            if not node.args[2]:
                own = [self.make(node, num_bytes(sent[0]), Kind.GRADIENTS)]
            self._own(node, own)
        else:
            waits = _waits(node)
            self._own(node, [self.make(w, num_bytes(w), Kind.GRADIENTS) for w in waits])

    def _wait(self, node: fx.Node) -> None:
        (source, *_) = node.all_input_nodes
        if node.target is not collectives.join_exchange:
            self._alias(node, source)
            return
        received, *own = self.storage[source]
        # Summed up in what was received, of which one rank's rows are left.
        self.end(received)
        if source.args[3]:
            for storage in own:
                self.end(storage)
        self._own(node, [self.make(node, num_bytes(node), Kind.GRADIENTS)])


def _waits(launch: fx.Node) -> list[fx.Node]:
    """The waits of a launch, in order of its tensors."""
    found = []
    for user in launch.users:
        if stamp_of(user).role is Role.PART:
            found += [u for u in user.users if stamp_of(u).role is Role.WAIT]
        elif stamp_of(user).role is Role.WAIT:
            found.append(user)
    return found


def _writes_first(node: fx.Node) -> bool:
    """Whether a node returns its first input, changed."""
    schema = getattr(node.target, "_schema", None)
    return bool(
        schema is not None
        and schema.is_mutable
        and schema.returns
        and schema.returns[0].alias_info is not None
        and node.all_input_nodes
    )


def _last_uses(graph: StepGraph) -> dict[fx.Node, fx.Node | None]:
    """For each node, the last node that reads it, itself if none does; None for outputs."""
    last: dict[fx.Node, fx.Node | None] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            for value in node.all_input_nodes:
                last[value] = None
            continue
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    return last


def _groups(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Runs that will be regions, and every other node alone, in order."""
    groups: list[list[fx.Node]] = []
    run_of = {node: run for run in map(tuple, runs(nodes)) for node in run}
    for node in nodes:
        run = run_of.get(node)
        if run is None:
            groups.append([node])
        elif run[0] is node:
            groups.append(list(run))
    return groups


_REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "argmax", "any", "all"}


def fuses_into_readers(node: fx.Node) -> bool:
    """Whether a compiler computes a node where it is read instead of keeping it in memory."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or flops_of(node):
        return False
    name = target.overloadpacket.__name__
    made = {"full", "iota", "arange", "scalar_tensor", "zeros", "ones", "empty", "expand"}
    return torch.Tag.pointwise in target.tags or name in _REDUCTIONS | made or name in _MOVES


_MOVES = {"clone", "_to_copy", "convert_element_type", "cat", "constant_pad_nd", "slice_scatter"}


def region_bytes(run: Sequence[fx.Node]) -> int:
    """The most bytes that a region holds, its outputs included and its inputs not."""
    inside = set(run)
    roots: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in run:
        looks = is_view(node) or node.target is operator.getitem
        base = node.all_input_nodes[0] if looks and node.all_input_nodes else None
        roots[node] = roots.get(base, base) if base is not None else node
        for source in node.all_input_nodes:
            if not looks:
                readers[roots.get(source, source)].append(node)
    outside = {roots[n] for n in run if any(user not in inside for user in n.users)}
    order = {node: i for i, node in enumerate(run)}

    def in_memory(node: fx.Node) -> bool:
        if node in outside or not fuses_into_readers(node):
            return True
        return any(not fuses_into_readers(reader) for reader in readers[node])

    def last_read(node: fx.Node) -> int:
        last = order[node]
        for reader in readers[node]:
            last = max(last, order[reader] if in_memory(reader) else last_read(reader))
        return last

    held = peak = 0
    ending: dict[int, int] = defaultdict(int)
    for i, node in enumerate(run):
        if roots[node] is node and in_memory(node):
            values = node.meta.get("val")
            several = values if isinstance(values, (list, tuple)) else (values,)
            amount = sum(map(tensor_bytes, several))
            held += amount
            if node not in outside:
                ending[last_read(node)] += amount
        peak = max(peak, held + workspace_bytes(node))
        held -= ending.pop(i, 0)
    return peak


def simulate_memory(graph: StepGraph, *, fuses: bool) -> Memory:
    """Walk a scheduled graph, lowered or not, and say what it holds when.

    Args:
        fuses: whether runs of compute are, or will be, compiled regions.
    """
    return _Walk(graph, fuses=fuses).run()
