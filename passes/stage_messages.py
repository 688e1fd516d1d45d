"""Emit what stages of a pipeline give to each other: see `fxzero.graph.messages`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxzero.graph import Role, Stamp, StepGraph
from fxzero.graph.launch import LANES, emit_part
from fxzero.graph.messages import forms_of
from fxzero.graph.operators import num_bytes
from fxzero.ranks.groups import Group
from fxzero.runtime import messages
from fxzero.sharding.layout import AxisRole
from fxzero.transfer import RECEIVED, SENT, Transfer, TransferKind


def emit_send(
    graph: StepGraph, values: Sequence[fx.Node], link: Group, stamp: Stamp, name: str
) -> fx.Node:
    """Emit a send and its wait, one behind the other; return the launch."""
    record = _record(TransferKind.SEND, values, link, SENT)
    stamp = stamp.but(lane=LANES[record.kind])
    args = (list(values), forms_of(values), link.name, 1 - link.rank, 0)
    launch = graph.call(
        messages.send,
        args,
        stamp=stamp.but(role=Role.LAUNCH, transfer=record),
        name=f"send_{name}",
        value=[],
    )
    graph.call(
        messages.sent,
        (launch,),
        stamp=stamp.but(role=Role.WAIT),
        name=f"{launch.name}_done",
        value=[],
    )
    return launch


def emit_receive(
    graph: StepGraph, like: Sequence[fx.Node], link: Group, stamp: Stamp, name: str
) -> list[fx.Node]:
    """Emit a receive and its wait; return what it brings.

    Args:
        like: nodes of the sender's, with fake values.
    """
    record = _record(TransferKind.RECEIVE, like, link, RECEIVED)
    stamp = stamp.but(lane=LANES[record.kind])
    forms = forms_of(like)
    assert graph.fake_mode is not None
    device = like[0].meta["val"].device
    with graph.fake_mode:
        values = [
            torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device=device) for f in forms
        ]
    launch = graph.call(
        messages.receive,
        (forms, device, link.name, 1 - link.rank, 0),
        stamp=stamp.but(role=Role.LAUNCH, transfer=record),
        name=f"receive_{name}",
        value=values,
    )
    joined = graph.call(
        messages.received,
        (launch,),
        stamp=stamp.but(role=Role.WAIT),
        name=f"{launch.name}_done",
        value=values,
    )
    return [
        emit_part(graph, joined, i, stamp, name=f"{node.name}_here") for i, node in enumerate(like)
    ]


def _record(kind: TransferKind, values: Sequence[fx.Node], link: Group, resource: str) -> Transfer:
    return Transfer(
        kind,
        full_bytes=sum(map(num_bytes, values)),
        size=2,
        group=link.name,
        stride=link.stride,
        num_tensors=len(values),
        dtype=values[0].meta["val"].dtype,
        axis=AxisRole.PIPELINE.value,
        resource=resource,
    )
