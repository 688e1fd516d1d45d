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
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from fxzero.cost.analytic import work_of
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime.cutout import Cutout, cut_out, runs, settle
from fxzero.runtime.regions import CACHE, Region, Structure
from fxzero.schedule.memory import region_bytes


class RegionBackend(StrEnum):
    """What a region becomes."""

    INDUCTOR = "inductor"
    """Fused kernels, by TorchInductor."""
    EAGER = "eager"
    """Torch's own kernels, one operator at a time: nothing is lowered."""


def lower(graph: StepGraph, cutout: Cutout, structure: Structure) -> None:
    """Replace a run by one call."""
    region = Region(cutout.name, structure, cutout.key)
    work, held_bytes = work_of(cutout.run), region_bytes(cutout.run)
    last = cutout.run[-1]
    stamp = replace(stamp_of(last), role=Role.REGION, lane=Lane.COMPUTE, made_by="lower_regions")
    with graph.graph.inserting_after(last):
        call = graph.graph.create_node(
            "call_function", region, tuple(cutout.inputs), {}, name=cutout.name
        )
    call.meta["val"] = tuple(n.meta["val"] for n in cutout.outputs)
    call.meta["fxzero_work"] = work
    call.meta["fxzero_region_bytes"] = held_bytes
    set_stamp(call, stamp)
    after = call
    for i, node in enumerate(cutout.outputs):
        with graph.graph.inserting_after(after):
            part = graph.graph.call_function(operator.getitem, (call, i))
        part.meta = dict(node.meta)
        set_stamp(part, replace(stamp, role=Role.PART))
        node.replace_all_uses_with(part)
        after = part
    for node in reversed(cutout.run):
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
            return Notes()
        settle(graph)
        before = CACHE.compilations
        cutouts = []
        for i, run in enumerate(runs(graph.graph.nodes)):
            layer = stamp_of(run[0]).layer.replace(".", "_") or "root"
            cutout = cut_out(graph.fake_mode, run, f"{layer}_{i}")
            if cutout.outputs:
                cutouts.append(cutout)
        for cutout in share_compilation(cutouts):
            CACHE.get(cutout.key, cutout.module, graph.fake_mode)
        for cutout in cutouts:
            lower(graph, cutout, CACHE.get(cutout.key, cutout.module, graph.fake_mode))
        return Notes(regions=len(cutouts), compiled=CACHE.compilations - before)
