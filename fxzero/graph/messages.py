"""What stages of a pipeline give to each other: how it lies in memory, and what must hold.

    sent = send([y], forms, "7", 1, tag)            arriving = receive(forms, device, "7", 0, tag)
    sent_done = sent(sent)                          arrived = received(arriving); y = arrived[0]

A value is sent behind the stage's forward, a gradient behind its backward. `verify` sees that each
launch does what its record says, over the link of the schedule's two stages; that both sides mean
the same tensors is in a digest that the ranks compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxzero.graph.belongings import Finding
from fxzero.graph.stamps import Role, stamp_of
from fxzero.graph.step_graph import StepGraph
from fxzero.transfer import TransferKind

KIND = "fxzero_kind"
"""Attribute of a function that starts a message: which `TransferKind` it is."""
_MESSAGES = (TransferKind.SEND, TransferKind.RECEIVE)


class Form(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """Of a tensor that lies in one piece: as it is, in whatever order of dims. Of any other:
        contiguous."""
        stride = tuple(tensor.stride()) if in_one_piece(tensor) else _contiguous(tensor.shape)
        return Form(tuple(tensor.shape), stride, tensor.dtype)


def in_one_piece(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory without gaps, each once."""
    expected = 1
    pairs = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in pairs:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: Any) -> tuple[int, ...]:
    found: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


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
    """Messages that do something else than their record says, or than the schedule does."""
    for launch in graph.nodes(role=Role.LAUNCH):
        record = stamp_of(launch).transfer
        if record is None or record.kind not in _MESSAGES:
            continue
        is_send = record.kind is TransferKind.SEND
        args: tuple[Any, ...] = launch.args
        count = len(args[0])
        forms = args[1] if is_send else args[0]
        moved = sum(_bytes(form) for form in forms)
        group = args[2]
        found = (getattr(launch.target, KIND, None), count, moved, group)
        if found != (record.kind, record.num_tensors, record.full_bytes, record.group):
            yield Finding(
                launch,
                f"{launch.name} calls {launch.target} with {count} tensors of {moved} bytes over "
                f"{group}, and its record says {record.kind}, {record.num_tensors} of "
                f"{record.full_bytes} over {record.group}",
                "Emit messages by fxzero.graph.messages.",
            )
        if is_send and [tuple(f) for f in forms] != [tuple(f) for f in forms_of(args[0])]:
            yield Finding(
                launch,
                f"{launch.name} sends tensors in other forms than they have",
                "Emit messages by fxzero.graph.messages.",
            )


def _bytes(form: Form) -> int:
    return math.prod(form.shape) * form.dtype.itemsize
