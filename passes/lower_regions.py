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
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import fx

from fxzero._compat import create_node
from fxzero.cost.analytic import work_of_piece
from fxzero.cost.flops import REPEATED, repeated_flops
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.regions.cutout import PIECE, Cutout, cut_out, move_parts_together, runs
from fxzero.regions.region import CACHE, Region, Structure


class RegionBackend(StrEnum):
    """What a region becomes."""

    INDUCTOR = "inductor"
    """Fused kernels, by TorchInductor."""
    EAGER = "eager"
    """Torch's own kernels, one operator at a time: nothing is lowered."""


def reshape(graph: StepGraph) -> None:
    """Let views copy where a tensor does not lie in memory as it was traced.

    torch traces some operators with other strides than its kernels return (2.11 to 2.13, on CPU:
    BatchNorm of a transposed tensor, the backward of mse_loss with a transposed input). A view
    that is right in eager mode would then fail. Where memory allows a view, it stays one.
    """
    view = torch.ops.aten.view.default
    for node in graph.graph.find_nodes(op="call_function", target=view):
        if not any(_is_mutable(user) for user in node.users):
            node.target = torch.ops.aten.reshape.default


def _is_mutable(node: fx.Node) -> bool:
    """Whether an operator writes to something that it gets."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def lower_run(graph: StepGraph, cutout: Cutout, structure: Structure) -> None:
    """Replace a run by one call."""
    region = Region(cutout.name, structure, cutout.key)
    last = cutout.run[-1]
    stamp = stamp_of(last).but(role=Role.REGION, lane=Lane.COMPUTE, made_by="lower_regions")
    with graph.graph.inserting_after(last):
        call = create_node(
            graph.graph, "call_function", region, tuple(cutout.inputs), {}, cutout.name
        )
    call.meta["val"] = tuple(n.meta["val"] for n in cutout.outputs)
    call.meta["fxzero_work"] = work_of_piece(cutout.piece)
    call.meta[REPEATED] = repeated_flops(cutout.run)
    call.meta[PIECE] = cutout.piece
    set_stamp(call, stamp)
    end = call
    for i, node in enumerate(cutout.outputs):
        node.target, node.args, node.kwargs = operator.getitem, (call, i), {}
        set_stamp(node, stamp.but(role=Role.PART))
        end.append(node)
        end = node
    kept = set(cutout.outputs)
    for node in reversed(cutout.run):
        if node not in kept:
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
            reshape(graph)
            return Notes()
        move_parts_together(graph)
        before = CACHE.compilations
        cutouts = []
        for i, run in enumerate(runs(graph.graph.nodes)):
            layer = stamp_of(run[0]).layer.replace(".", "_") or "root"
            cutout = cut_out(graph.pieces, run, f"{layer}_{i}")
            if cutout.outputs:
                cutouts.append(cutout)
        CACHE.fill({c.key: c.module for c in share_compilation(cutouts)}, graph.fake_mode)
        for cutout in cutouts:
            lower_run(graph, cutout, CACHE.get(cutout.key, cutout.module, graph.fake_mode))
        return Notes(regions=len(cutouts), compiled=CACHE.compilations - before)
