"""Let one collective carry a layer's parameters.

    gather([a]); gather([b]); gather([c])   →   gather([a, b]); gather([c])

Transfers of one lane, phase, layer, group and dtype join until a byte cap. Buckets whose time
would be mostly latency join a neighbour. Coalesced collectives take lists, so nothing is copied
into or out of a flat buffer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxzero.cost.model import Collective, CostModel, Message, message_of
from fxzero.errors import ConfigError
from fxzero.graph import Lane, Segment, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import Role, set_stamp, stamp_of
from fxzero.graph.step_graph import Transfer
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.settings import at_least


def _kind(transfer: Transfer) -> tuple[object, ...]:
    """What must be equal for two transfers to share a collective."""
    return (transfer.launch.target, transfer.launch.args[1:], transfer.tensors[0].meta["val"].dtype)


def wire_bytes(transfer: Transfer) -> int:
    """Bytes of the full tensors that a transfer assembles or takes apart."""
    full = transfer.waits if transfer.stamp.lane is Lane.GATHER else transfer.tensors
    return sum(num_bytes(node) for node in full)


def group(transfers: list[Transfer], cap_bytes: int, min_bytes: int = 0) -> list[list[Transfer]]:
    """Split transfers, in order of need, into buckets: a layer's, then small ones with a
    neighbour."""
    return join_small(by_layer(transfers, cap_bytes), cap_bytes, min_bytes)


def by_layer(transfers: list[Transfer], cap_bytes: int) -> list[list[Transfer]]:
    """Buckets of one layer each, a layer above the cap in several."""
    open_buckets: dict[tuple[object, ...], list[Transfer]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    buckets: list[list[Transfer]] = []
    for transfer in transfers:
        key = (transfer.stamp.layer, *_kind(transfer))
        size = wire_bytes(transfer)
        if key in open_buckets and sizes[key] + size <= cap_bytes:
            open_buckets[key].append(transfer)
            sizes[key] += size
        else:
            open_buckets[key] = [transfer]
            sizes[key] = size
            buckets.append(open_buckets[key])
    return buckets


def join_small(
    buckets: list[list[Transfer]], cap_bytes: int, min_bytes: int
) -> list[list[Transfer]]:
    """Let a bucket below the minimum travel with the next one, and the last with the one before.

    Joined buckets stay below the cap.
    """
    joined: list[list[Transfer]] = []
    sizes: list[int] = []
    for i, bucket in enumerate(buckets):
        size = sum(map(wire_bytes, bucket))
        last = i == len(buckets) - 1
        small = joined and (sizes[-1] < min_bytes or (last and size < min_bytes))
        if small and _kind(joined[-1][0]) == _kind(bucket[0]) and sizes[-1] + size <= cap_bytes:
            joined[-1] = joined[-1] + bucket
            sizes[-1] += size
        else:
            joined.append(bucket)
            sizes.append(size)
    return joined


LATENCY_SHARE = 0.1
"""How much of a bucket's time may be latency."""


def least_bytes(costs: CostModel, kind: Collective, size: int) -> int:
    """The bytes from which on a collective's latency is a small part of its time."""
    small, large = (costs.transfer(Message(kind, amount, size)).wire_us for amount in (0, 1 << 20))
    us_per_byte = (large - small) / (1 << 20)
    if us_per_byte <= 0:
        return 0
    return int(small * (1 - LATENCY_SHARE) / LATENCY_SHARE / us_per_byte)


def default_cap(transfers: list[Transfer], costs: CostModel, message: Message) -> int:
    """The cap on the devices that the transfers run on, and for what their transfers cost.

    On CPU buckets are small, and smaller still where the host moves the bytes itself: nothing
    can be hidden there, so that less in flight is all there is to win.
    """
    if any(t.tensors[0].meta["val"].device.type != "cpu" for t in transfers):
        return 256 << 20
    cost = costs.transfer(replace(message, num_bytes=8 << 20))
    return (8 << 20) if cost.is_worth_hiding else (4 << 20)


def merge(graph: StepGraph, transfers: list[Transfer], name: str) -> None:
    """Make one transfer of several. A gather moves to the first, a reduce to the last."""
    lane = transfers[0].stamp.lane
    params = tuple(key for t in transfers for key in t.stamp.params)
    stamp = replace(transfers[0].stamp, params=params, bucket=name, made_by="bucket")
    if len(transfers) > 1:
        _fuse(graph, transfers, stamp, first=lane is Lane.GATHER)
        return
    (only,) = transfers
    for node in (*only.prepare, only.launch, *only.parts, *only.waits, *only.finish):
        set_stamp(node, replace(stamp_of(node), bucket=name))


def _fuse(graph: StepGraph, transfers: list[Transfer], stamp: object, *, first: bool) -> None:
    from fxzero.graph import Stamp

    assert isinstance(stamp, Stamp)
    launches = [t.launch for t in transfers]
    anchor = min(launches) if first else max(launches)
    if first:
        for transfer in transfers:
            for node in transfer.prepare:
                anchor.prepend(node)
    sent = [node for t in transfers for node in t.tensors]
    with graph.graph.inserting_before(anchor), graph.made_for(anchor):
        launch = graph.call(
            anchor.target,  # type: ignore[arg-type]
            (sent, *anchor.args[1:]),
            stamp=replace(stamp, role=Role.LAUNCH),
            name=anchor.name,
        )
    position = 0
    for transfer in transfers:
        for part, wait in zip(transfer.parts, transfer.waits, strict=True):
            with graph.graph.inserting_before(wait):
                piece = graph.call(
                    operator.getitem,
                    (launch, position),
                    stamp=replace(stamp_of(part), bucket=stamp.bucket),
                )
            position += 1
            part.replace_all_uses_with(piece)
            graph.graph.erase_node(part)
        for node in (*transfer.prepare, *transfer.waits, *transfer.finish):
            set_stamp(node, replace(stamp_of(node), bucket=stamp.bucket))
        graph.graph.erase_node(transfer.launch)
    if not first:
        _waits_after(launch, transfers)


def _waits_after(launch: fx.Node, transfers: list[Transfer]) -> None:
    """Move what follows the earlier launches behind the joint one, in order."""
    tail: list[fx.Node] = []
    for transfer in transfers:
        for wait in transfer.waits:
            tail += [*wait.all_input_nodes, wait]
        tail += transfer.finish
        sums = {u for n in transfer.results for u in n.users}
        tail += sorted(u for u in sums if stamp_of(u).role is Role.ACCUMULATE)
    for node in reversed(tail):
        launch.append(node)


def join_releases(graph: StepGraph) -> int:
    """End the lives of one bucket's parameters together, at the last one's end."""
    owner_bucket = {
        wait: t.stamp.bucket for t in graph.transfers(name="gather") for wait in t.waits
    }
    by_bucket: dict[tuple[str, Segment], list[fx.Node]] = {}
    for node in graph.nodes(role=Role.RELEASE):
        tensors = node.args[0]
        assert isinstance(tensors, (list, tuple))
        first = tensors[0]
        assert isinstance(first, fx.Node)
        key = (owner_bucket.get(first, node.name), stamp_of(node).segment)
        by_bucket.setdefault(key, []).append(node)
    for (bucket, _), nodes in by_bucket.items():
        last = nodes[-1]
        last.args = ([t for n in nodes for t in n.args[0]],)  # type: ignore[union-attr]
        params = tuple(k for n in nodes for k in stamp_of(n).params)
        set_stamp(last, replace(stamp_of(last), params=params, bucket=bucket))
        for node in nodes[:-1]:
            graph.graph.erase_node(node)
    return len(by_bucket)


@dataclass(frozen=True)
class Bucket(Pass):
    """Join the transfers of a layer, and small ones with a neighbour."""

    name: ClassVar[str] = "bucket"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED, Fact.REDUCED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})

    cap_bytes: int | None = None
    """Most bytes of full tensors in one bucket. A larger parameter has its own. The default is
    256 MiB, and on CPU, where gloo loses nothing by small messages, 8 MiB, or 4 MiB where the
    host moves the bytes itself and nothing can be hidden."""

    min_bytes: int | None = None
    """A bucket below this travels with a neighbour. The default is where latency is a tenth of a
    transfer's time, by the cost model, and a quarter of the cap at most."""

    def __post_init__(self) -> None:
        """What a bucket may carry, and what it should, must leave room for each other."""
        super().__post_init__()
        at_least("bucket.cap_bytes", self.cap_bytes, 1)
        at_least("bucket.min_bytes", self.min_bytes, 0)
        if self.cap_bytes is not None and (self.min_bytes or 0) > self.cap_bytes:
            raise ConfigError(
                f"bucket.min_bytes={self.min_bytes} is more than bucket.cap_bytes="
                f"{self.cap_bytes}: no bucket can be both. Raise the cap, or drop min_bytes."
            )

    def _least(self, costs: CostModel, message: Message, cap_bytes: int) -> int:
        """Below how many bytes a bucket travels with a neighbour."""
        if self.min_bytes is not None:
            return self.min_bytes
        return min(least_bytes(costs, message.kind, message.size), cap_bytes // 4)

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        counts = {}
        for lane in (Lane.GATHER, Lane.REDUCE):
            made = 0
            for segment in graph.segments():
                # The all-reduce across replicas starts from what the reduce-scatter left,
                # so each operator's transfers are joined before the next one's are looked at.
                targets: dict[object, None] = {}
                for transfer in graph.transfers(segment=segment, name=lane.value):
                    targets[transfer.launch.target, transfer.launch.args[1:]] = None
                for target in targets:
                    chosen = [
                        t
                        for t in graph.transfers(segment=segment, name=lane.value)
                        if (t.launch.target, t.launch.args[1:]) == target
                    ]
                    message = message_of(graph, chosen[0])
                    cap = self.cap_bytes or default_cap(chosen, ctx.costs, message)
                    least = self._least(ctx.costs, message, cap)
                    for members in group(chosen, cap, least):
                        name = f"{lane.value}.{segment.phase.value}.{made}"
                        merge(graph, members, name)
                        made += 1
            counts[lane.value] = made
        join_releases(graph)
        return Notes(gathers=counts["gather"], reduces=counts["reduce"])
