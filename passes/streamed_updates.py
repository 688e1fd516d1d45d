"""Update on the device what lives in the host's memory: it streams in, and out again.

    adamw([w], [dw], [[m], [v], [n]])  →  up = upload([m, v]); m', v' = join(up)
                                          u = adamw([w], [dw], [[m'], [v'], [n]])
                                          back = bring_back([m', v'], [m, v], u); …; landed(back)

What a parameter's update reads beside its gradient is there for the update alone: state as large as
the parameter, and the parameter itself where it lives on the host. Step counts, a number each, stay
on the device. Of two updates at a time something is there: while one's state goes back, the next
one's comes in, so that both ways of the bus are used at once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import fx

from fxzero.cost.throttle import Throttle
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.launch import emit_copy
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes, transfer_nodes
from fxzero.graph.streamed_states import brings_back
from fxzero.passes.parameter_copies import computed_on
from fxzero.runtime import copies
from fxzero.schedule.copy_times import SLACK, Timeline, first_compute
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool, Transfer, TransferKind


def large_state(update: fx.Node) -> list[fx.Node]:
    """The state of a fused update that is as large as a parameter: all but step counts."""
    state: list[list[fx.Node]] = update.args[2]  # type: ignore[assignment]
    return [node for part in state for node in part if node.meta["fxzero_source"][2] != "step"]


def step_counts(update: fx.Node) -> list[fx.Node]:
    """What counts the steps of a fused update's parameters: they are where it runs."""
    state: list[list[fx.Node]] = update.args[2]  # type: ignore[assignment]
    inputs = [node for part in state for node in part if node.op == "placeholder"]
    return [node for node in inputs if node.meta["fxzero_source"][2] == "step"]


def stream(graph: StepGraph, update: fx.Node, params: list[fx.Node], throttle: Throttle) -> None:
    """Let an update on the device read copies of what lives on the host, and bring them back.

    Args:
        params: the parameters of it that live there.
    """
    homes = [*params, *large_state(update)]
    keys = tuple(key for home in homes for key in _keys_of(home))
    place = update.name.removeprefix("update_")
    device = computed_on(graph, update.args[0][0])  # type: ignore[index,arg-type]
    values = [graph.value_of(torch.empty_like, (home,), {"device": device}) for home in homes]
    moved = Transfer(
        TransferKind.COPY,
        full_bytes=sum(map(num_bytes, homes)),
        num_tensors=len(homes),
        dtype=homes[0].meta["val"].dtype,
        resource=PCIE_UP,
        source=Pool.HOST,
        target=Pool.DEVICE,
        bytes_per_s=throttle.bytes_per_s(Lane.H2D),
    )
    stamp = stamp_of(update).but(params=keys, made_by="offload_states")
    with graph.graph.inserting_before(update), graph.made_for(update):
        parts = emit_copy(
            graph,
            (copies.upload, (homes, None, device, moved.bytes_per_s)),
            copies.join_upload,
            moved,
            stamp.but(lane=Lane.H2D, bucket=f"states.{place}"),
            f"upload_states_{place}",
            values,
        )
    for home, part in zip(homes, parts, strict=True):
        update.replace_input_with(home, part)
    for count in step_counts(update) if device is not None else ():
        count.meta["val"] = graph.value_of(torch.empty_like, (count,), {"device": device})
    back = Transfer(
        TransferKind.COPY,
        full_bytes=moved.full_bytes,
        num_tensors=moved.num_tensors,
        dtype=moved.dtype,
        resource=PCIE_DOWN,
        source=Pool.DEVICE,
        target=Pool.HOST,
        bytes_per_s=throttle.bytes_per_s(Lane.D2H),
    )
    stamp = stamp.but(lane=Lane.D2H, bucket=f"back.{place}", pool=Pool.HOST)
    with graph.graph.inserting_after(update), graph.made_for(update):
        launch = graph.call(
            copies.bring_back,
            (parts, homes, update, back.bytes_per_s),
            stamp=stamp.but(role=Role.LAUNCH, transfer=back),
            name=f"bring_back_{place}",
            value=[home.meta["val"] for home in homes],
        )
    with graph.graph.inserting_after(launch), graph.made_for(update):
        stamp = stamp.but(role=Role.WAIT)
        graph.call(copies.landed, (launch,), stamp=stamp, name=f"{launch.name}_done", value=())


def _keys_of(home: fx.Node) -> tuple[str, ...]:
    source = home.meta.get("fxzero_source")
    return (source[1],) if source is not None else stamp_of(home).params


def of_states(copy: TransferNodes) -> bool:
    """Whether a copy to the device is for an update there."""
    return copy.stamp.lane is Lane.H2D and copy.stamp.phase is Phase.OPTIMIZER


class Streamed(NamedTuple):
    """An update of what streams through the device."""

    up: TransferNodes
    """What comes in for it."""
    update: fx.Node
    back: TransferNodes


def streamed_of(graph: StepGraph) -> list[Streamed]:
    """All of them, in the order of their updates."""
    found = []
    for back in filter(brings_back, graph.transfers(name=Lane.D2H.value)):
        launch = back.tensors[0].all_input_nodes[0].all_input_nodes[0]
        (update,) = (u for u in back.tensors[0].users if stamp_of(u).role is Role.UPDATE)
        found.append(Streamed(transfer_nodes(launch), update, back))
    return sorted(found, key=lambda stream: stream.update)


def place_streams(graph: StepGraph, streams: list[Streamed], timeline: Timeline) -> None:
    """Let state come in one update ahead, once that of the one before it is back."""
    for up, update, back in streams:
        for node in (up.wait, *up.parts):
            update.prepend(node)
        update.append(back.launch)
    _launch_first(graph, streams[0], timeline)
    for before, stream in pairwise(streams):
        before.back.launch.append(stream.up.launch)
    for before, stream in zip(streams, streams[2:], strict=False):
        stream.up.launch.prepend(before.back.wait)
    for stream in streams[-2:]:
        graph.output.prepend(stream.back.wait)


def _launch_first(graph: StepGraph, stream: Streamed, timeline: Timeline) -> None:
    """Let the first copy begin as late as it can, in the last backward at the earliest."""
    *_, last = graph.segments()
    begin = first_compute(graph, last)
    until_us = timeline.begin_us(stream.update) - SLACK * timeline.copy_us(stream.up.record)
    anchor = timeline.running_at(until_us) or begin
    min(max(anchor, begin), stream.up.wait).prepend(stream.up.launch)
