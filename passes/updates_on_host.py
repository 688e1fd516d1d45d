"""Run an update on the host: its gradients go down, and so do the numbers that it reads.

    adamw([w], [dw], [[m], …], group, scale)
→   down = download([dw], staging); h = arrived(down)[0]
    u = host_adamw([w], [h], [[m], …], group, scale); …; join_updates([u])

What gradients are scaled by, and whether the step is skipped, are numbers of the device: from a GPU
they are copied down, once for all updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.lanes import aligned
from fxzero.graph.launch import emit_copy
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.runtime import copies, updates
from fxzero.runtime.delayed import LateUpdate, pending_of
from fxzero.sharding.host import HOST
from fxzero.transfer import PCIE_DOWN, Pool, Transfer, TransferKind


def movable_updates(graph: StepGraph) -> list[fx.Node]:
    """The updates whose state can be on the host, in the order in which their gradients are
    there."""
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    kernels = set(updates.KERNELS.values())
    fixed = graph.mutated | set(graph.output.all_input_nodes)
    found = [
        node
        for node in graph.nodes(role=Role.UPDATE)
        if node.target in kernels and fixed.isdisjoint(params_of(node))
    ]
    return sorted(found, key=lambda node: max(place[grad] for grad in grads_of(node)))


def params_of(update: fx.Node) -> list[fx.Node]:
    """The parameters that a fused update changes."""
    return list(update.args[0])  # type: ignore[arg-type]


def grads_of(update: fx.Node) -> list[fx.Node]:
    """Their gradients."""
    return list(update.args[1])  # type: ignore[arg-type]


def homes_of(update: fx.Node) -> list[fx.Node]:
    """What lives on the host where an update runs there: its parameters and their state."""
    state: Sequence[Sequence[fx.Node]] = update.args[2]  # type: ignore[assignment]
    return [*params_of(update), *(node for part in state for node in part)]


def value_on_host(graph: StepGraph, node: fx.Node) -> Any:
    """What a node's value is once it is on the host: itself where the device is a CPU."""
    value = node.meta["val"]
    if value.device.type == HOST.type:
        return value
    return graph.value_of(torch.empty_like, (node,), {"device": HOST})


def place_of(update: fx.Node) -> str:
    """What an update is of, in names."""
    return update.name.removeprefix("update_")


def update_on_host(
    graph: StepGraph, update: fx.Node, staging: fx.Node, offset: int, bytes_per_s: float
) -> int:
    """Run an update on the host; return where in the staging area the next gradients may be."""
    params, grads = params_of(update), grads_of(update)
    offsets = []
    for grad in grads:
        offsets.append(offset)
        offset += aligned(num_bytes(grad))
    stamp = stamp_of(update).but(
        lane=Lane.D2H,
        pool=Pool.HOST,
        bucket=f"download.{place_of(update)}",
        made_by="offload_states",
    )
    dtypes = [grad.meta["val"].dtype for grad in grads]
    with graph.graph.inserting_before(update), graph.made_for(update):
        parts = emit_copy(
            graph,
            (copies.download, (grads, params, staging, offsets, dtypes, [], bytes_per_s)),
            copies.arrived,
            _record_of(grads, bytes_per_s),
            stamp,
            f"download_{place_of(update)}",
            [value_on_host(graph, grad) for grad in grads],
            joined_on=Lane.HOST,
        )
    update.update_arg(1, parts)
    update.target = copies.HostUpdate(update.target)  # type: ignore[arg-type]
    set_stamp(update, stamp_of(update).but(lane=Lane.HOST))
    return offset


def _record_of(tensors: list[fx.Node], bytes_per_s: float) -> Transfer:
    return Transfer(
        TransferKind.COPY,
        full_bytes=sum(map(num_bytes, tensors)),
        num_tensors=len(tensors),
        dtype=tensors[0].meta["val"].dtype,
        resource=PCIE_DOWN,
        source=Pool.DEVICE,
        target=Pool.HOST,
        bytes_per_s=bytes_per_s,
    )


def numbers_on_host(graph: StepGraph, found: list[fx.Node], bytes_per_s: float) -> None:
    """Let updates on the host read copies of the numbers that another device has."""
    read = dict.fromkeys(arg for update in found for arg in update.args[4:6])
    numbers = [
        node
        for node in read
        if isinstance(node, fx.Node) and node.meta["val"].device.type != HOST.type
    ]
    if not numbers:
        return
    stamp = Stamp(
        Phase.OPTIMIZER,
        lane=Lane.D2H,
        bucket="download.numbers",
        made_by="offload_states",
        pool=Pool.HOST,
    )
    first = min(found)
    with graph.graph.inserting_before(first), graph.made_for(first):
        parts = emit_copy(
            graph,
            (copies.send_home, (numbers, bytes_per_s)),
            copies.arrived,
            _record_of(numbers, bytes_per_s),
            stamp,
            "download_numbers",
            [value_on_host(graph, number) for number in numbers],
            joined_on=Lane.HOST,
        )
    for update in found:
        for number, part in zip(numbers, parts, strict=True):
            update.replace_input_with(number, part)


def run_later(update: fx.Node, optimizer: Optimizer, after: int) -> None:
    """Let an update on the host leave its gradients to the next step."""
    assert isinstance(update.target, copies.HostUpdate)
    pending = pending_of(optimizer, stamp_of(update).params, update.target.kernel)
    update.target = LateUpdate(pending, after)


def staging_area(graph: StepGraph, more_bytes: int) -> tuple[fx.Node, int]:
    """The part of the arena that copies from the device may fill.

    Returns:
        The graph's input that is it, larger by some bytes, and where those begin.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    known = next((n for n in inputs if n.meta.get("fxzero_source") == ("staging",)), None)
    begin = num_bytes(known) if known is not None else 0
    assert graph.fake_mode is not None
    with graph.fake_mode:
        value = torch.empty(begin + more_bytes, dtype=torch.uint8)
    staging = known if known is not None else graph.input("staging", value, ("staging",))
    staging.meta["val"] = value
    set_stamp(staging, stamp_of(staging).but(pool=Pool.HOST))
    return staging, begin


def end_with_updates(graph: StepGraph, found: list[fx.Node]) -> None:
    """Let the step end with its updates."""
    stamp = Stamp(Phase.OPTIMIZER, role=Role.JOIN, made_by="offload_states")
    with graph.graph.inserting_before(graph.output):
        graph.call(copies.join_updates, (found,), stamp=stamp, name="join_updates", value=())
