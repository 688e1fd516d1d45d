"""The passes: each file decides one thing about a step graph.

`JOINT` runs on the joint graph of the ordinary loop, `SIDES` on its forward and its backward
after the cut; `STEP` and `LOWERING` on a whole step. The order is the one that the contracts ask
for, and it is checked.
"""

from fxzero.passes.accumulate import Accumulate
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.passes.bucket import Bucket
from fxzero.passes.clip_grads import ClipGrads
from fxzero.passes.draw_masks import DrawMasks
from fxzero.passes.gather_ahead import GatherAhead
from fxzero.passes.lower_kernels import LowerKernels
from fxzero.passes.lower_regions import LowerRegions
from fxzero.passes.lower_transfers import LowerTransfers
from fxzero.passes.prefetch import Prefetch
from fxzero.passes.recompute import Recompute
from fxzero.passes.release_saved import ReleaseSaved
from fxzero.passes.shard_grads import ShardGrads
from fxzero.passes.shard_params import ShardParams
from fxzero.passes.stamp import StampNodes
from fxzero.passes.update import Update

JOINT: tuple[type[Pass], ...] = (
    StampNodes,
    LowerKernels,
    Recompute,
    ShardParams,
    ShardGrads,
    Bucket,
    Prefetch,
)
STEP: tuple[type[Pass], ...] = (
    StampNodes,
    LowerKernels,
    Recompute,
    Accumulate,
    ShardParams,
    ShardGrads,
    Bucket,
    ClipGrads,
    Update,
    Prefetch,
)
SIDES: tuple[type[Pass], ...] = (LowerTransfers, ReleaseSaved, DrawMasks, LowerRegions)
LOWERING: tuple[type[Pass], ...] = (LowerTransfers, GatherAhead, DrawMasks, LowerRegions)

__all__ = [
    "JOINT",
    "LOWERING",
    "SIDES",
    "STEP",
    "Accumulate",
    "Bucket",
    "ClipGrads",
    "Context",
    "DrawMasks",
    "Fact",
    "GatherAhead",
    "LowerKernels",
    "LowerRegions",
    "LowerTransfers",
    "Notes",
    "Pass",
    "Prefetch",
    "Recompute",
    "ReleaseSaved",
    "ShardGrads",
    "ShardParams",
    "StampNodes",
    "Update",
]
