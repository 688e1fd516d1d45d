"""Runs of compute that can become one callable, cut out of a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from fxzero._compat import OpOverload, is_symbolic
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import is_random, writes_memory
from fxzero.graph.pieces import (
    Piece,
    Pieces,
    inputs_of,
    is_call,
    piece_of,
    read_outside,
    whole_call,
)
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.structure import StructureKey

PIECE = "fxzero_piece"
"""In `Node.meta` of a region's call: the piece that it was."""


def piece_of_run(graph: StepGraph, run: list[fx.Node]) -> Piece | None:
    """What a run does that is, or will be, a region; None of what is none."""
    if len(run) > 1:
        return cut_out(graph.pieces, run, "memory").piece
    piece: Piece | None = run[0].meta.get(PIECE)
    return piece


def move_parts_together(graph: StepGraph) -> None:
    """Put parts right behind what they are part of, and symbolic numbers as early as possible."""
    placed: dict[fx.Node, fx.Node] = {}
    """By what has parts, the last one that was put behind it."""
    for node in list(graph.nodes(role=Role.COMPUTE)):
        if node.target is operator.getitem:
            source = node.all_input_nodes[0]
            before = placed.get(source, source)
            if before.next is not node:
                before.append(node)
            placed[source] = node
            stamp, layer = stamp_of(node), stamp_of(source).layer
            if stamp.layer != layer:
                set_stamp(node, stamp.but(layer=layer))
        elif is_symbolic(node.meta.get("val")) and node.all_input_nodes:
            last = max(node.all_input_nodes)
            if last.op != "placeholder":
                last.append(node)
            else:
                first = next(n for n in graph.graph.nodes if n.op != "placeholder")
                if first is not node:
                    first.prepend(node)


def is_lowerable(node: fx.Node, known: Mapping[fx.Node, bool] = MappingProxyType({})) -> bool:
    """Whether a node may be part of a region.

    Args:
        known: what was answered before, so that a call is not looked at for each of its parts.
    """
    if node.op != "call_function" or stamp_of(node).role is not Role.COMPUTE:
        return False
    if stamp_of(node).phase is Phase.OPTIMIZER or stamp_of(node).alone or is_random(node):
        return False
    if node.target is operator.getitem:
        (source,) = node.all_input_nodes
        fits = known[source] if source in known else is_lowerable(source)
        return fits and not is_symbolic(node.meta.get("val"))
    if not isinstance(node.target, (OpOverload, Piece)):
        return False
    if any(source.op == "get_attr" for source in node.all_input_nodes):
        return False
    return not is_symbolic(node.meta.get("val")) and not writes_memory(node)


def runs(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Maximal runs of lowerable nodes of one layer that hold more than views."""
    found: list[list[fx.Node]] = [[]]
    known: dict[fx.Node, bool] = {}
    for node in nodes:
        known[node] = is_lowerable(node, known)
        if not known[node]:
            found.append([])
            continue
        if found[-1] and not same_region(found[-1][-1], node):
            found.append([])
        found[-1].append(node)
    return [run for run in found if not all(is_view(n) for n in run)]


def same_region(node: fx.Node, other: fx.Node) -> bool:
    """Whether two lowerable nodes, one after the other, are of one region."""
    mine, theirs = stamp_of(node), stamp_of(other)
    places = [(stamp.layer, stamp.micro_step, stamp.stage, stamp.half) for stamp in (mine, theirs)]
    return places[0] == places[1]


def end_of_run(node: fx.Node) -> fx.Node:
    """The last node of the run of compute that holds `node`, so that no region is split; itself if
    it is of none."""
    if not is_lowerable(node):
        return node
    while is_lowerable(node.next) and same_region(node, node.next):
        node = node.next
    return node


@dataclass(frozen=True)
class Cutout:
    """A run of nodes on its way to become a region."""

    name: str
    run: list[fx.Node]
    outputs: list[fx.Node]
    """What others read of it."""
    piece: Piece
    """What it does."""

    @property
    def key(self) -> StructureKey:
        """Equal for regions of equal structure."""
        return self.piece.key

    @property
    def inputs(self) -> list[fx.Node]:
        """What the run reads from outside now: lowering an earlier run replaces some of it."""
        return inputs_of(self.run)

    def module(self) -> fx.GraphModule:
        """What it does as a module of its own."""
        return self.piece.module(self.name)


def cut_out(pieces: Pieces, run: list[fx.Node], name: str) -> Cutout:
    """Find out what a run gives to others, and what it does."""
    call = whole_call(run)
    if call is not None:
        return Cutout(name, run, sorted(run[1:], key=lambda part: part.args[1]), piece_of(call))  # type: ignore[arg-type,return-value]  # its number
    outputs = read_outside(run)
    calls = [node for node in run if is_call(node)]
    known = piece_of(calls[0]).pieces if calls else pieces
    return Cutout(name, run, outputs, known.of(run, outputs, piece_name(run)))


def piece_name(run: list[fx.Node]) -> str:
    """What a piece is called that a run becomes: its layer's class, without numbers, and phase."""
    stamp = stamp_of(run[0])
    words = [word for word in stamp.layer.split(".") if word and not word.isdigit()]
    return "_".join([*(words or ["root"]), stamp.phase.value])
