"""Draw dropout's masks before the layer that they are for, so that the layer stays one region.

Only the mask is random then: backward may repeat the product, or what is computed from it.

    y = gelu(x); d = native_dropout(y, 0.1)      mask = dropout_mask([4, 8], 0.1)
    out = d[0]; z = add(x, out)              →   y = gelu(x); z = add(x, y * mask / 0.9)

The numbers are those that torch's own dropout would draw from the same generator, and so
are the products, bit by bit: a mask depends on nothing but its shape. On CPU, where torch
computes dropout in these three operations; a CUDA kernel does it in one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import StepGraph
from fxzero.graph.operators import is_random
from fxzero.graph.stamps import stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.regions.cutout import is_lowerable, same_region
from fxzero.runtime.random import dropout_mask

_aten = torch.ops.aten
_prims = torch.ops.prims


def is_separable(node: fx.Node) -> bool:
    """Whether a node is a dropout whose mask can be drawn on its own."""
    if node.target is not _aten.native_dropout.default:
        return False
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    train = node.args[2]
    return (
        train is not False
        and value.device.type == "cpu"
        and value.is_contiguous()
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() > 0
    )


def run_begin(node: fx.Node) -> fx.Node:
    """The first node of the region that a node would be in, were it lowerable."""
    while is_lowerable(node.prev) and same_region(node.prev, node):
        node = node.prev
    return node


def draw_first(graph: StepGraph, node: fx.Node) -> None:
    """Replace a dropout by a mask ahead of its layer, and two products."""
    source, rate, _ = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(rate, (int, float))
    value: torch.Tensor = source.meta["val"]
    stamp = stamp_of(node).but(made_by="draw_masks")
    assert graph.fake_mode is not None
    with graph.fake_mode:
        like = value.new_empty(value.shape, dtype=torch.bool)
    with graph.graph.inserting_before(run_begin(node)), graph.made_for(node):
        mask = graph.call(
            dropout_mask, (list(value.shape), rate), stamp=stamp, name="mask", value=like
        )
    scale = 0.0 if rate == 1 else 1.0 / (1.0 - rate)
    with graph.graph.inserting_before(node), graph.made_for(node):
        cast = graph.call(_prims.convert_element_type.default, (mask, value.dtype), stamp=stamp)
        kept = graph.call(_aten.mul.Tensor, (source, cast), stamp=stamp)
        scaled = graph.call(_aten.mul.Tensor, (kept, scale), stamp=stamp)
    for part in list(node.users):
        assert part.target is operator.getitem
        part.replace_all_uses_with(mask if part.args[1] else scaled)
        graph.graph.erase_node(part)
    graph.graph.erase_node(node)


@dataclass(frozen=True)
class DrawMasks(Pass):
    """Let dropout fuse with its layer."""

    name: ClassVar[str] = "draw_masks"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    for_regions: ClassVar[bool] = True

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        found = [node for node in graph.nodes() if is_random(node) and is_separable(node)]
        for node in found:
            draw_first(graph, node)
        return Notes(masks=len(found))
