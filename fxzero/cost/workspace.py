"""What an operator, or a compiled region, allocates while it runs.

Memory is simulated from values of nodes; an operator that works through its input in chunks
holds a chunk too. Whoever defines such an operator registers a formula, as
`torch.utils.flop_counter` has it for FLOPs. A region holds the buffers that fusion leaves.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxzero._compat import OpOverload
from fxzero.cost.analytic import flops_of
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import tensor_bytes
from fxzero.graph.pieces import Piece

_formulas: dict[Any, Callable[..., int]] = {}


def register_workspace_formula(
    packet: Any,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register ``formula(*args, **kwargs) -> bytes`` for an operator; it gets fake tensors."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[packet] = formula
        return formula

    return register


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a node's operator holds while it runs, its arguments and results aside."""
    formula = _formulas.get(getattr(node.target, "overloadpacket", None)) if _formulas else None
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return formula(*args, **kwargs)


_REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "argmax", "any", "all"}


def fuses_into_readers(node: fx.Node) -> bool:
    """Whether a compiler computes a node where it is read instead of keeping it in memory."""
    target = node.target
    if not isinstance(target, OpOverload) or flops_of(node):
        return False
    name = target.overloadpacket.__name__
    made = {"full", "iota", "arange", "scalar_tensor", "zeros", "ones", "empty", "expand"}
    return torch.Tag.pointwise in target.tags or name in _REDUCTIONS | made or name in _MOVES


_MOVES = {"clone", "_to_copy", "convert_element_type", "cat", "constant_pad_nd", "slice_scatter"}


def piece_bytes(piece: Piece) -> int:
    """The most bytes that a piece holds once it is lowered: see `region_bytes`."""
    if "held_bytes" not in piece.facts:
        piece.facts["held_bytes"] = region_bytes(piece.nodes)
    known: int = piece.facts["held_bytes"]
    return known


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
