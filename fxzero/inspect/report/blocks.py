"""The nodes of a graph as blocks that open: a phase of a micro-step, its layers, their nodes.

Layers that stand one behind the other and compute alike are one block until it is opened: what
they call, and bytes of what that makes, tell. Transfers may differ: where a bucket ends has nothing
to do with the layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fxzero.graph.stamps import Lane, Role
from fxzero.inspect.detail import NodeRow

BESIDE_PHASES = "inputs and outputs"
"""Where nodes are that no phase has."""


@dataclass(frozen=True)
class LayerBlock:
    """What one layer has in one phase of one micro-step."""

    layer: str
    nodes: tuple[int, ...]
    """Places among the graph's nodes, in launch order."""
    us: float
    """Of its compute, each operator by itself."""


@dataclass(frozen=True)
class PhaseBlock:
    """One phase of one micro-step."""

    phase: str
    micro_step: int
    groups: tuple[tuple[LayerBlock, ...], ...]
    """Layers that compute alike, one behind the other."""


def phase_blocks(nodes: Sequence[NodeRow]) -> list[PhaseBlock]:
    """The outline's blocks, in the order in which half of each is done: what takes a micro-batch's
    rows of all micro-steps stands before the first of them."""
    found: dict[tuple[str, int], dict[str, list[int]]] = {}
    for place, node in enumerate(nodes):
        if node.piece or node.role == Role.REGION.value:  # it stands for nodes that are here
            continue
        is_beside = not node.phase or node.role in (Role.INPUT.value, Role.OUTPUT.value)
        key = (BESIDE_PHASES, 0) if is_beside else (node.phase, node.micro_step)
        found.setdefault(key, {}).setdefault("" if is_beside else node.layer, []).append(place)
    return [
        PhaseBlock(phase, micro_step, tuple(_groups(nodes, layers)))
        for (phase, micro_step), layers in sorted(found.items(), key=_middle)
    ]


def _middle(item: tuple[tuple[str, int], dict[str, list[int]]]) -> int:
    """The place that half of a block's nodes stand before; what no phase has comes first."""
    (phase, _), layers = item
    places = sorted(place for places in layers.values() for place in places)
    return -1 if phase == BESIDE_PHASES else places[len(places) // 2]


def pieces_of(nodes: Sequence[NodeRow]) -> dict[str, list[int]]:
    """The places of the nodes of each piece's body."""
    found: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        if node.piece:
            found.setdefault(node.piece, []).append(place)
    return found


def _groups(
    nodes: Sequence[NodeRow], layers: dict[str, list[int]]
) -> Iterable[tuple[LayerBlock, ...]]:
    """Layers in the order in which they compute, alike ones together."""

    def begins(item: tuple[str, list[int]]) -> int:
        return next((i for i in item[1] if _computes(nodes[i])), item[1][0])

    def alike(item: tuple[str, list[int]]) -> tuple[str, Hashable]:
        layer, places = item
        made = tuple((nodes[i].operator, nodes[i].num_bytes) for i in places if _computes(nodes[i]))
        return (layer.rpartition(".")[0] if made else layer, made)

    for _, members in groupby(sorted(layers.items(), key=begins), key=alike):
        yield tuple(_block(nodes, layer, places) for layer, places in members)


def _computes(node: NodeRow) -> bool:
    return node.lane == Lane.COMPUTE.value and node.us > 0


def _block(nodes: Sequence[NodeRow], layer: str, places: list[int]) -> LayerBlock:
    us = sum(nodes[i].us for i in places if _computes(nodes[i]))
    return LayerBlock(layer=layer, nodes=tuple(places), us=round(us, 3))


def as_data(blocks: Iterable[PhaseBlock], strings: Any) -> list[dict[str, Any]]:
    """Blocks as lists that `json` writes short."""
    return [
        {
            "phase": block.phase,
            "micro_step": block.micro_step,
            "groups": [
                [[strings(part.layer), list(part.nodes), part.us] for part in group]
                for group in block.groups
            ],
        }
        for block in blocks
    ]
