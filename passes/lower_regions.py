"""Lower each run of compute to one callable, compiled once per distinct structure.

    a = mul(x, w); b = add(a, y); gather(…)   →   region = h_0(x, w, y); b = region[0]; gather(…)

A run is broken by transfers and by the end of a layer, so that equal layers give equal
regions, whatever the stage and whatever is overlapped. Views alone are not lowered.
What remains is a flat graph of region calls and transfers: its printed Python is the
schedule.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch
from torch import fx

from fxzero._compat import is_symbolic
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import writes_memory
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime.regions import CACHE, Region


class RegionBackend(str, Enum):
    """What a region becomes."""

    INDUCTOR = "inductor"
    """Fused kernels, by TorchInductor."""
    EAGER = "eager"
    """Torch's own kernels, one operator at a time: nothing is lowered."""


def is_lowerable(node: fx.Node) -> bool:
    """Whether a node may be part of a region."""
    if node.op != "call_function" or stamp_of(node).role is not Role.COMPUTE:
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
        if found[-1] and stamp_of(found[-1][-1]).layer != stamp_of(node).layer:
            found.append([])
        found[-1].append(node)
    return [run for run in found if not all(is_view(n) for n in run)]


def extract(run: list[fx.Node], name: str) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Copy a run into a module of its own; return it, its inputs and its outputs."""
    inside = set(run)
    inputs = list(dict.fromkeys(i for n in run for i in n.all_input_nodes if i not in inside))
    outputs = [n for n in run if any(user not in inside for user in n.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta["val"] = node.meta["val"]
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in outputs))
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name), inputs, outputs


def lower(graph: StepGraph, run: list[fx.Node], name: str) -> None:
    """Replace a run by one call."""
    module, inputs, outputs = extract(run, name)
    if not outputs:
        return
    region = Region(name, CACHE.get(module, graph.fake_mode))
    last = run[-1]
    stamp = replace(stamp_of(last), role=Role.REGION, lane=Lane.COMPUTE, made_by="lower_regions")
    with graph.graph.inserting_after(last):
        call = graph.graph.call_function(region, tuple(inputs))
    call.name = graph.graph._graph_namespace.create_name(name, call)
    call.meta["val"] = tuple(n.meta["val"] for n in outputs)
    set_stamp(call, stamp)
    after = call
    for i, node in enumerate(outputs):
        with graph.graph.inserting_after(after):
            part = graph.graph.call_function(operator.getitem, (call, i))
        part.meta = dict(node.meta)
        set_stamp(part, replace(stamp, role=Role.PART))
        node.replace_all_uses_with(part)
        after = part
    for node in reversed(run):
        graph.graph.erase_node(node)


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
        found = runs(graph)
        for i, run in enumerate(found):
            layer = stamp_of(run[0]).layer.replace(".", "_") or "root"
            lower(graph, run, f"{layer}_{i}")
        return Notes(regions=len(found), compiled=CACHE.compilations - before)
