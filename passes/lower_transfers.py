"""Turn coalesced collectives into what the process group's backend does best.

NCCL runs a list as one group launch: nothing changes. Gloo packs a list into a flat
scratch buffer first, and reduce-scatters by all-reducing everything; there

    gather([a, b])        →  gather([a, b])                     messages; small tensors share one
    reduce_scatter([g])   →  mean(exchange([g]), ranks)         half the bytes on two ranks
    all_reduce([g])       →  all_reduce([g])                    in place, if nobody else reads g

The sum over ranks is then taken by each rank for its own rows, in rank order.

A model's own transfers run as they are written. Gloo's threads hold what they have brought until
they are scheduled again, so that its memory is given back behind the last reader:

    y = wait(all_reduce(x)); z = gelu(y)  →  y = wait(all_reduce(x)); z = gelu(y); release([y])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.aliases import root, view_base
from fxzero.graph.launch import IN_PLACE, Call
from fxzero.graph.operators import num_bytes, writes_memory
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.passes.release_saved import MIN_BYTES, last_reader
from fxzero.ranks.groups import backend_of
from fxzero.regions.cutout import end_of_run
from fxzero.runtime import collectives
from fxzero.transfer import Transfer, TransferKind


def is_own(node: fx.Node) -> bool:
    """Whether nobody but the collective reads a node's memory, through views or directly."""
    while len(node.users) == 1 and node.op == "call_function":
        base = view_base(node)
        if base is None:
            return True
        node = base
    return False


def owned(sent: Sequence[fx.Node]) -> list[bool]:
    """By tensor, whether it is sent once, and nobody else reads it."""
    # A gradient of two parameters (of ``a + b``, say) is sent twice, and is neither's own.
    times = Counter(map(root, sent))
    return [times[root(node)] == 1 and is_own(node) for node in sent]


def messages_of(record: Transfer, tensors: Sequence[fx.Node]) -> tuple[Call, Call]:
    """How gloo runs a transfer: the launch and, its first argument to come, the wait."""
    sent = list(tensors)
    own = owned(sent)
    launch: Call
    match record.kind:
        case TransferKind.ALL_GATHER:
            launch = (collectives.gather, (sent, record.size, record.group))
            return launch, (collectives.join, ())
        case TransferKind.REDUCE_SCATTER:
            assert record.op == "avg"
            launch = (collectives.exchange, (sent, record.size, record.group, own))
            return launch, (collectives.join_exchange, (record.size,))
        case TransferKind.ALL_REDUCE:
            assert record.op in ("avg", "sum")
            launch = (collectives.all_reduce, (sent, record.group, own))
            divisor = record.size if record.op == "avg" else 1
            return launch, (collectives.join_sum, (divisor,))
        case _:
            raise AssertionError(f"no pass makes a transfer of kind {record.kind}")


def lower_transfer(transfer: TransferNodes) -> None:
    """Let gloo's own functions launch a transfer and join it."""
    launch_call, wait_call = messages_of(transfer.record, transfer.tensors)
    for node, (function, arguments) in (
        (transfer.launch, launch_call),
        (transfer.wait, (wait_call[0], (transfer.launch, *wait_call[1]))),
    ):
        node.target, node.args = function, arguments
        set_stamp(node, stamp_of(node).but(made_by="lower_transfers"))


def runs_on_gloo(transfer: TransferNodes) -> bool:
    """Whether a transfer that a pass has made goes over gloo."""
    if _is_own(transfer) or transfer.is_copy or transfer.is_message:
        return False
    return _goes_over_gloo(transfer)


def _is_own(transfer: TransferNodes) -> bool:
    """Whether a transfer is the model's own: it runs as its author wrote it."""
    return stamp_of(transfer.launch).made_by == "capture"


def _goes_over_gloo(transfer: TransferNodes) -> bool:
    on_cpu = transfer.tensors[0].meta["val"].device.type == "cpu"
    return on_cpu and backend_of(transfer.record.group, "cpu") == "gloo"


def release_own(graph: StepGraph, *, fuses: bool) -> int:
    """Give back what the model's own transfers over gloo have brought as soon as it was read;
    return how many tensors.

    Args:
        fuses: whether runs of compute will be compiled regions.
    """
    own = [
        transfer
        for transfer in graph.transfers()
        if _is_own(transfer)
        and not writes_memory(transfer.launch)  # what it brings is somebody else's memory
        and _goes_over_gloo(transfer)
    ]
    count = 0
    for result in (result for transfer in own for result in transfer.results):
        last = last_reader(result) if result.users else result
        if last is None or num_bytes(result) < MIN_BYTES:
            continue
        count += 1
        stamp = stamp_of(last).but(lane=Lane.COMPUTE, role=Role.RELEASE, params=(), transfer=None)
        with graph.graph.inserting_after(end_of_run(last) if fuses else last):
            graph.call(
                torch.ops.fxzero.release.default,
                ([result],),
                stamp=stamp.but(made_by="lower_transfers"),
            )
    return count


def lower_transfers(graph: StepGraph) -> int:
    """Lower all transfers that go over gloo; return how many there are."""
    transfers = [t for t in graph.transfers() if runs_on_gloo(t)]
    for transfer in transfers:
        lower_transfer(transfer)
    return len(transfers)


def note_sums_in_place(graph: StepGraph) -> None:
    """Note which sums gloo would make in place, in a step whose ranks are fake: what their memory
    is found out by."""
    for transfer in graph.transfers():
        kind, group = transfer.record.kind, transfer.record.group
        is_fake = kind is TransferKind.ALL_REDUCE and backend_of(group, "cpu") == "fake"
        if is_fake and not _is_own(transfer):
            transfer.launch.meta[IN_PLACE] = owned(transfer.tensors)


@dataclass(frozen=True)
class LowerTransfers(Pass):
    """Choose the collectives that the backend runs without packing lists."""

    name: ClassVar[str] = "lower_transfers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        released = release_own(graph, fuses=ctx.fuses)
        notes = {"released": released} if released else {}
        if ctx.on_cpu:
            note_sums_in_place(graph)
        return Notes(lowered=lower_transfers(graph), **notes)
