"""Keep what forward saves for backward in the host's memory meanwhile.

    a = A(x); …; A_backward(a, …)
→   a = A(x); down = download([a]); …; wait(down); …; up = upload([h]); …; A_backward(a', …)

A value goes down as soon as forward has made it and comes back before backward first reads it. Only
what has the time to does so: the copies of what goes, one behind the other on their lanes, must end
before backward waits for them, so that no step is slower than it was by more than the lanes' own
noise. Those made first have the most time, and go first. With ``recompute.policy=full`` what is
saved are the blocks' inputs: ZeRO-Infinity's CPU checkpoints (Rajbhandari et al. 2021).

Each value has its place in the arena from its copy down to the wait of its copy up; others have it
before and after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero._compat import copy_node
from fxzero.errors import ConfigError
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.lanes import aligned
from fxzero.graph.launch import emit_copy
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.offload_disk import OffloadDisk, Stored
from fxzero.passes.updates_on_host import staging_area, value_on_host
from fxzero.regions.cutout import move_parts_together
from fxzero.runtime import copies
from fxzero.schedule.copy_times import Timeline
from fxzero.schedule.storage import Kind, storages_of
from fxzero.settings import Share, a_share, at_least, decided
from fxzero.sharding.host import HOST
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool, Transfer, TransferKind


@dataclass(frozen=True)
class Saved:
    """A value that backward reads."""

    node: fx.Node
    readers: tuple[tuple[fx.Node, fx.Node], ...]
    """Nodes of backward, and which view of it each reads: itself, mostly."""
    last_read: fx.Node
    """The last node of forward that makes or reads it."""
    first_read: fx.Node
    """The first node of backward that reads it."""

    @property
    def micro_step(self) -> int:
        """Which of the step's micro-batches it is of."""
        return stamp_of(self.node).micro_step


def saved_values(graph: StepGraph, least_bytes: int) -> list[Saved]:
    """What forward computes and backward reads, in the order in which it is made.

    Args:
        least_bytes: smaller values are left out.
    """
    storages = storages_of(graph, fuses=False)
    looks_at: dict[object, list[fx.Node]] = {}
    for node, own in storages.of.items():
        if len(own) == 1 and node.op == "call_function":
            looks_at.setdefault(own[0], []).append(node)
    found = []
    for storage in storages.every:
        fits = storage.kind is Kind.ACTIVATIONS and storage.num_bytes >= least_bytes
        if fits and not storage.stays and storage in looks_at:
            saved = _saved(looks_at[storage])
            if saved is not None:
                found.append(saved)
    return sorted(found, key=lambda saved: saved.node)


def _saved(views: list[fx.Node]) -> Saved | None:
    """A value by the nodes that look at its memory; None if it is not saved, or must stay."""
    node, *others = sorted(views)
    stamp = stamp_of(node)
    value = node.meta.get("val")
    computed = stamp.phase is Phase.FORWARD and stamp.role is Role.COMPUTE
    if not computed or not isinstance(value, torch.Tensor) or is_view(node):
        return None
    if not _is_dense(value) or not all(is_view(other) for other in others):
        return None
    readers: list[tuple[fx.Node, fx.Node]] = []
    last = node
    known = set(views)
    for view in (node, *others):
        for user in view.users:
            if user.op == "output":
                return None
            mine = stamp_of(user)
            if mine.micro_step != stamp.micro_step or mine.phase is Phase.OPTIMIZER:
                return None
            if mine.phase is Phase.BACKWARD:
                if stamp_of(view).phase is Phase.FORWARD:
                    readers.append((user, view))
            elif user not in known:
                last = max(last, user)
    if not readers:
        return None
    return Saved(node, tuple(readers), last, min(user for user, _ in readers))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a copy without gaps has the strides of the value itself."""
    return value.stride() == torch.empty_like(value, device="meta").stride()


def chosen(
    values: Sequence[Sequence[Saved]],
    timeline: Timeline,
    wanted_bytes: float,
    room_bytes: float = math.inf,
) -> list[int]:
    """Which of some values go: as many as there is time for, and room on the host, those made
    first before others.

    Args:
        values: each of one micro-step, with those of others that are to go with it.
        wanted_bytes: of one micro-step.
    """
    found: list[int] = []
    taken: list[Saved] = []
    taken_bytes = 0
    for position, (saved, *others) in enumerate(values):
        own_bytes = num_bytes(saved.node)
        if taken_bytes + own_bytes / 2 > wanted_bytes:
            break
        more = sorted([*taken, saved, *others], key=lambda one: one.node)
        if staging_bytes(places(more)) <= room_bytes and has_time(more, timeline):
            found.append(position)
            taken = more
            taken_bytes += own_bytes
    return found


def has_time(values: Sequence[Saved], timeline: Timeline) -> bool:
    """Whether values get down and up again before anything waits for them.

    Copies down run in the order in which values are made, copies up in that of their use.
    """
    free_us = 0.0
    down: dict[fx.Node, float] = {}
    for saved in values:
        begin_us = max(free_us, timeline.end_us(saved.node))
        free_us = down[saved.node] = begin_us + timeline.copy_us(record_of(saved.node, Lane.D2H))
    until_us = float("inf")
    for saved in sorted(values, key=lambda saved: saved.first_read, reverse=True):
        until_us = min(until_us, timeline.begin_us(saved.first_read))
        until_us -= timeline.copy_us(record_of(saved.node, Lane.H2D))
        if until_us < max(down[saved.node], timeline.end_us(saved.last_read)):
            return False
    return True


def record_of(node: fx.Node, lane: Lane, bytes_per_s: float = 0.0) -> Transfer:
    """The copy of a value down, or up again."""
    pools = (Pool.DEVICE, Pool.HOST)
    source, target = pools if lane is Lane.D2H else pools[::-1]
    return Transfer(
        TransferKind.COPY,
        full_bytes=num_bytes(node),
        dtype=node.meta["val"].dtype,
        resource=PCIE_DOWN if lane is Lane.D2H else PCIE_UP,
        source=source,
        target=target,
        bytes_per_s=bytes_per_s,
    )


def places(values: Sequence[Saved]) -> dict[fx.Node, int]:
    """Where in some bytes each of some values may be, first fit: no other one is there from when it
    is made until backward first reads it.

    Args:
        values: in the order in which they are made.
    """
    held: list[tuple[int, int, fx.Node]] = []
    found: dict[fx.Node, int] = {}
    for saved in values:
        size = aligned(num_bytes(saved.node))
        held = sorted(place for place in held if saved.node < place[2])
        offset = 0
        for begin, end, _ in held:
            if begin - offset >= size:
                break
            offset = max(offset, end)
        found[saved.node] = offset
        held.append((offset, offset + size, saved.first_read))
    return found


def staging_bytes(offsets: dict[fx.Node, int]) -> int:
    """What values at some offsets take together."""
    return max((begin + aligned(num_bytes(node)) for node, begin in offsets.items()), default=0)


def move(graph: StepGraph, saved: Saved, staging: fx.Node, offset: int, ctx: Context) -> None:
    """Copy a value down and up again, and let backward read what has come back."""
    node = saved.node
    value = node.meta["val"]
    stamp = stamp_of(node).but(made_by="offload_activations", again="", params=())
    down = stamp.but(lane=Lane.D2H, bucket=f"download.{node.name}", pool=Pool.HOST)
    rate = ctx.throttle.bytes_per_s(Lane.D2H)
    with graph.graph.inserting_before(saved.last_read.next), graph.made_for(node):
        (part,) = emit_copy(
            graph,
            (copies.download, ([node], [node], staging, [offset], [value.dtype], [], rate)),
            copies.join_download,
            record_of(node, Lane.D2H, rate),
            down,
            f"download_{node.name}",
            [value_on_host(graph, node)],
        )
    half = stamp_of(saved.first_read).half
    up = stamp.but(lane=Lane.H2D, bucket=f"upload.{node.name}", phase=Phase.BACKWARD, half=half)
    rate = ctx.throttle.bytes_per_s(Lane.H2D)
    device = None if value.device.type == HOST.type else value.device
    with graph.graph.inserting_before(saved.first_read), graph.made_for(node):
        (back,) = emit_copy(
            graph,
            (copies.upload, ([part], None, device, rate)),
            copies.join_upload,
            record_of(node, Lane.H2D, rate),
            up,
            f"upload_{node.name}",
            [value],
        )
    again = {node: back}
    for reader, view in saved.readers:
        with graph.graph.inserting_before(reader):
            reader.replace_input_with(view, _seen_again(graph, view, again))
    for view in sorted({view for _, view in saved.readers}, reverse=True):
        while view is not node and not view.users:  # it would keep the memory
            source = view.all_input_nodes[0]
            graph.graph.erase_node(view)
            view = source


def _seen_again(graph: StepGraph, view: fx.Node, again: dict[fx.Node, fx.Node]) -> fx.Node:
    """A view of what has come back, as one of what went."""
    if view not in again:
        source = _seen_again(graph, view.all_input_nodes[0], again)
        copy = copy_node(graph.graph, view, lambda _: source)
        half = stamp_of(source).half
        stamp = stamp_of(view).but(phase=Phase.BACKWARD, half=half, made_by="offload_activations")
        set_stamp(copy, replace(stamp, again=view.name))
        return copy
    return again[view]


@dataclass(frozen=True)
class Moved(Decision):
    """Which values go to the host."""

    values: tuple[str, ...] = ()
    """Their nodes, in the order in which they are made."""
    num_bytes: int = 0
    """Of one micro-step."""
    saved_bytes: int = 0
    """What one micro-step's forward saves in values that are large enough."""


@dataclass(frozen=True)
class OffloadActivations(DecidingPass[Moved]):
    """Move saved values to the host and back."""

    name: ClassVar[str] = "offload_activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.RECOMPUTED, Fact.EXPANDED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})
    decides: ClassVar[type[Any]] = Moved

    share: Share = None
    """In whole steps: the part of the bytes that forward saves for backward that may go to the
    host's memory, as far as there is time for it, and room within `host_budget`; what is made first
    goes first."""
    min_bytes: int = 1 << 20
    """Smaller values stay: a copy takes some time, however small."""

    def __post_init__(self) -> None:
        """A part is between nothing and all of it."""
        super().__post_init__()
        at_least("offload_activations.min_bytes", self.min_bytes, 1)
        a_share("offload_activations.share", self.share)

    def decide(self, graph: StepGraph, ctx: Context) -> Moved:
        """Choose for the first micro-step, and alike for the others."""
        move_parts_together(graph)  # so that what runs as one is what will
        found = saved_values(graph, self.min_bytes)
        by_step: dict[int, list[Saved]] = {}
        for saved in found:
            by_step.setdefault(saved.micro_step, []).append(saved)
        first = by_step.get(0, [])
        # In a pipeline several micro-steps are in flight, whose copies share the lanes.
        others = [own for step, own in by_step.items() if step] if graph.row else []
        alike = [[saved, *(own[i] for own in others)] for i, saved in enumerate(first)]
        timeline = Timeline(graph, ctx.costs, ctx.throttle, fuses=ctx.fuses)
        saved_bytes = sum(num_bytes(saved.node) for saved in first)
        wanted_bytes = decided(self.share) * saved_bytes
        positions = chosen(alike, timeline, wanted_bytes, _room_bytes(ctx))
        names = [own[i].node.name for own in by_step.values() for i in positions if i < len(own)]
        moved_bytes = sum(num_bytes(first[i].node) for i in positions)
        return Moved(tuple(names), moved_bytes, saved_bytes)

    def apply(self, graph: StepGraph, decision: Moved, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: the decision names a value that there is not, or that is not saved.
        """
        known = {saved.node.name: saved for saved in saved_values(graph, 1)}
        strange = [name for name in decision.values if name not in known]
        if strange:
            raise ConfigError(
                f"the plan moves {strange[0]!r} to the host, which is no value that forward saves. "
                "Where recompute was changed, drop offload_activations: it is then decided anew."
            )
        values = sorted((known[name] for name in decision.values), key=lambda saved: saved.node)
        if not values:
            return Notes()
        offsets = places(values)
        room = staging_bytes(offsets)
        staging, begin = staging_area(graph, room)
        for saved in values:
            move(graph, saved, staging, begin + offsets[saved.node], ctx)
        return Notes(
            values=len(values),
            num_bytes=decision.num_bytes,
            of=decision.saved_bytes,
            staging_bytes=room,
        )


def _room_bytes(ctx: Context) -> float:
    """What a bound on the host's memory leaves beside parameters, state and gradients."""
    if ctx.host_budget_bytes is None:
        return math.inf
    stored = ctx.decisions.made.get(OffloadDisk.name)
    held_bytes = stored.host_bytes if isinstance(stored, Stored) else 0
    return ctx.host_budget_bytes - held_bytes
