"""What the stages of a pipeline have in common at the end of a step.

    loss = mean(losses)             →   loss = all_reduce(loss)          zero but on one stage
    g = wait(reduce)[0]             →   g = all_reduce(g)                of a tied parameter, a sum

A parameter that several stages hold has on each of them the gradient of what is read there: they
are added up once, when both have all of it. All of it is launched behind everything that a stage
sends, in one order on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.launch import emit_launch, emit_part, emit_transfer, emit_wait, record_for
from fxzero.graph.stamps import Lane
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.ranks.groups import Group
from fxzero.sharding.layout import Axis, AxisRole
from fxzero.transfer import TransferKind

_aten = torch.ops.aten


def share_loss(graph: StepGraph) -> None:
    """Give every rank the loss that one stage has computed; the others have a zero."""
    assert graph.pipeline is not None
    assert graph.loss is not None
    values = list(graph.output_values)
    loss = values[graph.loss]
    assert isinstance(loss, fx.Node)
    stamp = Stamp(Phase.OPTIMIZER, made_by="join_stages", bucket="loss")
    compute = stamp.but(bucket="")
    axis = Axis(AxisRole.PIPELINE, graph.pipeline.group)
    with graph.graph.inserting_before(graph.output), graph.made_for(loss):
        own = graph.call(_aten.clone.default, (loss,), stamp=compute)
        one = graph.call(_aten.view.default, (own, [1]), stamp=compute)
        record = record_for(TransferKind.ALL_REDUCE, axis, one, "sum")
        shared = emit_transfer(graph, one, record, stamp, "loss_of_stages")
        values[graph.loss] = graph.call(_aten.view.default, (shared, []), stamp=compute)
    graph.set_output_values(values)


def sum_tied(graph: StepGraph) -> int:
    """Add up the gradients of parameters that several stages hold; return how many there are."""
    values = list(graph.output_values)
    tied: dict[tuple[str, torch.dtype], list[tuple[str, int]]] = {}
    groups: dict[str, Group] = {}
    for position, key in graph.gradients.items():
        group, node = graph.specs[key].layout.tied, values[position]
        if group is not None and isinstance(node, fx.Node):
            groups[group.name] = group
            place = group.name, node.meta["val"].dtype
            tied.setdefault(place, []).append((graph.specs[key].name, position))
    launched: list[tuple[fx.Node, Stamp, list[int]]] = []
    with graph.graph.inserting_before(graph.output):
        # Groups by their ranks, as their names are each rank's own.
        for (name, _), members in sorted(
            tied.items(), key=lambda pair: (sorted(groups[pair[0][0]].ranks), str(pair[0][1]))
        ):
            nodes = [values[position] for _, position in sorted(members)]
            axis = Axis(AxisRole.TIED, groups[name])
            record, *others = [record_for(TransferKind.ALL_REDUCE, axis, n, "sum") for n in nodes]
            if others:
                record = record.joined(*others)
            stamp = Stamp(
                Phase.OPTIMIZER, Lane.REDUCE, made_by="join_stages", bucket=f"tied.{len(launched)}"
            )
            launch = emit_launch(graph, nodes, record, stamp, "sum_tied")
            launched.append((launch, stamp, [position for _, position in sorted(members)]))
        for launch, stamp, positions in launched:
            joined = emit_wait(graph, launch, stamp)
            for index, position in enumerate(positions):
                key = graph.gradients[position]
                own = stamp.but(params=(key,), role=Role.PART)
                values[position] = emit_part(graph, joined, index, own)
    graph.set_output_values(values)
    return sum(len(positions) for _, _, positions in launched)


@dataclass(frozen=True)
class JoinStages(Pass):
    """Let the stages of a pipeline share the loss, and the gradients of what they share."""

    name: ClassVar[str] = "join_stages"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REDUCED, Fact.BUCKETED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        if graph.pipeline is None:
            return Notes()
        share_loss(graph)
        return Notes(tied=sum_tied(graph))
