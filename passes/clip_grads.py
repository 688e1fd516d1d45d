"""Take the norm of all gradients, and decide by it what the update does.

    g = wait(reduce)[0]                norms = norms([g, …])            one per bucket
    …                              →   sum = all_reduce(sum_of_squares(norms))
                                       norm = total_norm(sum); scale = clip_coefficient(norm)

The norm is that of the whole model: shards are summed over the ranks by one scalar
all-reduce, tied and replicated parameters count once. With a loss scale, gradients that
are not finite tell the update to leave everything as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero.errors import ConfigError
from fxzero.graph import Phase, Stamp, StepGraph
from fxzero.graph.launch import emit_transfer, record_for
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.passes.updated_together import Ready, ready_together
from fxzero.ranks.groups import Group
from fxzero.runtime import updates
from fxzero.runtime.finite import Finite
from fxzero.sharding.layout import Axis, AxisRole
from fxzero.sharding.pipeline import Pipeline
from fxzero.transfer import TransferKind

_aten = torch.ops.aten
_STAMP = Stamp(Phase.OPTIMIZER, made_by="clip_grads")


def shard_groups(graph: StepGraph, keys: list[str]) -> list[Group]:
    """The groups over which any of the parameters is sharded."""
    groups = (graph.specs[key].shard_group for key in keys)
    return list({group.name: group for group in groups if group is not None}.values())


def take_norm(graph: StepGraph, chosen: list[Ready], order: list[str]) -> tuple[fx.Node, fx.Node]:
    """Emit the norms of all gradients, in the order of parameters, and their total."""
    assert graph.loss is not None
    loss = graph.output_values[graph.loss]
    value = (chosen[0].grads[0] if chosen else loss).meta["val"]

    def call(target: Any, args: tuple[Any, ...], *shape: int) -> fx.Node:
        with _mode(graph):
            empty = value.new_empty(shape)
        return graph.call(target, args, stamp=_STAMP, value=empty)

    if not chosen:  # a stage of a pipeline with nothing to train
        every = call(updates.no_norms, (loss,), 0)
        assert graph.pipeline is not None
        return every, _norm_of_stages(graph, graph.pipeline, every, order, [], call)
    parts = [call(updates.norms, (ready.grads,), len(ready.grads)) for ready in chosen]
    keys = [key for ready in chosen for key in ready.keys]
    positions = {key: i for i, key in enumerate(keys)}
    every = call(updates.in_order, (parts, [positions[key] for key in order]), len(order))
    groups = shard_groups(graph, order)
    if graph.pipeline is not None:
        return every, _norm_of_stages(graph, graph.pipeline, every, order, groups, call)
    if not groups:
        return every, call(_aten.linalg_vector_norm.default, (every,))
    (group,) = groups
    sharded = [i for i, key in enumerate(order) if graph.specs[key].shard_group is not None]
    squares = call(updates.sum_of_squares, (every, sharded), 1)
    record = record_for(TransferKind.ALL_REDUCE, Axis(AxisRole.SHARD, group), squares, "sum")
    joined = emit_transfer(graph, squares, record, replace(_STAMP, bucket="norm"), "norm")
    replicated = [i for i in range(len(order)) if i not in set(sharded)]
    return every, call(updates.total_norm, (every, joined, replicated))


def _norm_of_stages(
    graph: StepGraph,
    pipeline: Pipeline,
    every: fx.Node,
    order: list[str],
    groups: list[Group],
    call: Callable[..., fx.Node],
) -> fx.Node:
    """The total over all stages of a pipeline; the first of several that hold a parameter counts
    it."""
    counted = [
        i
        for i, k in enumerate(order)
        if pipeline.place_of[graph.specs[k].stages[0]] == pipeline.place
    ]
    sharded = [i for i in counted if graph.specs[order[i]].shard_group is not None]
    whole = [i for i in counted if graph.specs[order[i]].shard_group is None]
    squares = call(updates.sum_of_squares, (every, sharded), 1)
    if groups:
        (group,) = groups
        record = record_for(TransferKind.ALL_REDUCE, Axis(AxisRole.SHARD, group), squares, "sum")
        squares = emit_transfer(graph, squares, record, replace(_STAMP, bucket="norm"), "norm")
    with _mode(graph):
        value = every.meta["val"].new_empty(1, dtype=torch.float64)
    own = graph.call(updates.add_squares, (every, squares, whole), stamp=_STAMP, value=value)
    record = record_for(
        TransferKind.ALL_REDUCE, Axis(AxisRole.PIPELINE, pipeline.group), own, "sum"
    )
    stamp = replace(_STAMP, bucket="norm_of_stages")
    joined = emit_transfer(graph, own, record, stamp, "norm_of_stages")
    return call(updates.norm_of_stages, (joined, every))


def _mode(graph: StepGraph) -> Any:
    assert graph.fake_mode is not None
    return graph.fake_mode


@dataclass(frozen=True)
class ClipGrads(Pass):
    """Clip gradients by their global norm, and keep infinities out of the parameters."""

    name: ClassVar[str] = "clip_grads"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REDUCED, Fact.BUCKETED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    max_norm: float | None = None
    """Largest 2-norm of all gradients together; None does not clip."""
    measure: bool = False
    """Take the norm though nothing is clipped."""
    unscale: bool = False
    """The loss was scaled: see `fxzero.Precision`."""
    stop_unless_finite: bool = False
    """See `fxzero.Config.stop_unless_finite`."""

    def __post_init__(self) -> None:
        """A norm to clip to is a positive number."""
        norm: Any = self.max_norm  # compile_step's argument, whatever it was given
        number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if norm is not None and not (number and norm > 0 and math.isfinite(norm)):
            raise ConfigError(f"clip_grad_norm={norm!r} must be a positive number, or None")
        super().__post_init__()

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        assert ctx.optimizer is not None
        graph.settings["clip_grad_norm"] = str(self.max_norm)
        if not (self.max_norm or self.measure or self.unscale or self.stop_unless_finite):
            return Notes()
        chosen = ready_together(graph, ctx.optimizer)
        found = {key for ready in chosen for key in ready.keys}
        order = [key for key in ctx.optimizer.parameters if key in found]
        if not order and graph.pipeline is None:
            return Notes()
        with graph.graph.inserting_before(graph.output):
            every, total = take_norm(graph, chosen, order)
            scalar = total.meta["val"]

            def call(target: Any, *args: Any) -> fx.Node:
                return graph.call(target, args, stamp=_STAMP, value=scalar)

            inverse = None
            names = [graph.specs[key].name for key in order]
            if self.stop_unless_finite and not self.unscale:
                total = call(updates.stop_unless_finite, total, every, names)
            elif (
                self.max_norm is not None and not self.unscale
            ):  # with a loss scale, such a step is skipped: a matter of course
                total = call(Finite(names), total, every)
            if self.stop_unless_finite or self.unscale:
                graph.skip = call(updates.is_not_finite, total)
            norm = total
            if self.unscale:
                graph.scale = inverse = _inverse_scale(graph)
                norm = call(updates.unscaled, total, inverse)
            if self.max_norm is not None:
                graph.scale = call(updates.clip_coefficient, norm, self.max_norm, inverse)
        graph.norm = norm
        return Notes(gradients=len(order), parts=len(chosen))


def _inverse_scale(graph: StepGraph) -> fx.Node:
    """An input: one over the loss scale."""
    with _mode(graph):
        value = torch.empty(())
    return graph.input("inverse_scale", value, ("inverse_scale",))
