"""Wait for copies as late as can be, and let no more of the device's memory wait for them.

    up_0; join(up_0); up_1; join(up_1); A; B     →  up_0; up_1; join(up_0); A; join(up_1); B
    …; down_0; C; down_1; D; down_2              →  …; down_0; C; down_1; D; landed(down_0); down_2
    …; u_1; E                                       …; u_1; ahead(up_1); E
    …; stored_u; F                                  …; s = read; u(s); d = write(s); F; join(d)
    …; up_m; u_m; back_m; G                         …; up_m; G; u_m; back_m; H; landed(back_m)

A copy to the device is waited for where the first run of compute reads it, and where each use has
its own it starts as late as it can. A gradient is held until its copy has landed on the host: two
may be on their way, so that a slow link holds back backward, and not more memory than was
simulated. A saved value is held until its copy should have landed, by its cost. Updates on the host
are waited for at the end of the step; what they leave is copied to the device behind each, and the
next step waits. Around an update of what is on disk stands what reads and what writes it, in a row.
In the ordinary loop, which updates by itself, gradients have landed when the graph returns them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import ClassVar

from torch import fx

from fxzero.cost.throttle import Throttle
from fxzero.graph import Lane, Phase, Role, Segment, StepGraph
from fxzero.graph.aliases import readers
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import BESIDE_COMPUTE, stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.graph.streamed_states import brings_back, overwritten_by
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.passes.gradient_places import downloads_of, share_places, waits_for_norm
from fxzero.passes.offload_disk import large_homes
from fxzero.passes.streamed_updates import of_states, place_streams, streamed_of
from fxzero.regions.cutout import end_of_run, runs
from fxzero.runtime import copies
from fxzero.runtime.ahead import Launch, Take
from fxzero.runtime.delayed import LateUpdate, StartUpdate
from fxzero.runtime.disk_streams import ReadStates, StoredUpdate, join_write, taken, write_states
from fxzero.schedule.copy_times import SLACK, Timeline, first_compute
from fxzero.transfer import DISK_READ, DISK_WRITE, Pool, Transfer, TransferKind

IN_FLIGHT = 2
"""Copies of gradients at a time."""


def join_late(graph: StepGraph, uploads: list[TransferNodes]) -> None:
    """Wait for copies where they are first read; no run of compute is taken apart."""
    for copy, first in first_reads(graph, uploads).items():
        for node in (copy.wait, *copy.parts):
            first.prepend(node)


def first_reads(graph: StepGraph, uploads: list[TransferNodes]) -> dict[TransferNodes, fx.Node]:
    """By copy, the first node of the first run of compute that reads it."""
    begin = {node: run[0] for run in runs(graph.nodes()) for node in run}
    return {
        copy: min(begin.get(user, user) for part in copy.parts for user in part.users)
        for copy in uploads
    }


def drop_unread(graph: StepGraph, uploads: list[TransferNodes]) -> list[TransferNodes]:
    """Make no copy for a gather that does not happen: backward may read what forward gathered.

    Returns:
        The others.
    """
    found = []
    for copy in uploads:
        if any(part.users for part in copy.parts):
            found.append(copy)
            continue
        for node in (*copy.parts, copy.wait, copy.launch):
            graph.graph.erase_node(node)
    return found


def launch_late(
    graph: StepGraph, uploads: list[TransferNodes], timeline: Timeline, *, cut: bool = False
) -> None:
    """Let copies begin as late as they can and still be there when they are read, one behind the
    other on their lane: no more of the device's memory waits to be read.

    None begins before the phase before its own, so that a micro-step may stand for others.

    Args:
        cut: whether phases will be run apart, so that none begins before its own.
    """
    ordered = sorted(uploads, key=lambda copy: copy.wait)
    read = first_reads(graph, uploads)
    segments = graph.segments()
    if cut:
        earliest = {segment: first_on_device(graph, segment) for segment in segments[1:]}
    else:
        begins = [first_compute(graph, segment) for segment in segments]
        earliest = dict(zip(segments[1:], begins, strict=False))
    anchors: list[fx.Node | None] = []
    until_us = float("inf")
    for copy in reversed(ordered):
        until_us = min(until_us, timeline.begin_us(read[copy]))
        until_us -= SLACK * timeline.copy_us(copy.record)
        bounds = (timeline.running_at(until_us), earliest.get(copy.stamp.segment))
        anchor = max(filter(None, bounds), default=None)
        if anchor is not None:
            anchor = min(anchor, copy.wait)  # a gather may be started far ahead of its use
        anchors.append(anchor)
    begin = max(graph.graph.find_nodes(op="placeholder"))
    for copy, anchor in zip(ordered, reversed(anchors), strict=True):
        after = max((node for node in copy.tensors if node.op != "placeholder"), default=None)
        if after is not None and (anchor is None or anchor < after):
            after.append(copy.launch)
        elif anchor is not None:
            anchor.prepend(copy.launch)
        else:
            begin.append(copy.launch)
            begin = copy.launch


def first_on_device(graph: StepGraph, segment: Segment) -> fx.Node:
    """The first node of a phase of a micro-step that has a place there: copies have none yet."""
    return next(
        node for node in graph.nodes(segment=segment) if stamp_of(node).lane not in BESIDE_COMPUTE
    )


def bound_uploads(uploads: list[TransferNodes], in_flight: int) -> None:
    """Let a copy begin when one some places before it is waited for."""
    ordered = sorted(uploads, key=lambda copy: copy.wait)
    for before, copy in zip(ordered, ordered[in_flight:], strict=False):
        if copy.launch < before.wait:
            before.parts[-1].append(copy.launch)


def upload_ahead(graph: StepGraph, copy: TransferNodes) -> None:
    """Copy parameters to the device for the next step, once they are updated and nothing of this
    one reads the copies of before."""
    assert isinstance(copy.launch.target, Take)
    updates = {
        user
        for param in copy.tensors
        for user in param.users
        if stamp_of(user).role is Role.UPDATE or overwritten_by(user)
    }
    (update,) = updates
    after = max(update, *(end_of_run(reader) for reader in readers(*copy.parts)))
    stamp = copy.stamp.but(phase=Phase.OPTIMIZER, role=Role.AHEAD, made_by="join_copies")
    params, dtype, device, bytes_per_s = copy.launch.args
    with graph.graph.inserting_after(after), graph.made_for(copy.launch):
        graph.call(
            Launch(copy.launch.target.ahead),
            (params, update, dtype, device, bytes_per_s),
            stamp=stamp,
            name=f"ahead_{copy.launch.name}",
            value=(),
        )


def start_late_updates(graph: StepGraph, uploads: list[TransferNodes]) -> int:
    """Start what the step before has left once what compute reads has been taken, and let gradients
    arrive where its own are when they have been used. Return how many updates are late."""
    late = [u for u in graph.nodes(role=Role.UPDATE) if isinstance(u.target, LateUpdate)]
    if not late:
        return 0
    taken = [copy.launch for copy in uploads if isinstance(copy.launch.target, Take)]
    begin = max((*taken, *graph.graph.find_nodes(op="placeholder")))
    downloads = downloads_of(graph)
    for update in late:
        assert isinstance(update.target, LateUpdate)
        params, _, state = update.args[:3]
        stamp = stamp_of(update).but(role=Role.START, phase=Phase.FORWARD, made_by="join_copies")
        name = f"start_{update.name.removeprefix('update_')}"
        with graph.graph.inserting_after(begin), graph.made_for(update):
            begin = graph.call(
                StartUpdate(update.target.pending),
                (params, state),
                stamp=stamp,
                name=name,
                value=(),
            )
        downloads[update].launch.update_arg(5, [begin])
    return len(late)


def land_gradients(graph: StepGraph, downloads: list[TransferNodes]) -> None:
    """Let a copy begin when the one but one before it has landed, and all before the end."""
    later = [copy.launch for copy in downloads[IN_FLIGHT:]]
    for copy, end in zip_longest(downloads, later):
        stamp = copy.stamp.but(role=Role.RELEASE, transfer=None, made_by="join_copies")
        name = f"{copy.launch.name}_landed"
        before = end or next(graph.nodes(role=Role.JOIN))
        with graph.graph.inserting_before(before), graph.made_for(copy.launch):
            graph.call(copies.landed, (copy.launch,), stamp=stamp, name=name, value=())


def join_gradients(graph: StepGraph, downloads: list[TransferNodes]) -> None:
    """Let a copy begin when the one but one before it is there, and the loop have all of them."""
    for i, copy in enumerate(downloads):
        is_last = i + IN_FLIGHT >= len(downloads)
        end = graph.output if is_last else downloads[i + IN_FLIGHT].launch
        for node in (copy.wait, *copy.parts):
            end.prepend(node)


def land_values(downloads: list[TransferNodes], timeline: Timeline) -> None:
    """Wait for values on their way to the host when they should be there: the device holds them
    until then."""
    free_us = 0.0
    for copy in downloads:
        free_us = max(free_us, timeline.begin_us(copy.launch)) + SLACK * timeline.copy_us(
            copy.record
        )
        end = min(user for part in copy.parts for user in part.users)
        there = timeline.next_at(free_us)
        if there is not None and copy.launch < there:
            end = min(end, there)
        for node in (copy.wait, *copy.parts):
            end.prepend(node)


def stream_states(graph: StepGraph, update: fx.Node, throttle: Throttle) -> None:
    """Let an update read what it changes from disk, and write it back.

    Nothing stands between the three: see `fxzero.runtime.disk_streams`.
    """
    target = update.target
    assert isinstance(target, StoredUpdate)
    params, grads, state, *others = update.args
    large = large_homes(update)
    buffers = next(
        node
        for node in graph.graph.find_nodes(op="placeholder")
        if (node.meta.get("fxzero_source") or ("",))[0] == "disk_buffers"
    )
    place = update.name.removeprefix("update_")
    stamp = stamp_of(update).but(params=(), made_by="join_copies")
    moved = Transfer(
        TransferKind.COPY,
        full_bytes=sum(map(num_bytes, large)),
        num_tensors=len(large),
        dtype=large[0].meta["val"].dtype,
    )
    read, write = (throttle.bytes_per_s(lane) for lane in (Lane.READ, Lane.WRITE))
    reads = replace(moved, resource=DISK_READ, source=Pool.DISK, target=Pool.HOST, bytes_per_s=read)
    writes = replace(
        moved, resource=DISK_WRITE, source=Pool.HOST, target=Pool.DISK, bytes_per_s=write
    )
    with graph.graph.inserting_before(update), graph.made_for(update):
        states = graph.call(
            ReadStates(target.bucket),
            (params, state, buffers, read),
            stamp=stamp.but(
                lane=Lane.READ, role=Role.LAUNCH, transfer=reads, bucket=f"read.{place}"
            ),
            name=f"read_{place}",
            value=(),
        )
        arrived = graph.call(
            taken,
            (states,),
            stamp=stamp.but(lane=Lane.HOST, role=Role.WAIT, bucket=f"read.{place}"),
            name=f"{states.name}_taken",
            value=(),
        )
    update.args = (params, grads, state, *others, arrived)
    stamp = stamp.but(lane=Lane.WRITE, bucket=f"write.{place}")
    with graph.graph.inserting_after(update), graph.made_for(update):
        done = graph.call(
            write_states,
            (arrived, update, buffers, write),
            stamp=stamp.but(role=Role.LAUNCH, transfer=writes),
            name=f"write_{place}",
            value=(),
        )
    end = next(graph.nodes(role=Role.JOIN))
    with graph.graph.inserting_before(end), graph.made_for(update):
        stamp = stamp.but(role=Role.WAIT)
        graph.call(join_write, (done,), stamp=stamp, name=f"{done.name}_done", value=())


@dataclass(frozen=True)
class JoinCopies(Pass):
    """Place what waits for copies between pools."""

    name: ClassVar[str] = "join_copies"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})

    in_flight: int | None = None
    """See `offload_params.in_flight`."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        to_device = [t for t in graph.transfers() if t.is_copy and t.record.target is Pool.DEVICE]
        uploads = drop_unread(graph, [t for t in to_device if not of_states(t)])
        from_device = graph.transfers(name=Lane.D2H.value)
        downloads = [copy for copy in from_device if not brings_back(copy)]
        for join in list(graph.nodes(role=Role.JOIN)):
            graph.output.prepend(join)
        join_late(graph, uploads)
        late = [copy for copy in uploads if copy.stamp.made_by != "offload_states"]
        values = [copy for copy in downloads if copy.wait.target is copies.join_download]
        streams = streamed_of(graph)
        if streams or late:
            timeline = Timeline(graph, ctx.costs, ctx.throttle, fuses=ctx.fuses)
        if streams:
            place_streams(graph, streams, timeline)
        if late:
            launch_late(graph, late, timeline, cut=graph.loss is None)
            if self.in_flight is not None:
                bound_uploads([copy for copy in late if copy.of_parameters], self.in_flight)
            land_values(values, timeline)
        ahead = [copy for copy in uploads if isinstance(copy.launch.target, Take)]
        for copy in ahead:
            upload_ahead(graph, copy)
        gradients = [copy for copy in downloads if copy.of_parameters]
        if graph.loss is None:
            join_gradients(graph, gradients)
        else:
            land_gradients(graph, gradients)
        stored = [u for u in graph.nodes(role=Role.UPDATE) if isinstance(u.target, StoredUpdate)]
        if stored and not any(map(waits_for_norm, stored)):
            share_places(graph, stored)
        for update in stored:
            stream_states(graph, update, ctx.throttle)
        late_updates = start_late_updates(graph, uploads)
        on_disk = {"on_disk": len(stored)} if stored else {}
        on_disk |= {"late": late_updates} if late_updates else {}
        on_disk |= {"streamed": len(streams)} if streams else {}
        return Notes(uploads=len(uploads), ahead=len(ahead), downloads=len(downloads), **on_disk)
