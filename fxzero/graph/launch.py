"""Emit a transfer from its record, and read the record of a call that somebody else made.

    launch  gather_h_0 = all_gather_into_tensor_coalesced([w, b], 8, "0")
    wait    joined = wait(gather_h_0)            one for all of its tensors
    parts   w_full = joined[0]; b_full = joined[1]

Which operator and which arguments a record means is said here and nowhere else: `verify` compares
a launch with what `call_of` makes of its record.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxzero._compat import OpOverload, resolve_process_group
from fxzero.graph.operators import num_bytes, tensor_bytes
from fxzero.graph.stamps import Lane, Role, Stamp
from fxzero.graph.step_graph import StepGraph
from fxzero.ranks.groups import Group
from fxzero.sharding.layout import Axis
from fxzero.transfer import Transfer, TransferKind

_c10d = torch.ops._c10d_functional

LANES = {
    TransferKind.ALL_GATHER: Lane.GATHER,
    TransferKind.BROADCAST: Lane.GATHER,
    TransferKind.REDUCE_SCATTER: Lane.REDUCE,
    TransferKind.ALL_REDUCE: Lane.REDUCE,
    TransferKind.ALL_TO_ALL: Lane.ALL_TO_ALL,
    TransferKind.SEND: Lane.SEND,
    TransferKind.RECEIVE: Lane.RECEIVE,
}
"""Where transfers run."""
IN_PLACE = "fxzero_in_place"
"""In `Node.meta` of a sum over fake ranks: by tensor, whether real ones would make it in place."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


def call_of(record: Transfer, tensors: Sequence[fx.Node]) -> Call:
    """The coalesced collective that a record of parameters or gradients means."""
    sent = list(tensors)
    match record.kind:
        case TransferKind.ALL_GATHER:
            target = _c10d.all_gather_into_tensor_coalesced.default
            return target, (sent, record.size, record.group)
        case TransferKind.REDUCE_SCATTER:
            target = _c10d.reduce_scatter_tensor_coalesced.default
            return target, (sent, record.op, record.size, record.group)
        case TransferKind.ALL_REDUCE:
            return _c10d.all_reduce_coalesced.default, (sent, record.op, record.group)
        case _:
            raise AssertionError(f"no pass makes a transfer of kind {record.kind}")


def wait(launched: list[Tensor]) -> list[Tensor]:
    """Join a coalesced collective: all of its tensors may be read."""
    return [_c10d.wait_tensor(tensor) for tensor in launched]


fx.node.has_side_effect(wait)


def full_bytes(kind: TransferKind, size: int, tensors: Sequence[fx.Node]) -> int:
    """Bytes of the full tensors that a transfer of some tensors assembles or takes apart.

    Args:
        size: how many ranks take part.
    """
    parts = size if kind is TransferKind.ALL_GATHER else 1
    return parts * sum(map(num_bytes, tensors))


def record_for(kind: TransferKind, axis: Axis, tensor: fx.Node, op: str = "") -> Transfer:
    """The transfer of one tensor along an axis of its parameter's mesh."""
    return Transfer(
        kind,
        full_bytes=full_bytes(kind, axis.group.size, [tensor]),
        size=axis.group.size,
        group=axis.group.name,
        stride=axis.group.stride,
        dtype=tensor.meta["val"].dtype,
        op=op,
        axis=axis.role.value,
    )


def emit_transfer(
    graph: StepGraph, tensor: fx.Node, record: Transfer, stamp: Stamp, name: str | None = None
) -> fx.Node:
    """Emit a whole transfer of one tensor, joined at once; return what it brings.

    Args:
        stamp: for all of its nodes, but for lane, role and record.
        name: of what it brings.
    """
    stamp = stamp.but(lane=LANES[record.kind])
    verb = "gather" if stamp.lane is Lane.GATHER else "reduce"
    place = stamp.layer.replace(".", "_") or stamp.bucket
    launch = emit_launch(graph, [tensor], record, stamp, f"{verb}_{place}")
    return emit_part(graph, emit_wait(graph, launch, stamp), 0, stamp, name)


def emit_launch(
    graph: StepGraph, tensors: Sequence[fx.Node], record: Transfer, stamp: Stamp, name: str
) -> fx.Node:
    """Emit a launch, stamped with its record."""
    target, arguments = call_of(record, tensors)
    stamp = stamp.but(role=Role.LAUNCH, transfer=record)
    return graph.call(target, arguments, stamp=stamp, name=name)


def emit_copy(
    graph: StepGraph,
    call: Call,
    join: Callable[..., Any],
    record: Transfer,
    stamp: Stamp,
    name: str,
    values: list[Any],
    *,
    joined_on: Lane | None = None,
) -> list[fx.Node]:
    """Emit a whole copy between pools, joined at once; return what it brings.

    Args:
        call: what starts it, of `fxzero.runtime.copies`.
        join: what waits for it there.
        stamp: for all of its nodes, with its lane; it names a parameter for each tensor, or none.
        joined_on: the lane that waits, if that is not compute.
    """
    launch = graph.call(
        *call, stamp=stamp.but(role=Role.LAUNCH, transfer=record), name=name, value=values
    )
    stamp = stamp.but(lane=joined_on or stamp.lane)
    joined = graph.call(
        join,
        (launch,),
        stamp=stamp.but(role=Role.WAIT),
        name=f"{launch.name}_{'arrived' if joined_on else 'done'}",
        value=values,
    )
    keys: list[tuple[str, ...]] = [(key,) for key in stamp.params] or [()] * len(values)
    return [emit_part(graph, joined, i, stamp.but(params=key)) for i, key in enumerate(keys)]


def emit_wait(graph: StepGraph, launch: fx.Node, stamp: Stamp) -> fx.Node:
    """Emit the wait of a launch."""
    stamp = stamp.but(role=Role.WAIT)
    value = list(launch.meta["val"])
    return graph.call(wait, (launch,), stamp=stamp, name=f"{launch.name}_done", value=value)


def emit_part(
    graph: StepGraph, joined: fx.Node, index: int, stamp: Stamp, name: str | None = None
) -> fx.Node:
    """Emit one tensor of what was waited for."""
    stamp = stamp.but(role=Role.PART)
    return graph.call(operator.getitem, (joined, index), stamp=stamp, name=name)


def record_of_call(node: fx.Node) -> Transfer | None:
    """What a model's own functional collective does; None of any other node."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "_c10d_functional":
        return None
    own = target._opname
    kind = next((kind for words, kind in _OWN.items() if own.startswith(words)), None)
    if kind is None:
        return None
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    given |= node.kwargs
    name = str(given.get("group_name", ""))
    group = Group.of(resolve_process_group(name))
    sent = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    values = node.meta["val"]
    made = values if isinstance(values, (list, tuple)) else [values]
    sent_bytes = sum(tensor_bytes(n.meta["val"]) for n in sent)
    return Transfer(
        kind,
        full_bytes=max(sent_bytes, sum(map(tensor_bytes, made))),
        size=group.size,
        group=name,
        stride=group.stride,
        num_tensors=len(sent),
        dtype=sent[0].meta["val"].dtype,
        op=str(given.get("reduce_op", "")),
    )


_OWN = {
    "all_gather_into_tensor": TransferKind.ALL_GATHER,
    "reduce_scatter_tensor": TransferKind.REDUCE_SCATTER,
    "all_reduce": TransferKind.ALL_REDUCE,
    "all_to_all_single": TransferKind.ALL_TO_ALL,
    "broadcast": TransferKind.BROADCAST,
}
"""How the names of functional collectives begin."""


WAIT_OF_CALL = _c10d.wait_tensor.default
"""What joins a model's own functional collective."""


def is_wait_of_call(node: fx.Node) -> bool:
    """Whether a node joins a model's own functional collective."""
    return node.target is WAIT_OF_CALL
