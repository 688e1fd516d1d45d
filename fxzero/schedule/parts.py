"""Keep a value in parts: emit what cuts this rank's part, and what brings the whole again.

forward     y = mm(x, w)                    y = mm(x, w); part = own_part(y, 8, "0")
backward    dw = mm(t(y), g)            →   gather_y = all_gather([part], 8, "0")
                                            y1 = view(wait(gather_y)[0], [4, 16])
                                            dw = mm(t(y1), g)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from fxzero.graph.launch import emit_launch, emit_part, emit_wait
from fxzero.graph.same_on_ranks import Along, expression
from fxzero.graph.stamps import Lane, Phase, Role, stamp_of
from fxzero.graph.step_graph import StepGraph
from fxzero.runtime.parts import own_part, part_length
from fxzero.transfer import Transfer, TransferKind

_aten = torch.ops.aten


def part_record(value: Tensor, along: Along) -> Transfer:
    """The gather of a value from its parts."""
    size = along.group.size
    return Transfer(
        TransferKind.ALL_GATHER,
        full_bytes=part_length(value.numel(), size) * size * value.element_size(),
        size=size,
        group=along.group.name,
        stride=along.group.stride,
        dtype=value.dtype,
        axis=along.name,
    )


def emit_own_part(graph: StepGraph, node: fx.Node, along: Along) -> fx.Node:
    """Cut this rank's part of a value, behind it."""
    value: Tensor = node.meta["val"]
    size, group = along.group.size, along.group.name
    stamp = stamp_of(node).but(
        lane=Lane.COMPUTE, role=Role.COMPUTE, params=(), transfer=None, made_by="recompute"
    )
    like = value.new_empty(part_length(value.numel(), size))
    with graph.graph.inserting_after(node), graph.made_for(node):
        return graph.call(
            own_part, (node, size, group), stamp=stamp, name=f"{node.name}_part", value=like
        )


def emit_gather_again(
    graph: StepGraph, node: fx.Node, part: fx.Node, along: Along, before: fx.Node
) -> fx.Node:
    """Gather a value in backward, before a node; return the whole of it.

    Args:
        node: what forward has computed.
        part: this rank's part of it.
    """
    value: Tensor = node.meta["val"]
    # Cut by ranks that have computed it by other numbers, it would be nobody's.
    record = replace(part_record(value, along), alike=expression(node))
    stamp = stamp_of(node).but(
        phase=Phase.BACKWARD,
        lane=Lane.GATHER,
        params=(),
        made_by="recompute",
        again=node.name,
    )
    with graph.graph.inserting_before(before), graph.made_for(node):
        launch = emit_launch(graph, [part], record, stamp, f"gather_{node.name}")
        full = emit_part(graph, emit_wait(graph, launch, stamp), 0, stamp)
        finish = stamp.but(role=Role.FINISH)
        if part_length(value.numel(), record.size) * record.size != value.numel():
            args = (full, 0, 0, value.numel())
            full = graph.call(_aten.slice.Tensor, args, stamp=finish)
        shape = list(value.shape)
        return graph.call(_aten.view.default, (full, shape), stamp=finish)


def is_own_part(node: fx.Node) -> bool:
    """Whether a node cuts this rank's part of a value."""
    return node.target is own_part
