"""Lower each run of compute to one callable, compiled once per distinct structure.

    a = mul(x, w); b = add(a, y); gather(…)   →   region = h_0(x, w, y); b = region[0]; gather(…)

A run is broken by transfers and by the end of a layer, so that equal layers give equal
regions, whatever the stage and whatever is overlapped. Views alone are not lowered.
What remains is a flat graph of region calls and transfers: its printed Python is the
schedule.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import torch
from torch import fx

from fxzero._compat import is_symbolic
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import is_random, writes_memory
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime.regions import CACHE, Region, Structure, StructureKey, structure_key


class RegionBackend(StrEnum):
    """What a region becomes."""

    INDUCTOR = "inductor"
    """Fused kernels, by TorchInductor."""
    EAGER = "eager"
    """Torch's own kernels, one operator at a time: nothing is lowered."""


def is_lowerable(node: fx.Node) -> bool:
    """Whether a node may be part of a region."""
    if node.op != "call_function" or stamp_of(node).role is not Role.COMPUTE:
        return False
    if stamp_of(node).phase is Phase.OPTIMIZER or is_random(node):
        return False
    if node.target is operator.getitem and not is_lowerable(node.all_input_nodes[0]):
        return False
    if node.target is not operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
        return False
    if any(source.op == "get_attr" for source in node.all_input_nodes):
        return False
    return not is_symbolic(node.meta.get("val")) and not writes_memory(node)


def settle(graph: StepGraph) -> None:
    """Put parts right behind what they are part of, and symbolic numbers as early as possible."""
    for node in list(graph.nodes(role=Role.COMPUTE)):
        if node.target is operator.getitem:
            source = node.all_input_nodes[0]
            source.append(node)
            set_stamp(node, replace(stamp_of(node), layer=stamp_of(source).layer))
        elif is_symbolic(node.meta.get("val")) and node.all_input_nodes:
            last = max(node.all_input_nodes)
            if last.op != "placeholder":
                last.append(node)
            else:
                first = next(n for n in graph.graph.nodes if n.op != "placeholder")
                if first is not node:
                    first.prepend(node)


def runs(graph: StepGraph) -> list[list[fx.Node]]:
    """Maximal runs of lowerable nodes of one layer that hold more than views."""
    found: list[list[fx.Node]] = [[]]
    for node in graph.graph.nodes:
        if not is_lowerable(node):
            found.append([])
            continue
        if found[-1] and not same_region(found[-1][-1], node):
            found.append([])
        found[-1].append(node)
    return [run for run in found if not all(is_view(n) for n in run)]


def same_region(node: fx.Node, other: fx.Node) -> bool:
    """Whether two lowerable nodes, one after the other, are of one region."""
    mine, theirs = stamp_of(node), stamp_of(other)
    return (mine.layer, mine.micro_step) == (theirs.layer, theirs.micro_step)


@dataclass(frozen=True)
class Cutout:
    """A run of nodes on its way to become a region."""

    name: str
    run: list[fx.Node]
    outputs: list[fx.Node]
    """What others read of it."""
    key: StructureKey

    @property
    def inputs(self) -> list[fx.Node]:
        """What the run reads from outside now: lowering an earlier run replaces some of it."""
        return inputs_of(self.run)

    def module(self) -> fx.GraphModule:
        """A copy of the run as a module of its own."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"input_{i}")
            copies[node].meta["val"] = node.meta["val"]
        for node in self.run:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] for n in self.outputs))
        return fx.GraphModule(torch.nn.Module(), graph, class_name=self.name)


def inputs_of(run: list[fx.Node]) -> list[fx.Node]:
    """The nodes outside of a run that it reads, in order of first use."""
    inside = set(run)
    return list(dict.fromkeys(i for n in run for i in n.all_input_nodes if i not in inside))


def cut_out(graph: StepGraph, run: list[fx.Node], name: str) -> Cutout:
    """Find out what a run gives to others, and which structure it has."""
    inside = set(run)
    outputs = [n for n in run if any(user not in inside for user in n.users)]
    shape_env = getattr(graph.fake_mode, "shape_env", None)
    return Cutout(name, run, outputs, structure_key(inputs_of(run), run, outputs, shape_env))


def lower(graph: StepGraph, cutout: Cutout, structure: Structure) -> None:
    """Replace a run by one call."""
    region = Region(cutout.name, structure)
    last = cutout.run[-1]
    stamp = replace(stamp_of(last), role=Role.REGION, lane=Lane.COMPUTE, made_by="lower_regions")
    with graph.graph.inserting_after(last):
        call = graph.graph.create_node(
            "call_function", region, tuple(cutout.inputs), {}, name=cutout.name
        )
    call.meta["val"] = tuple(n.meta["val"] for n in cutout.outputs)
    set_stamp(call, stamp)
    after = call
    for i, node in enumerate(cutout.outputs):
        with graph.graph.inserting_after(after):
            part = graph.graph.call_function(operator.getitem, (call, i))
        part.meta = dict(node.meta)
        set_stamp(part, replace(stamp, role=Role.PART))
        node.replace_all_uses_with(part)
        after = part
    for node in reversed(cutout.run):
        graph.graph.erase_node(node)


def share_compilation(cutouts: list[Cutout]) -> list[Cutout]:
    """The order in which this process compiles: each one on a host begins elsewhere.

    Inductor's cache on disk is shared, so that what one rank has compiled the next one
    finds there, and ranks on one host compile different regions at the same time.
    """
    distinct = list({c.key: c for c in cutouts}.values())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    start = len(distinct) * local_rank // local_ranks
    return distinct[start:] + distinct[:start]


@dataclass(frozen=True)
class LowerRegions(Pass):
    """Compile runs of compute, each distinct structure once."""

    name: ClassVar[str] = "lower_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT, Fact.RELEASED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED})

    backend: RegionBackend = RegionBackend.INDUCTOR
    """``inductor`` fuses; ``eager`` runs torch's own kernels."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        if self.backend is RegionBackend.EAGER:
            return Notes()
        settle(graph)
        before = CACHE.compilations
        cutouts = []
        for i, run in enumerate(runs(graph)):
            layer = stamp_of(run[0]).layer.replace(".", "_") or "root"
            cutout = cut_out(graph, run, f"{layer}_{i}")
            if cutout.outputs:
                cutouts.append(cutout)
        for cutout in share_compilation(cutouts):
            CACHE.get(cutout.key, cutout.module, graph.fake_mode)
        for cutout in cutouts:
            lower(graph, cutout, CACHE.get(cutout.key, cutout.module, graph.fake_mode))
        return Notes(regions=len(cutouts), compiled=CACHE.compilations - before)
