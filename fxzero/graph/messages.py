"""What stages of a pipeline give to each other: how it lies in memory, and what must hold.

    sent = send([y], forms, "7", 1, tag)            arriving = receive(forms, device, "7", 0, tag)
    sent_done = sent(sent)                          arrived = received(arriving); y = arrived[0]

A value is sent behind the stage's forward, a gradient behind its backward. `verify` sees that each
launch does what its record says, and that those over one link stand in the order in which the
schedule's sender gives them, on both sides: some transports match them by nothing else. That both
sides mean the same tensors, and run one schedule, is in a digest that the ranks compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from fxzero.graph.belongings import Finding
from fxzero.graph.stamps import Role, stamp_of
from fxzero.graph.step_graph import StepGraph, segment_of
from fxzero.pipeline.messages import sender_of
from fxzero.transfer import Form, TransferKind

KIND = "fxzero_kind"
"""Attribute of a function that starts a message: which `TransferKind` it is."""
_MESSAGES = (TransferKind.SEND, TransferKind.RECEIVE)


def forms_of(values: Sequence[fx.Node]) -> list[Form]:
    """How tensors travel, by their nodes' fake values."""
    return [Form.of(value.meta["val"]) for value in values]


def set_tags(graph: StepGraph, tag: int) -> None:
    """Give all messages of a graph their tag."""
    for node in graph.nodes(role=Role.LAUNCH):
        record = stamp_of(node).transfer
        if record is not None and record.kind in _MESSAGES:
            node.args = (*node.args[:-1], tag)


def wrong_messages(graph: StepGraph) -> Iterator[Finding]:
    """Messages that do something else than their record says."""
    for launch in graph.nodes(role=Role.LAUNCH):
        record = stamp_of(launch).transfer
        if record is None or record.kind not in _MESSAGES:
            continue
        is_send = record.kind is TransferKind.SEND
        args: tuple[Any, ...] = launch.args
        count = len(args[0])
        forms = args[1] if is_send else args[0]
        moved = sum(form.num_bytes for form in forms)
        group = args[2]
        found = (getattr(launch.target, KIND, None), count, moved, group)
        if found != (record.kind, record.num_tensors, record.full_bytes, record.group):
            yield Finding(
                launch,
                f"{launch.name} calls {launch.target} with {count} tensors of {moved} bytes over "
                f"{group}, and its record says {record.kind}, {record.num_tensors} of "
                f"{record.full_bytes} over {record.group}",
                "Emit messages by fxzero.passes.stage_messages.",
            )
        if is_send and list(forms) != forms_of(args[0]):
            yield Finding(
                launch,
                f"{launch.name} sends tensors in other forms than they have",
                "Emit messages by fxzero.passes.stage_messages.",
            )


def messages_out_of_order(graph: StepGraph) -> Iterator[Finding]:
    """Messages over one link in another order than that in which they are sent."""
    if graph.table is None:
        return
    sent_at = {action: i for row in graph.table.ranks for i, action in enumerate(row)}
    action_of = {segment_of(action): action for action in sent_at}
    last: dict[tuple[TransferKind, str], tuple[int, fx.Node]] = {}
    for launch in graph.nodes(role=Role.LAUNCH):
        record = stamp_of(launch).transfer
        if record is None or record.kind not in _MESSAGES:
            continue
        action = action_of[stamp_of(launch).segment]
        sender = action if record.kind is TransferKind.SEND else sender_of(action)
        at = sent_at[sender]
        link = record.kind, record.group
        before, other = last.get(link, (-1, launch))
        if at <= before:
            yield Finding(
                launch,
                f"{launch.name}, of {sender}, is launched behind {other.name} over the link "
                f"{record.group}, and its sender gives it before: the two would take each other's "
                "tensors",
                "Launch messages in the order of fxzero.passes.order_micro_batches.",
            )
        last[link] = at, launch
