"""The storages of a step graph: which node brings each to life, what it is for, who ends it.

A storage begins where the node that owns it runs and ends with the last node that reads it,
through views too; a release ends it earlier. A collective reads what it sends until its wait.
What counts besides the values of nodes:

    gather       the full tensors, from the launch on
    slab         all of it, from the first launch that has a place in it to the last reader
    exchange     on gloo, the other ranks' rows, from the launch to the wait; what was sent until
                 then
    region       its temporaries while it runs: see `fxzero.cost.region_memory`
    operator     what it says that it allocates: see `fxzero.cost.workspace`
    own step     of an optimizer without a fused kernel: its state, and what it makes meanwhile;
                 nothing, and it is said, where that cannot be found out
    inputs       parameters, optimizer state and the batch live throughout; so do parameters that
                 the graph does not read, where it was told of them

Caching allocators, code and library buffers are not counted.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

from torch import fx

from fxzero._compat import OpOverload
from fxzero.cost.own_step import memory_of_own_step
from fxzero.cost.region_memory import piece_bytes
from fxzero.cost.workspace import workspace_bytes
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.lanes import aligned
from fxzero.graph.launch import IN_PLACE
from fxzero.graph.operators import num_bytes, tensor_bytes, writes_memory
from fxzero.graph.slabs import slab_of
from fxzero.graph.stamps import BESIDE_COMPUTE, stamp_of
from fxzero.graph.step_graph import sent_by
from fxzero.graph.streamed_states import overwritten_by
from fxzero.regions.cutout import PIECE, Cutout, cut_out, end_of_run, is_lowerable, runs
from fxzero.regions.region import Region
from fxzero.runtime import collectives
from fxzero.runtime.ahead import Take
from fxzero.runtime.slab import vacate
from fxzero.runtime.updates import OwnStep
from fxzero.transfer import Pool, Transfer


class Kind(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    INPUTS = "inputs"
    GATHERED = "gathered"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"


@dataclass(eq=False)
class Storage:
    """Bytes with a beginning and, mostly, an end."""

    name: str
    """The node that owns it."""
    num_bytes: int
    kind: Kind
    begin: fx.Node | None
    """What brings it to life; None of an input."""
    readers: dict[fx.Node, None] = field(default_factory=dict)
    """Everything that reads it; it ends with the last one."""
    ended_by: fx.Node | None = None
    """What ends it whoever else has read it: a release, or the join of an exchange."""
    stays: bool = False
    """Whether it outlives the graph: an output, or an input."""
    gathered: bool = False
    """Whether a transfer brings it for as long as it is needed, and no longer: at stage 3."""
    sent: bool = False
    """Whether a transfer of gradients takes it away."""
    pool: Pool = Pool.DEVICE

    @property
    def of_transfer(self) -> bool:
        """Whether a transfer holds it: a gathered parameter that ends within the step, or a
        gradient that is still to be reduced."""
        return (self.gathered and not self.stays) or (self.sent and self.begin is not None)

    def until(self) -> tuple[fx.Node, ...]:
        """The nodes with the last of which it ends; none if it stays."""
        if self.ended_by is not None:
            return (self.ended_by,)
        if self.stays:
            return ()
        assert self.begin is not None
        return (self.begin, *self.readers)


@dataclass
class Storages:
    """All storages of a graph, and what runs need for the moment."""

    groups: list[list[fx.Node]]
    """What runs as one: regions that are, or will be, and every other node alone."""
    every: list[Storage] = field(default_factory=list)
    temporary: dict[fx.Node, int] = field(default_factory=dict)
    """By the first node of a group, the bytes that it needs beside its results while it runs."""
    of: dict[fx.Node, list[Storage]] = field(default_factory=dict)
    """By node, what its value is in: of a list, one for each tensor."""
    left_out: list[str] = field(default_factory=list)
    """Own steps of optimizers that could not be rehearsed, and so hold more than is counted."""


def regions_of(graph: StepGraph) -> list[Cutout]:
    """What will be regions of a graph, where runs of compute are compiled."""
    nodes = [n for n in graph.graph.nodes if n.op in ("call_function", "get_attr")]
    groups = _groups(nodes, graph.loss is None)
    computes = (g for g in groups if is_lowerable(g[0]) and not all(map(is_view, g)))
    found = (cut_out(graph.pieces, run, "memory") for run in computes)
    return [cutout for cutout in found if cutout.outputs]


def storages_of(graph: StepGraph, *, fuses: bool) -> Storages:
    """Find a graph's storages.

    Args:
        graph: lowered or not.
        fuses: whether runs of compute are, or will be, compiled regions.
    """
    return _Walk(graph, fuses).run()


class _Walk:
    def __init__(self, graph: StepGraph, fuses: bool) -> None:
        self.graph = graph
        nodes = [n for n in graph.graph.nodes if n.op in ("call_function", "get_attr")]
        is_cut = graph.loss is None
        self.found = Storages(_groups(nodes, is_cut) if fuses else [[node] for node in nodes])
        self.storage = self.found.of
        self.parts: dict[fx.Node, list[list[Storage]]] = {}
        """Of a region: the storages of each of its outputs."""

    def run(self) -> Storages:
        self._inputs()
        for group in self.found.groups:
            if len(group) > 1:
                self._run_group(group)
            else:
                self._run_node(group[0])
            for node in group:
                if node.target is operator.getitem and node in self.storage:
                    # It picks one of a list's tensors, and reads no other one's memory.
                    for storage in self.storage[node]:
                        storage.readers[node] = None
                    continue
                for source in node.all_input_nodes:
                    self._read(source, node)
        for storage in self.found.every:
            # Kept for a backward that runs apart: `release_saved` ends it with its reader's run.
            if storage.gathered and storage.ended_by is None and storage.readers:
                storage.readers[end_of_run(max(storage.readers))] = None
        for source in self.graph.output.all_input_nodes:
            for storage in self.storage.get(source, ()):
                storage.stays = True
        return self.found

    def _read(self, source: fx.Node, node: fx.Node) -> None:
        """Note who reads a value; a launch does until its wait."""
        stamp = stamp_of(node) if node.op == "call_function" else None
        for storage in self.storage.get(source, ()):
            storage.readers[node] = None
            if stamp is not None and stamp.role is Role.LAUNCH:
                storage.readers |= dict.fromkeys(_waits_of(node))
                storage.sent |= stamp.lane is Lane.REDUCE and bool(stamp.params)

    def _make(self, node: fx.Node, amount: int, kind: Kind, begin: fx.Node | None) -> Storage:
        made = Storage(node.name, amount, kind, begin)
        self.found.every.append(made)
        return made

    def _new(self, node: fx.Node, amount: int, kind: Kind) -> Storage:
        return self._make(node, amount, kind, node)

    def _kind_of(self, node: fx.Node) -> Kind:
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

    def _inputs(self) -> None:
        """What is there before the first node runs."""
        for node in self.graph.graph.find_nodes(op="placeholder"):
            source = node.meta.get("fxzero_source")
            if node in self.graph.inputs:
                kind = Kind.PARAMETERS
            elif source is not None and source[0] == "state":
                kind = Kind.OPTIMIZER_STATE
            elif source is not None and source[0] == "staging":
                kind = Kind.GRADIENTS
            elif source is not None and source[0] == "disk_buffers":
                kind = Kind.WORKSPACE
            else:
                kind = Kind.INPUTS
            pool = stamp_of(node).pool
            amount = num_bytes(node)
            storage = self._make(
                node, amount if pool is Pool.DEVICE else aligned(amount), kind, None
            )
            storage.stays, storage.pool = True, pool
            self.storage[node] = [storage]
        for spec in self.graph.unread:
            amount = math.prod(spec.local_shape) * spec.dtype.itemsize
            pool = Pool.DEVICE if spec.device is None else Pool.HOST
            held = Storage(spec.name, amount, Kind.PARAMETERS, None, stays=True, pool=pool)
            self.found.every.append(held)

    def _alias(self, node: fx.Node, source: fx.Node) -> None:
        self.storage[node] = list(self.storage.get(source, []))

    def _run_node(self, node: fx.Node) -> None:
        stamp = stamp_of(node) if node.op == "call_function" else None
        if stamp is not None and stamp.lane in BESIDE_COMPUTE:
            self._beside_compute(node)
        elif stamp is not None and stamp.role is Role.RELEASE:
            for source in node.all_input_nodes if node.target is not vacate else ():
                for storage in self.storage.get(source, ()):
                    storage.ended_by = node
        elif stamp is not None and stamp.role is Role.LAUNCH:
            self._launch(node)
        elif stamp is not None and stamp.role is Role.WAIT:
            self._wait(node)
        elif isinstance(node.target, OwnStep):
            self._own_step(node)
        elif isinstance(node.target, Region):
            self._region(node)
        elif node.target is operator.getitem:
            self._part(node)
        elif is_view(node) or _writes_first(node):
            self._alias(node, node.all_input_nodes[0])
        else:
            values = node.meta.get("val")
            several = values if isinstance(values, (list, tuple)) else (values,)
            kind = self._kind_of(node) if stamp is not None else Kind.INPUTS
            made = self.storage[node] = [self._new(node, tensor_bytes(v), kind) for v in several]
            if stamp is not None and stamp.role is Role.SLAB:
                made[0].gathered = True
            self.found.temporary[node] = workspace_bytes(node)

    def _run_group(self, group: list[fx.Node]) -> None:
        """A run that will be one region: its outputs, and what it needs meanwhile."""
        inside = set(group)
        first = group[0]
        outputs = [n for n in group if any(user not in inside for user in n.users)]
        before = len(self.found.every)

        of_owner: dict[fx.Node, Storage] = {}

        def make(node: fx.Node) -> None:
            owner = node
            while is_view(owner) and owner.all_input_nodes[0] in inside:
                owner = owner.all_input_nodes[0]
            if owner not in of_owner:  # several views of one value look at one memory
                amount = max(num_bytes(owner), num_bytes(node))
                of_owner[owner] = self._make(node, amount, self._kind_of(node), begin=first)
            self.storage[node] = [of_owner[owner]]

        for node in group:
            if node.target is operator.getitem and node.all_input_nodes[0] in inside:
                continue
            if is_view(node) and node.all_input_nodes[0] in self.storage:
                self._alias(node, node.all_input_nodes[0])
                continue
            if isinstance(node.meta.get("val"), (list, tuple)):
                for user in node.users:
                    if user.target is operator.getitem and any(u not in inside for u in user.users):
                        make(user)
            elif node in outputs:
                make(node)
        for node in outputs:
            if node not in self.storage:
                make(node)
        made = sum(storage.num_bytes for storage in self.found.every[before:])
        held = piece_bytes(cut_out(self.graph.pieces, group, "memory").piece)
        self.found.temporary[first] = max(held - made, 0)

    def _region(self, node: fx.Node) -> None:
        region = node.target
        assert isinstance(region, Region)
        values: Sequence[Any] = node.meta["val"]
        storages: list[list[Storage]] = []
        by_root: dict[int, list[Storage]] = {}
        parts = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        made = 0
        for position, (value, root) in enumerate(zip(values, region.structure.roots, strict=True)):
            if root < 0:
                source = node.args[-1 - root]
                storages.append(self.storage.get(source, []))  # type: ignore[arg-type]
                continue
            if root not in by_root:
                part = parts.get(position)
                kind = self._kind_of(part) if part is not None else Kind.WORKSPACE
                sizes = region.structure.root_bytes
                amount = sizes[position] if sizes else tensor_bytes(value)
                by_root[root] = [self._make(part or node, amount, kind, begin=node)]
                made += amount
            storages.append(by_root[root])
        self.parts[node] = storages
        self.storage[node] = [s for group in by_root.values() for s in group]
        self.found.temporary[node] = max(piece_bytes(node.meta[PIECE]) - made, 0)

    def _own_step(self, node: fx.Node) -> None:
        """An optimizer's own step, whose state is no input of the graph."""
        self.storage[node] = []
        memory = memory_of_own_step(node)
        if memory is None:
            self.found.left_out.append(repr(node.target))
            return
        state = self._make(node, memory.state_bytes, Kind.OPTIMIZER_STATE, None)
        state.stays = True
        self.found.temporary[node] = memory.workspace_bytes

    def _part(self, node: fx.Node) -> None:
        source, position = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(position, int)
        storages = self.storage.get(source, [])
        if source in self.parts:
            storages = self.parts[source][position]
        elif not is_view(source):  # parts of a split: all of them look at one memory
            storages = storages[position : position + 1]
        self.storage[node] = list(storages)

    def _launch(self, node: fx.Node) -> None:
        """What a collective fills, and what it keeps of what it sends."""
        sent = sent_by(node)
        memory = slab_of(node)
        if memory is not None:
            self.storage[node] = self.storage[memory] * len(sent)
        elif node.target is collectives.exchange:
            record = stamp_of(node).transfer
            assert record is not None
            size = record.size
            self.storage[node] = [
                self._new(node, num_bytes(n) - num_bytes(n) // size, Kind.GRADIENTS) for n in sent
            ]
        elif node.target is collectives.all_reduce or IN_PLACE in node.meta:
            own = node.meta.get(IN_PLACE) or node.args[2]
            assert isinstance(own, (list, tuple))
            self.storage[node] = [
                storage
                for source, is_own in zip(sent, own, strict=True)
                for storage in (
                    self.storage.get(source, ())
                    if is_own
                    else [self._new(node, num_bytes(source), Kind.GRADIENTS)]
                )
            ]
        else:
            gathers = stamp_of(node).lane is Lane.GATHER
            kind = Kind.GATHERED if gathers else Kind.GRADIENTS
            value = node.meta["val"]
            values = value if isinstance(value, (list, tuple)) else [value]
            made = self.storage[node] = [self._new(node, tensor_bytes(v), kind) for v in values]
            for storage, key in zip(made, stamp_of(node).params if gathers else (), strict=False):
                storage.gathered = self.graph.specs[key].zero == 3
            for storage in made if gathers and stamp_of(node).again else ():
                storage.gathered = True

    def _beside_compute(self, node: fx.Node) -> None:
        """Copies between pools, and updates on the host."""
        stamp = stamp_of(node)
        if stamp.role is Role.PART:
            self._part(node)
        elif stamp.role is Role.RELEASE:  # what was copied from the device has been read now
            for copy in node.all_input_nodes:
                for source in sent_by(copy):
                    for storage in self.storage.get(source, ()):
                        storage.readers[node] = None
        elif stamp.role is Role.WAIT:
            self._alias(node, node.all_input_nodes[0])
        elif stamp.role is Role.LAUNCH and _record_of(stamp).target is Pool.DEVICE:
            stays = isinstance(node.target, Take)  # what the step before has left here
            begin = None if stays else node
            values = node.meta["val"]
            made = self.storage[node] = [
                self._make(node, tensor_bytes(value), self._kind_of_copy(source), begin)
                for value, source in zip(values, sent_by(node), strict=True)
            ]
            for storage in made:
                storage.stays = stays
        elif overwritten_by(node):
            self.storage[node] = []  # what is there lives anyway
        elif stamp.role is Role.LAUNCH and len(node.args) == 2:  # a gradient for the loop
            made = self.storage[node] = [
                self._new(node, tensor_bytes(value), Kind.GRADIENTS) for value in node.meta["val"]
            ]
            for storage in made:
                storage.pool = Pool.HOST
        elif stamp.role is Role.LAUNCH:
            staging = node.args[2]
            assert isinstance(staging, fx.Node)
            self.storage[node] = self.storage[staging] * len(node.meta["val"])

    def _kind_of_copy(self, source: fx.Node) -> Kind:
        """What a copy of something that lives on the host, or was moved there, is for."""
        if source.op != "placeholder":
            return Kind.ACTIVATIONS
        (storage,) = self.storage[source]
        return storage.kind

    def _wait(self, node: fx.Node) -> None:
        (launch, *_) = node.all_input_nodes
        if node.target is not collectives.join_exchange:
            self._alias(node, launch)
            return
        sent, _, _, own, *_ = launch.args
        assert isinstance(sent, (list, tuple))
        assert isinstance(own, (list, tuple))
        memory = slab_of(launch)
        # Summed up in what was received, of which one rank's rows are left.
        for received in self.storage[launch] if memory is None else ():
            received.ended_by = node
        for source, is_own in zip(sent, own, strict=True):
            for storage in self.storage.get(source, ()) if is_own else ():
                storage.ended_by = node
        if memory is not None:
            self._alias(node, launch)
            return
        self.storage[node] = [
            self._new(node, tensor_bytes(v), Kind.GRADIENTS) for v in node.meta["val"]
        ]


def _record_of(launch: Stamp) -> Transfer:
    assert launch.transfer is not None
    return launch.transfer


def _waits_of(launch: fx.Node) -> list[fx.Node]:
    return [user for user in launch.users if stamp_of(user).role is Role.WAIT]


def _writes_first(node: fx.Node) -> bool:
    """Whether a node returns its first input, changed."""
    return writes_memory(node) and _returns_an_input(node.target) and bool(node.all_input_nodes)


@functools.cache
def _returns_an_input(target: OpOverload) -> bool:
    returns = target._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def _groups(nodes: Sequence[fx.Node], is_cut: bool) -> list[list[fx.Node]]:
    """Runs that will be regions, and every other node alone, in order.

    Args:
        is_cut: whether forward and backward will be run apart, so that no region is of both.
    """
    groups: list[list[fx.Node]] = []
    found = runs(nodes)
    if is_cut:
        found = [
            list(part)
            for run in found
            for _, part in groupby(run, key=lambda node: stamp_of(node).phase)
        ]
    run_of = {node: run for run in map(tuple, found) for node in run}
    for node in nodes:
        run = run_of.get(node)
        if run is None:
            groups.append([node])
        elif run[0] is node:
            groups.append(list(run))
    return groups
