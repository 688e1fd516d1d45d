"""Runs of compute that can become one callable, cut out of a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxzero._compat import OpOverload, is_symbolic
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import is_random, writes_memory
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.regions.region import StructureKey, structure_key


def move_parts_together(graph: StepGraph) -> None:
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


def is_lowerable(node: fx.Node) -> bool:
    """Whether a node may be part of a region."""
    if node.op != "call_function" or stamp_of(node).role is not Role.COMPUTE:
        return False
    if stamp_of(node).phase is Phase.OPTIMIZER or is_random(node):
        return False
    if node.target is operator.getitem and not is_lowerable(node.all_input_nodes[0]):
        return False
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        return False
    if any(source.op == "get_attr" for source in node.all_input_nodes):
        return False
    return not is_symbolic(node.meta.get("val")) and not writes_memory(node)


def runs(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Maximal runs of lowerable nodes of one layer that hold more than views."""
    found: list[list[fx.Node]] = [[]]
    for node in nodes:
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


def end_of_run(node: fx.Node) -> fx.Node:
    """The last node of the run of compute that holds `node`, so that no region is split."""
    layer = stamp_of(node).layer
    while (
        node.next.op == "call_function"
        and stamp_of(node.next).role is Role.COMPUTE
        and stamp_of(node.next).layer == layer
    ):
        node = node.next
    return node


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


def cut_out(fake_mode: Any, run: list[fx.Node], name: str) -> Cutout:
    """Find out what a run gives to others, and which structure it has."""
    inside = set(run)
    outputs = [n for n in run if any(user not in inside for user in n.users)]
    shape_env = getattr(fake_mode, "shape_env", None)
    return Cutout(name, run, outputs, structure_key(inputs_of(run), run, outputs, shape_env))
