"""Read a joint graph's structure once and write it on every node.

    phase   forward is what the forward's outputs need; the rest is backward
    layer   from the module stack; in backward from the forward node of equal sequence
    role    markers, inputs and outputs; everything else is compute

Backward nodes that need no gradient (they only prepare saved values) move down to
their first use, so that they hold no memory before it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.errors import CaptureError
from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.modules import module_path
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.params import layer_of
from fxzero.passes.base import Context, Fact, Notes, Pass

_ROLES = {
    torch.ops.fxzero.unshard.default: Role.UNSHARD,
    torch.ops.fxzero.reshard_grad.default: Role.RESHARD,
}


def ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes given and everything they are computed from."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found


def layers(graph: fx.Graph) -> dict[fx.Node, str]:
    """The layer of each call node; a node that does not say takes its predecessor's."""
    by_sequence: dict[int, str] = {}
    found: dict[fx.Node, str] = {}
    last = ""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        path = module_path(node)
        sequence = node.meta.get("seq_nr")
        if path is not None:
            last = layer_of(path)
        elif sequence in by_sequence:
            last = by_sequence[sequence]
        if sequence is not None:
            by_sequence.setdefault(sequence, last)
        found[node] = last
    return found


def sink_backward(graph: StepGraph) -> int:
    """Move backward nodes that depend on no gradient down to their first use.

    Returns:
        How many nodes moved.
    """
    late: set[fx.Node] = set()
    backward = list(graph.nodes(phase=Phase.BACKWARD))
    tangents = {n for n in graph.graph.find_nodes(op="placeholder") if _is_tangent(n)}
    dependent = set(tangents)
    for node in backward:
        if dependent.isdisjoint(node.all_input_nodes):
            late.add(node)
        else:
            dependent.add(node)
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            waiting = [i for i in stack[-1].all_input_nodes if i in late and i not in placed]
            if waiting:
                stack.append(waiting[0])
                continue
            top = stack.pop()
            if top not in placed:
                placed.add(top)
                order.append(top)

    for node in backward:
        if node not in late:
            place(node)
    for node in backward:
        if node not in placed:
            place(node)
    moved = sum(1 for a, b in zip(order, backward, strict=True) if a is not b)
    if moved:
        graph.reorder(order)
    return moved


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("tangents_")


def _check_markers(node: fx.Node, graph: StepGraph) -> None:
    key = node.args[1]
    if key not in graph.specs:
        raise CaptureError(f"node {node.name} reads the unknown parameter {key!r}")


@dataclass(frozen=True)
class StampNodes(Pass):
    """Write phase, layer and role on every node."""

    name: ClassVar[str] = "stamp"
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        outputs = [n for n in graph.output_values[: graph.num_forward_outputs] if n is not None]
        forward = ancestors([n for n in outputs if isinstance(n, fx.Node)])
        for node in graph.graph.nodes:  # parts of a forward result belong to forward
            if node.target is operator.getitem and node.args[0] in forward:
                forward.add(node)
        layer = layers(graph.graph)
        backward_nodes = []
        for node in graph.graph.nodes:
            phase = Phase.FORWARD if node in forward else Phase.BACKWARD
            if node.op == "placeholder":
                phase = Phase.BACKWARD if _is_tangent(node) else Phase.FORWARD
                key = graph.inputs.get(node)
                params = (key,) if key is not None else ()
                set_stamp(node, Stamp(phase, role=Role.INPUT, params=params))
            elif node.op == "output":
                set_stamp(node, Stamp(Phase.BACKWARD, role=Role.OUTPUT))
            else:
                role = _ROLES.get(node.target, Role.COMPUTE)
                params = ()
                if role is not Role.COMPUTE:
                    _check_markers(node, graph)
                    params = (str(node.args[1]),)
                set_stamp(node, Stamp(phase, role=role, layer=layer[node], params=params))
                if phase is Phase.BACKWARD:
                    backward_nodes.append(node)
        graph.reorder(backward_nodes)
        moved = sink_backward(graph)
        return Notes(
            forward=sum(1 for _ in graph.nodes(phase=Phase.FORWARD)),
            backward=len(backward_nodes),
            layers=len({stamp_of(n).layer for n in graph.nodes()}),
            sunk=moved,
        )
