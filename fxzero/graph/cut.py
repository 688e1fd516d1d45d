"""Cut a scheduled joint graph into its forward and its backward.

What crosses the cut is exactly what backward nodes read from forward: no partitioner
decides it again, so a stage-3 graph cannot silently become a stage-2 one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxzero._compat import extract_forward_backward, is_symbolic, set_meta, set_side
from fxzero.graph.stamps import Phase, Role, Stamp, has_stamp, set_stamp, stamp_of
from fxzero.graph.step_graph import StepGraph
from fxzero.transfer import Pool


@dataclass(frozen=True)
class Sides:
    """The two modules and what crosses between them."""

    forward: StepGraph
    backward: StepGraph
    saved: tuple[fx.Node, ...]
    """Joint nodes whose values forward saves for backward."""


def crossing(graph: StepGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    """What backward reads from forward: tensors (and opaque objects), and symbolic numbers."""
    values: dict[fx.Node, None] = {}
    symbols: dict[fx.Node, None] = {}
    gradients = graph.output_values[graph.num_forward_outputs :]
    read = [n for node in graph.nodes(phase=Phase.BACKWARD) for n in node.all_input_nodes]
    read += [n for n in gradients if isinstance(n, fx.Node)]
    for node in read:
        if stamp_of(node).phase is Phase.FORWARD and node.op != "get_attr":
            (symbols if is_symbolic(node.meta.get("val")) else values)[node] = None
    return list(values), list(symbols)


def cut(graph: StepGraph, private: set[str]) -> Sides:
    """Split a joint graph at the border of its phases.

    Args:
        private: names of saved values that backward may free: see `release_saved`.
    """
    for node in graph.nodes():
        if node.op != "get_attr":  # a constant is on whatever side reads it
            set_side(node, backward=stamp_of(node).phase is Phase.BACKWARD)
    values, symbols = crossing(graph)
    for node in values:
        if isinstance(node.meta.get("val"), (list, tuple)):
            raise AssertionError(f"{node.name} saves a list; its parts should be saved instead")
    saved = list(values)
    forward, backward = extract_forward_backward(
        graph.module, values, symbols, graph.num_forward_outputs
    )
    sides = Sides(
        _side(graph, forward, Phase.FORWARD), _side(graph, backward, Phase.BACKWARD), tuple(saved)
    )
    for node in backward.graph.find_nodes(op="placeholder"):
        node.meta["fxzero_private"] = node.name in private
    return sides


def _side(joint: StepGraph, module: fx.GraphModule, phase: Phase) -> StepGraph:
    """Give one side's inputs and output stamps of their own."""
    names = {node.name: key for node, key in joint.inputs.items()}
    for node in module.graph.find_nodes(op="placeholder"):
        set_meta(node, dict(node.meta))  # torch shares it with the joint node
        params = (names[node.name],) if node.name in names else ()
        pool = stamp_of(node).pool if has_stamp(node) else Pool.DEVICE
        set_stamp(node, Stamp(phase, role=Role.INPUT, params=params, pool=pool))
    set_stamp(next(iter(reversed(module.graph.nodes))), Stamp(phase, role=Role.OUTPUT))
    inputs = {
        node: names[node.name]
        for node in module.graph.find_nodes(op="placeholder")
        if node.name in names
    }
    return StepGraph(module, num_forward_outputs=0, specs=joint.specs, inputs=inputs)
