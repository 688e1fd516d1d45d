"""The passes: each file decides one thing about a step graph.

Their order is in `fxzero.compiler.pipelines`.
"""

from fxzero.passes.accumulate import Accumulate
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.passes.bucket import Bucket
from fxzero.passes.clip_grads import ClipGrads
from fxzero.passes.draw_masks import DrawMasks
from fxzero.passes.expand_layers import ExpandLayers
from fxzero.passes.gather_ahead import GatherAhead
from fxzero.passes.join_copies import JoinCopies
from fxzero.passes.join_stages import JoinStages
from fxzero.passes.lower_kernels import LowerKernels
from fxzero.passes.lower_regions import LowerRegions
from fxzero.passes.lower_transfers import LowerTransfers
from fxzero.passes.offload_activations import OffloadActivations
from fxzero.passes.offload_disk import OffloadDisk
from fxzero.passes.offload_params import OffloadParams
from fxzero.passes.offload_shards import OffloadShards
from fxzero.passes.offload_states import OffloadStates
from fxzero.passes.order_micro_batches import OrderMicroBatches
from fxzero.passes.outline import Outline
from fxzero.passes.prefetch import Prefetch
from fxzero.passes.recompute import Recompute
from fxzero.passes.release_saved import ReleaseSaved
from fxzero.passes.shard_grads import ShardGrads
from fxzero.passes.shard_params import ShardParams
from fxzero.passes.slab import Slab
from fxzero.passes.split_stages import SplitStages
from fxzero.passes.stamp import StampNodes
from fxzero.passes.tile_linear import TileLinear
from fxzero.passes.update import Update

__all__ = [
    "Accumulate",
    "Bucket",
    "ClipGrads",
    "Context",
    "Door",
    "DrawMasks",
    "ExpandLayers",
    "Fact",
    "GatherAhead",
    "JoinCopies",
    "JoinStages",
    "LowerKernels",
    "LowerRegions",
    "LowerTransfers",
    "Notes",
    "OffloadActivations",
    "OffloadDisk",
    "OffloadParams",
    "OffloadShards",
    "OffloadStates",
    "OrderMicroBatches",
    "Outline",
    "Pass",
    "Prefetch",
    "Recompute",
    "ReleaseSaved",
    "ShardGrads",
    "ShardParams",
    "Slab",
    "SplitStages",
    "StampNodes",
    "TileLinear",
    "Update",
]
