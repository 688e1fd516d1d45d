"""What must hold of updates on disk: what `verify` asks of what reads and what writes around them.

    s = read([w], [[m], [v], [n]])    what the update changes, all of it and nothing else
    t = taken(s)
    u = stored_adamw([w], [h], …, t)
    d = write(t, u)                   what the update leaves
    …; join_write(d); join([u])          before the step ends

The four stand in a row: were compute to wait for something between them, it might wait for reads
that wait for buffers which only this update lets go of, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import fx

from fxzero.graph.belongings import Finding
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import Lane, Role, stamp_of
from fxzero.graph.step_graph import StepGraph, TransferNodes
from fxzero.transfer import DISK_READ, DISK_WRITE, Pool


def is_stream(copy: TransferNodes) -> bool:
    """Whether a copy goes between the disk and an update on the host."""
    return {copy.record.source, copy.record.target} == {Pool.HOST, Pool.DISK}


def wrong_streams(graph: StepGraph, streams: list[TransferNodes]) -> Iterator[Finding]:
    """Updates that do not get all that they change, or whose result is not written."""
    reads = {copy.wait: copy for copy in streams if copy.stamp.lane is Lane.READ}
    writes = {copy.launch.args[1]: copy for copy in streams if copy.stamp.lane is Lane.WRITE}
    stored = [
        node for node in graph.nodes(role=Role.UPDATE) if getattr(node.target, "bucket", None)
    ]
    for update in stored if streams else ():
        taken = update.args[6] if len(update.args) > 6 else None
        read = reads.pop(taken, None) if isinstance(taken, fx.Node) else None
        write = writes.pop(update, None)
        if read is None or write is None:
            yield Finding(
                update,
                f"{update.name}, which changes what is on disk, is "
                f"{'not read' if read is None else 'not written'}",
                "Place what reads and what writes: fxzero.passes.join_copies.",
            )
            continue
        yield from _wrong_row(update, read, write)
        yield from _wrong_content(update, read, write)
    for copy in (*reads.values(), *writes.values()):
        yield Finding(
            copy.launch,
            f"{copy.launch.name} moves what no update on disk changes",
            "Every update on disk is read once and written once.",
        )


def _wrong_row(update: fx.Node, read: TransferNodes, write: TransferNodes) -> Iterator[Finding]:
    row = [read.launch, read.wait, update, write.launch]
    if [row[0], row[0].next, row[0].next.next, row[0].next.next.next] != row:
        yield Finding(
            update,
            f"something stands between {read.launch.name} and {write.launch.name}: compute may "
            "wait there for reads that wait for this update",
            "Launch the read, the update and the write in a row.",
        )


def _wrong_content(update: fx.Node, read: TransferNodes, write: TransferNodes) -> Iterator[Finding]:
    target: Any = update.target
    bucket = target.bucket
    arguments: Any = update.args
    params, _, state = arguments[:3]
    moved: list[Any] = [*params, *chain.from_iterable(state[: len(bucket.names)])]
    on_disk = [node for node in moved if stamp_of(node).pool is Pool.DISK]
    moved_bytes = sum(map(num_bytes, moved))
    reads: Any = read.launch.target
    if (
        list(read.launch.args[:2]) != [params, state]
        or reads.bucket is not bucket
        or bucket.keys != stamp_of(update).params
        or len(on_disk) != len(moved)
    ):
        yield Finding(
            update,
            f"{update.name} changes other tensors than {read.launch.name} reads from disk, or some "
            "that are not there",
            "Read what the update changes: its parameters, and state as large as they are.",
        )
    for copy, resource, pools in (
        (read, DISK_READ, (Pool.DISK, Pool.HOST)),
        (write, DISK_WRITE, (Pool.HOST, Pool.DISK)),
    ):
        record = copy.record
        says = (record.full_bytes, record.num_tensors, record.resource, record.bytes_per_s)
        does = (moved_bytes, len(moved), resource, copy.launch.args[-1])
        if (*says, record.source, record.target) != (*does, *pools):
            yield Finding(
                copy.launch,
                f"{copy.launch.name} moves {does[0]} bytes in {does[1]} tensors, and its record "
                f"says {says}",
                "Write the record when the tensors are known.",
            )
