"""Let one collective carry a layer's parameters.

    gather([a]); gather([b]); gather([c])   →   gather([a, b]); gather([c])

Transfers of one lane, phase, layer, group and dtype join until a byte cap. Buckets whose time
would be mostly latency join a neighbour. Coalesced collectives take lists, so nothing is copied
into or out of a flat buffer. A block of a parameter (`tile_linear`) travels alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from fxzero._compat import set_args
from fxzero.cost.model import CostModel
from fxzero.errors import ConfigError
from fxzero.graph import Lane, Phase, Segment, StepGraph
from fxzero.graph.launch import emit_launch, emit_wait
from fxzero.graph.stamps import Role, set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes, transfer_nodes
from fxzero.passes.base import Context, Fact, Notes, Room
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.settings import at_least
from fxzero.transfer import Transfer


def group(
    transfers: list[TransferNodes], cap_bytes: int, min_bytes: int = 0
) -> list[list[TransferNodes]]:
    """Split transfers, in order of need, into buckets: a layer's, then small ones with a
    neighbour."""
    return join_small(by_layer(transfers, cap_bytes), cap_bytes, min_bytes)


def by_layer(transfers: list[TransferNodes], cap_bytes: int) -> list[list[TransferNodes]]:
    """Buckets of one layer each, a layer above the cap in several."""
    open_buckets: dict[tuple[object, ...], list[TransferNodes]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    buckets: list[list[TransferNodes]] = []
    for transfer in transfers:
        key = (transfer.stamp.layer, *transfer.record.combines)
        size = transfer.record.full_bytes
        if key in open_buckets and sizes[key] + size <= cap_bytes:
            open_buckets[key].append(transfer)
            sizes[key] += size
        else:
            open_buckets[key] = [transfer]
            sizes[key] = size
            buckets.append(open_buckets[key])
    return buckets


def join_small(
    buckets: list[list[TransferNodes]], cap_bytes: int, min_bytes: int
) -> list[list[TransferNodes]]:
    """Let a bucket below the minimum travel with the next one, and the last with the one before.

    Joined buckets stay below the cap. Where a full one stands between two small ones, biases
    between matrices that have a bucket each, the two travel together nevertheless.
    """
    bytes_of = [sum(transfer.record.full_bytes for transfer in bucket) for bucket in buckets]
    kinds = [bucket[0].record.combines for bucket in buckets]
    least: dict[object, int] = {}
    for kind, size in zip(kinds, bytes_of, strict=True):
        least[kind] = min(size, least.get(kind, size))
    joined: list[list[TransferNodes]] = []
    sizes: list[int] = []
    last_kind: object = None
    with_room: dict[object, list[int]] = {kind: [] for kind in least}
    """By kind, the joined buckets to which the smallest one of the kind could be added."""
    for i, (bucket, kind, size) in enumerate(zip(buckets, kinds, bytes_of, strict=True)):
        is_small = size < min_bytes
        if is_small:
            before = reversed(with_room[kind])
        else:
            before = reversed([len(joined) - 1] if kind == last_kind else [])
        k = next((k for k in before if sizes[k] + size <= cap_bytes), None)
        is_last = i == len(buckets) - 1
        if k is not None and (sizes[k] < min_bytes or (is_small and is_last)):
            joined[k] = joined[k] + bucket
            sizes[k] += size
            if sizes[k] + least[kind] > cap_bytes and k in with_room[kind]:
                with_room[kind].remove(k)
        else:
            if size + least[kind] <= cap_bytes:
                with_room[kind].append(len(joined))
            joined.append(bucket)
            sizes.append(size)
            last_kind = kind
    return joined


SMALL_PARTS = 4
"""Into how many buckets one is split where transfers shall hold as little as they can."""
LATENCY_SHARE = 0.1
"""How much of a bucket's time may be latency."""


def least_bytes(costs: CostModel, like: Transfer) -> int:
    """The bytes from which on latency is a small part of a transfer's time."""
    small, large = (costs.transfer(replace(like, full_bytes=b)).wire_us for b in (0, 1 << 20))
    us_per_byte = (large - small) / (1 << 20)
    if us_per_byte <= 0:
        return 0
    return int(small * (1 - LATENCY_SHARE) / LATENCY_SHARE / us_per_byte)


def default_cap(transfers: list[TransferNodes], costs: CostModel) -> int:
    """The cap for what the transfers cost.

    A device's own engines move large buckets, which cost the host nothing by the byte. On CPU
    buckets are small, and smaller still where the host moves the bytes itself: nothing can be
    hidden there, so that less in flight is all there is to win.
    """
    empty, full = (
        costs.transfer(replace(transfers[0].record, full_bytes=b, num_tensors=1))
        for b in (0, 8 << 20)
    )
    on_device = any(t.tensors[0].meta["val"].device.type != "cpu" for t in transfers)
    if on_device or full.host_us <= empty.host_us:
        return 256 << 20
    return (8 << 20) if full.is_worth_hiding else (4 << 20)


def merge(graph: StepGraph, transfers: list[TransferNodes], name: str) -> None:
    """Make one transfer of several. A gather moves to the first, a reduce to the last."""
    for transfer in transfers:
        for node in (*transfer.prepare, *transfer.parts, *transfer.finish):
            set_stamp(node, stamp_of(node).but(bucket=name))
    if len(transfers) > 1:
        _fuse(graph, transfers, name)
    else:
        for node in (transfers[0].launch, transfers[0].wait):
            set_stamp(node, stamp_of(node).but(bucket=name))


def _fuse(graph: StepGraph, transfers: list[TransferNodes], name: str) -> None:
    """One launch and one wait instead of several; parts stand right behind the wait."""
    gathers = transfers[0].stamp.lane is Lane.GATHER
    launches = [t.launch for t in transfers]
    anchor = min(launches) if gathers else max(launches)
    if gathers:
        for transfer in transfers:
            for node in transfer.prepare:
                anchor.prepend(node)
    params = tuple(key for t in transfers for key in t.stamp.params)
    stamp = transfers[0].stamp.but(params=params, bucket=name, made_by="bucket")
    record = transfers[0].record.joined(*(t.record for t in transfers[1:]))
    with graph.graph.inserting_before(anchor), graph.made_for(anchor):
        sent = [node for t in transfers for node in t.tensors]
        launch = emit_launch(graph, sent, record, stamp, anchor.name)
    before = min(t.wait for t in transfers) if gathers else launch.next
    with graph.graph.inserting_before(before), graph.made_for(launch):
        joined = emit_wait(graph, launch, stamp)
    old = [part for t in transfers for part in t.parts]
    behind = joined
    for index, part in enumerate(old):
        behind.append(part)
        set_args(part, (joined, index))
        behind = part
    for transfer in transfers:
        graph.graph.erase_node(transfer.wait)
        graph.graph.erase_node(transfer.launch)
    if not gathers:
        _follow(behind, transfers)


def _follow(behind: fx.Node, transfers: list[TransferNodes]) -> None:
    """Move what the earlier transfers were followed by behind the joint one, in order."""
    for node in reversed([node for transfer in transfers for node in _tail(transfer)]):
        behind.append(node)


def _tail(transfer: TransferNodes) -> list[fx.Node]:
    """What a reduce is followed by: among it the reduce across replicas that starts from what it
    has left, which is still by itself."""
    users = sorted({u for n in transfer.results for u in n.users})
    tail = [*transfer.finish, *(u for u in users if stamp_of(u).role is Role.ACCUMULATE)]
    for user in users:
        if stamp_of(user).role is Role.LAUNCH:
            across = transfer_nodes(user)
            tail += [*across.prepare, across.launch, across.wait, *across.parts, *_tail(across)]
    return tail


def join_releases(graph: StepGraph) -> int:
    """End the lives of one bucket's parameters together, at the last one's end."""
    by_bucket: dict[tuple[str, Segment], list[fx.Node]] = {}
    for node in graph.nodes(role=Role.RELEASE):
        first = node.all_input_nodes[0]
        key = (stamp_of(first).bucket or node.name, stamp_of(node).segment)
        by_bucket.setdefault(key, []).append(node)
    for (bucket, _), nodes in by_bucket.items():
        last = nodes[-1]
        last.args = ([t for n in nodes for t in n.args[0]],)  # type: ignore[union-attr]
        params = tuple(k for n in nodes for k in stamp_of(n).params)
        set_stamp(last, stamp_of(last).but(params=params, bucket=bucket))
        for node in nodes[:-1]:
            graph.graph.erase_node(node)
    return len(by_bucket)


@dataclass(frozen=True)
class Carried:
    """One bucket: what one transfer shall carry."""

    name: str
    lane: Lane
    phase: Phase
    micro_step: int
    axis: int
    """Which of the segment's kinds of transfers on this lane, in order of their first one: a
    reduce-scatter, then the all-reduce across replicas."""
    params: tuple[str, ...]
    """By name, in order."""
    full_bytes: int
    stage: int = 0
    """Of a pipeline, the stage whose parameters it moves."""
    half: int = 0
    """Of its backward, if that is run in two."""


@dataclass(frozen=True)
class Buckets(Decision):
    """What travels together."""

    buckets: tuple[Carried, ...]
    cap_bytes: tuple[int, ...]
    """The caps that held, distinct ones."""
    least_bytes: tuple[int, ...]
    """Below what a bucket travels with a neighbour, where latency is a tenth of its time."""


Along = tuple[object, ...]
"""What a transfer does, and over which ranks."""


Kinds = dict[Along, list[TransferNodes]]


def movable(graph: StepGraph, lane: Lane) -> dict[Segment, Kinds]:
    """The transfers of parameters or of gradients, by segment and kind; a model's own stay as they
    are.

    What goes to the same ranks in the same way is of one kind.
    """
    found: dict[Segment, Kinds] = {}
    for transfer in graph.transfers(name=lane.value):
        if transfer.of_parameters:
            record = transfer.record
            kinds = found.setdefault(transfer.stamp.segment, {})
            kinds.setdefault((record.kind, record.group, record.op), []).append(transfer)
    return found


@dataclass(frozen=True)
class _Movable:
    """The transfers of a graph before they are joined."""

    graph: StepGraph
    by_lane: dict[Lane, dict[Segment, Kinds]]


@dataclass(frozen=True)
class Bucket(DecidingPass[Buckets]):
    """Join the transfers of a layer, and small ones with a neighbour."""

    name: ClassVar[str] = "bucket"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED, Fact.REDUCED, Fact.EXPANDED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    decides: ClassVar[type[Any]] = Buckets

    cap_bytes: int | None = None
    """Most bytes of full tensors in one bucket. A larger parameter has its own. The default is
    256 MiB, and where the host moves the bytes, as gloo does, which loses nothing by small
    messages, 8 MiB, or 4 MiB where that leaves nothing to hide them behind; a quarter of that
    where a `memory_budget` leaves no room for more."""

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

    def _least(self, costs: CostModel, like: Transfer, cap_bytes: int) -> int:
        """Below how many bytes a bucket travels with a neighbour."""
        if self.min_bytes is not None:
            return self.min_bytes
        return min(least_bytes(costs, like), cap_bytes // 4)

    def _movable(self, graph: StepGraph, ctx: Context) -> dict[Lane, dict[Segment, Kinds]]:
        """What can travel together, found once for each graph."""
        known = ctx.scratch.get(self.name)
        if isinstance(known, _Movable) and known.graph is graph:
            return known.by_lane
        made = _Movable(graph, {lane: movable(graph, lane) for lane in (Lane.GATHER, Lane.REDUCE)})
        ctx.scratch[self.name] = made
        return made.by_lane

    def question(self, graph: StepGraph, ctx: Context) -> str:
        """Ranks bucket alike where they move the same parameters in the same order, in the same
        segments: of one micro-batch gradients travel in its first backward, of two in the second.
        """
        moved = (
            (segment, transfer)
            for segments in self._movable(graph, ctx).values()
            for segment, kinds in segments.items()
            for transfers in kinds.values()
            for transfer in transfers
        )
        room = "" if ctx.level is None else ctx.level.room
        lines = (
            f"{segment} {t.record.kind} {t.record.full_bytes} {t.stamp.params}"
            for segment, t in moved
        )
        return "\n".join([room, *lines])

    def decide(self, graph: StepGraph, ctx: Context) -> Buckets:
        """Split the transfers of each segment and kind, in order of need."""
        found: list[Carried] = []
        caps: dict[int, None] = {}
        leasts: dict[int, None] = {}
        in_small = ctx.level is not None and ctx.level.room is Room.LEAST
        parts = SMALL_PARTS if in_small else 1
        for lane, kinds in self._movable(graph, ctx).items():
            made = 0
            for segment in graph.segments():
                for axis, chosen in enumerate(kinds.get(segment, {}).values()):
                    cap = self.cap_bytes or default_cap(chosen, ctx.costs) // parts
                    least = self._least(ctx.costs, chosen[0].record, cap)
                    caps[cap] = leasts[least] = None
                    blocks = [[t] for t in chosen if graph.is_block(t)]
                    others = [t for t in chosen if not graph.is_block(t)]
                    for members in [*group(others, cap, least), *blocks]:
                        found.append(
                            Carried(
                                name=f"{lane.value}.{segment.phase.value}.{made}",
                                lane=lane,
                                phase=segment.phase,
                                micro_step=segment.micro_step,
                                stage=segment.stage,
                                half=segment.half,
                                axis=axis,
                                params=tuple(_label(graph, t) for t in members),
                                full_bytes=sum(t.record.full_bytes for t in members),
                            )
                        )
                        made += 1
        return Buckets(tuple(found), tuple(caps), tuple(leasts))

    def apply(self, graph: StepGraph, decision: Buckets, ctx: Context) -> Notes:
        """Merge what shall travel together.

        Raises:
            ConfigError: the buckets do not carry every transfer once.
        """
        wanted: dict[tuple[Lane, Segment, int], list[Carried]] = {}
        for bucket in decision.buckets:
            place = (
                bucket.lane,
                Segment(bucket.phase, bucket.micro_step, bucket.stage, bucket.half),
                bucket.axis,
            )
            wanted.setdefault(place, []).append(bucket)
        found = self._movable(graph, ctx)
        del ctx.scratch[self.name]  # it is not true of what comes now
        counts = dict.fromkeys(found, 0)
        for lane, kinds in found.items():
            for segment in graph.segments():
                for axis, chosen in enumerate(kinds.get(segment, {}).values()):
                    buckets = wanted.pop((lane, segment, axis), [])
                    # The all-reduce across replicas starts from what the reduce-scatter left,
                    # which has been joined meanwhile.
                    now = [transfer_nodes(t.launch) for t in chosen] if axis else chosen
                    for bucket, members in _members(graph, buckets, now):
                        merge(graph, members, bucket.name)
                    counts[lane] += len(buckets)
        if wanted:
            (lane, segment, _), *_ = wanted
            raise ConfigError(
                f"the plan has buckets for {lane.value} in {segment.phase.value}, micro-step "
                f"{segment.micro_step}, where nothing of that kind travels"
            )
        join_releases(graph)
        return Notes(gathers=counts[Lane.GATHER], reduces=counts[Lane.REDUCE])


def _label(graph: StepGraph, transfer: TransferNodes) -> str:
    """The name of the one parameter that a transfer carries before it is merged."""
    (key,) = transfer.stamp.params
    return graph.labels[key]


def _members(
    graph: StepGraph, buckets: list[Carried], transfers: list[TransferNodes]
) -> list[tuple[Carried, list[TransferNodes]]]:
    """What each bucket carries.

    Raises:
        ConfigError: a transfer is in none of them or in two, or cannot travel with the others.
    """
    by_label = {_label(graph, transfer): transfer for transfer in transfers}
    named = [label for bucket in buckets for label in bucket.params]
    if sorted(named) != sorted(by_label):
        strange = sorted({*named} ^ {*by_label}) or sorted({n for n in named if named.count(n) > 1})
        raise ConfigError(
            f"the plan's buckets {[bucket.name for bucket in buckets]} must carry each of "
            f"{len(by_label)} parameters once; look at {', '.join(strange[:4])}"
        )
    found = []
    for bucket in buckets:
        members = [by_label[label] for label in bucket.params]
        if len({transfer.record.combines for transfer in members}) > 1:
            raise ConfigError(
                f"the plan's bucket {bucket.name} mixes dtypes or groups: "
                f"{', '.join(bucket.params)}"
            )
        found.append((bucket, members))
    return found
