"""The passes in their order, said once for both doors.

    SCHEDULING    on the joint graph: what happens, and when
    LOWERING      on what will be called: each side of the cut, or the whole step

A pass says by `doors` where it has a meaning. One that has options is a field of `Config` by its
name; any other is made as it is. That the order is one that the contracts allow is checked before
anything runs: see `fxzero.compiler.run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxzero.compiler.config import Config
from fxzero.errors import ConfigError
from fxzero.passes import (
    Accumulate,
    Bucket,
    ClipGrads,
    Door,
    DrawMasks,
    ExpandLayers,
    GatherAhead,
    JoinCopies,
    JoinStages,
    LowerKernels,
    LowerRegions,
    LowerTransfers,
    OffloadActivations,
    OffloadDisk,
    OffloadParams,
    OffloadShards,
    OffloadStates,
    OrderMicroBatches,
    Outline,
    Pass,
    Prefetch,
    Recompute,
    ReleaseSaved,
    ShardGrads,
    ShardParams,
    Slab,
    SplitStages,
    StampNodes,
    TileLinear,
    Update,
)
from fxzero.passes.decision import DecidingPass

SCHEDULING: tuple[type[Pass], ...] = (
    StampNodes,
    SplitStages,
    LowerKernels,
    DrawMasks,
    Recompute,
    TileLinear,
    Outline,
    Accumulate,
    OrderMicroBatches,
    ShardParams,
    ShardGrads,
    ExpandLayers,
    Bucket,
    JoinStages,
    ClipGrads,
    Update,
    OffloadShards,
    OffloadStates,
    OffloadParams,
    OffloadDisk,
    OffloadActivations,
    Prefetch,
    JoinCopies,
)
LOWERING: tuple[type[Pass], ...] = (
    LowerTransfers,
    GatherAhead,
    ReleaseSaved,
    LowerRegions,
    Slab,
)


DECIDING = tuple(kind.name for kind in SCHEDULING + LOWERING if issubclass(kind, DecidingPass))
"""The passes whose decisions a plan holds, by name."""


@dataclass(frozen=True)
class Pipelines:
    """The passes of one compilation, with their options."""

    scheduling: tuple[Pass, ...]
    lowering: tuple[Pass, ...]


def loop_passes(config: Config) -> Pipelines:
    """The passes of the ordinary loop, whose forward and backward are called apart.

    Raises:
        ConfigError: something shall be held on the host.
    """
    if config.offloads:
        raise ConfigError(
            f"{config.offloads}: the ordinary loop calls forward, backward and update apart, and "
            "this needs them in one graph. Train with fxzero.compile_step(model, optimizer, "
            "loss_fn), or let the loop's own optimizer update on the host: "
            "fxzero.shard(model, offload=True)."
        )
    return _pipelines(config.filled, Door.LOOP)


def step_passes(
    config: Config,
    micro_batches: int = 1,
    max_norm: float | None = None,
    *,
    scaled: bool = False,
    unroll: str = "",
    pipelined: bool = False,
) -> Pipelines:
    """The passes of a graph that ends in the update.

    Args:
        max_norm: what gradients are clipped to; infinity takes their norm alone.
        scaled: whether the loss is scaled.
        unroll: why the graph must hold all micro-batches; empty if it need not.
        pipelined: whether the model is in stages.

    Raises:
        ConfigError: no such number of micro-batches, or norm.
    """
    config = config.filled
    stop = config.stop_unless_finite and not scaled
    own: list[Pass] = [
        Update(
            config.lower_kernels,
            replayed=config.cuda_graph,
            offloaded=bool(config.offload_states.share),
        ),
        Accumulate(micro_batches, unroll),
        SplitStages(config.order_micro_batches.schedule, micro_batches),
        ClipGrads(
            max_norm=None if max_norm == math.inf else max_norm,
            measure=max_norm == math.inf,
            unscale=scaled,
            stop_unless_finite=stop,
        ),
        JoinCopies(config.offload_params.in_flight),
        OffloadDisk(config.host_budget_bytes, config.host_budget, config.disk),
    ]
    if config.cuda_graph:  # it replays the same memory: nothing can be in flight between two steps
        own.append(replace(config.gather_ahead, enabled=False))
    return _pipelines(config, Door.STEP, own, pipelined=pipelined)


def _pipelines(
    config: Config, door: Door, own: Iterable[Pass] = (), *, pipelined: bool = False
) -> Pipelines:
    given = {type(one): one for one in own}
    unused: set[type[Pass]] = set()
    if not config.tile_linear.max_bytes:
        unused.add(TileLinear)
    if not config.slab.enabled:
        unused.add(Slab)
    if not config.offload_states.share:
        unused.add(OffloadStates)
    if not config.offload_params.share:
        unused.add(OffloadParams)
    if not config.offload_activations.share:
        unused.add(OffloadActivations)
    if not config.holds_on_disk:
        unused.add(OffloadDisk)
    if not pipelined:
        unused |= {SplitStages, JoinStages}
    if not config.offloads and door is Door.STEP:
        unused.add(JoinCopies)

    def made(kinds: tuple[type[Pass], ...]) -> tuple[Pass, ...]:
        return tuple(
            given.get(kind) or getattr(config, kind.name, None) or kind()
            for kind in kinds
            if door in kind.doors and (config.fuses or not kind.for_regions) and kind not in unused
        )

    return Pipelines(made(SCHEDULING), made(LOWERING))
