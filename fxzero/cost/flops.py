"""What a model's step computes: the FLOPs that a share of the peak (MFU) is counted of.

Chowdhery et al. 2022 (PaLM, appendix B): of what the model itself computes, forward and backward,
and not of what is repeated to save memory; products of matrices and attention, by torch's formulas.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxzero.cost.analytic import flops_of
from fxzero.graph import StepGraph
from fxzero.graph.pieces import is_call, piece_of
from fxzero.graph.stamps import has_stamp, stamp_of
from fxzero.graph.steady import runs_of

REPEATED = "fxzero_repeated_flops"
"""Where a region's call notes what of its work is repeated: its nodes are gone."""


def model_flops(graph: StepGraph) -> float:
    """FLOPs of a scheduled graph's run on this rank, without what it repeats."""
    total = 0.0
    for node in graph.graph.nodes:
        if node.op == "call_function" and has_stamp(node):
            repeated = node.meta[REPEATED] if REPEATED in node.meta else repeated_flops([node])
            total += runs_of(graph, stamp_of(node)) * (_flops(node) - repeated)
    return total


def repeated_flops(nodes: Iterable[fx.Node]) -> float:
    """FLOPs of those among some nodes, and in the pieces that they call, that repeat others."""
    total = 0.0
    for node in nodes:
        if is_call(node):
            total += repeated_flops(piece_of(node).nodes)
        elif has_stamp(node) and stamp_of(node).again:
            total += _flops(node)
    return total


def _flops(node: fx.Node) -> float:
    """Of a node, or of what it calls."""
    if (work := node.meta.get("fxzero_work")) is not None:
        return sum(product.flops for product in work.products)
    if is_call(node):
        return sum(map(_flops, piece_of(node).nodes))
    return flops_of(node)
