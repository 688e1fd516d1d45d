"""Bring shards from the host where the ordinary loop uses them, and send their gradients there.

    full = gather([w]); y = mm(x, full)      up = bring([w]); full = gather([w']); y = mm(x, full)
    dw = reduce([…]); return y, dw       →   dw = reduce([…]); h = send_home([dw]); return y, h

What `fxzero.shard(model, offload=True)` asks for. The parameters that a graph gets are the host's,
and so are the gradients that it returns, for the user's own optimizer. What one gather carries is
brought together, each rank's own part of it, as the dtype that is gathered; what is not gathered
(stage 0, one rank) by layer. Forward and backward have a copy each where each reads a parameter.
The gradients of one reduce go down together. Whole steps have `offload_states` for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import Lane, Phase, Stamp, StepGraph
from fxzero.graph.launch import emit_copy
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.passes.parameter_copies import (
    computed_on,
    dtype_on_device,
    emit_upload,
    first_call,
    read_copy,
)
from fxzero.runtime import copies
from fxzero.sharding.host import HOST
from fxzero.sharding.params import ParamSpec
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool, Transfer, TransferKind

Together = tuple[object, ...]
"""Equal for what one copy carries."""


def on_host(graph: StepGraph) -> dict[fx.Node, ParamSpec]:
    """The inputs that live in the host's memory."""
    specs = {node: graph.specs[key] for node, key in graph.inputs.items()}
    return {node: spec for node, spec in specs.items() if spec.device is not None}


def moved_by(graph: StepGraph, lane: Lane) -> dict[fx.Node, fx.Node]:
    """By node of a transfer, its launch."""
    found: dict[fx.Node, fx.Node] = {}
    for transfer in graph.transfers(name=lane.value):
        nodes = (*transfer.prepare, transfer.launch, *transfer.parts, *transfer.finish)
        found |= dict.fromkeys(nodes, transfer.launch)
    return found


def bring_shards(
    graph: StepGraph,
    homes: Mapping[fx.Node, ParamSpec],
    bytes_per_s: float,
    *,
    fuses: bool,
) -> int:
    """Let the device read copies of parameters; return how many there are.

    Args:
        fuses: whether runs of compute are, or will be, compiled regions.
    """
    gathers = moved_by(graph, Lane.GATHER)
    found: dict[Together, dict[fx.Node, list[fx.Node]]] = {}
    for node, spec in homes.items():
        by_use: dict[Together, list[fx.Node]] = {}
        for reader in node.users:
            if reader.op == "output":
                continue  # kept for backward, which has a copy of its own
            use: Together = (gathers.get(reader), stamp_of(reader).segment)
            by_use.setdefault(use if use[0] else (*use, spec.layer), []).append(reader)
        for use, readers in by_use.items():
            where = computed_on(graph, node)
            kind = (*use, where, dtype_on_device(spec.dtype, readers, where, fuses=fuses))
            found.setdefault(kind, {})[node] = readers
    for number, (together, by_param) in enumerate(found.items()):
        *_, device, dtype = together
        assert device is None or isinstance(device, torch.device)
        assert isinstance(dtype, torch.dtype)
        record = Transfer(
            TransferKind.COPY,
            full_bytes=0,
            dtype=dtype,
            resource=PCIE_UP,
            source=Pool.HOST,
            target=Pool.DEVICE,
            bytes_per_s=bytes_per_s,
        )
        first = min(reader for readers in by_param.values() for reader in readers)
        stamp = Stamp(
            stamp_of(first).phase,
            lane=Lane.H2D,
            layer=homes[next(iter(by_param))].layer,
            bucket=f"upload.{number}",
            made_by="offload_shards",
        )
        with graph.graph.inserting_before(first), graph.made_for(first):
            name = f"upload_{number}"
            parts = emit_upload(graph, list(by_param), record, stamp, name, device)
        for (param, readers), part in zip(by_param.items(), parts, strict=True):
            for reader in readers:
                read_copy(graph, reader, param, part)
    return len(found)


def send_gradients(graph: StepGraph, bytes_per_s: float) -> int:
    """Return copies on the host of the gradients of what lives there; return how many there are."""
    reduces = moved_by(graph, Lane.REDUCE)
    values = list(graph.output_values)
    found: dict[Together, list[int]] = {}
    for position, key in graph.gradients.items():
        node, spec = values[position], graph.specs[key]
        if isinstance(node, fx.Node) and spec.device is not None:
            together: Together = (reduces.get(node) or spec.layer, spec.dtype)
            found.setdefault(together, []).append(position)
    for number, positions in enumerate(found.values()):
        grads = [values[position] for position in positions]
        keys = tuple(graph.gradients[position] for position in positions)
        record = Transfer(
            TransferKind.COPY,
            full_bytes=sum(map(num_bytes, grads)),
            num_tensors=len(grads),
            dtype=grads[0].meta["val"].dtype,
            resource=PCIE_DOWN,
            source=Pool.DEVICE,
            target=Pool.HOST,
            bytes_per_s=bytes_per_s,
        )
        stamp = Stamp(
            Phase.BACKWARD,
            lane=Lane.D2H,
            layer=graph.specs[keys[0]].layer,
            params=keys,
            bucket=f"download.{number}",
            made_by="offload_shards",
            pool=Pool.HOST,
        )
        made = max((node for node in grads if node.op != "placeholder"), default=None)
        before = made.next if made is not None else first_call(graph)
        with graph.graph.inserting_before(before), graph.made_for(made or grads[0]):
            parts = emit_copy(
                graph,
                (copies.send_home, (grads, bytes_per_s)),
                copies.join_download,
                record,
                stamp,
                f"download_{number}",
                [graph.value_of(torch.empty_like, (node,), {"device": HOST}) for node in grads],
            )
        for position, part in zip(positions, parts, strict=True):
            values[position] = part
    graph.set_output_values(values)
    return len(found)


@dataclass(frozen=True)
class OffloadShards(Pass):
    """Compute with copies of what `fxzero.shard` keeps in the host's memory."""

    name: ClassVar[str] = "offload_shards"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.LOOP})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        homes = on_host(graph)
        if not homes:
            return Notes()
        for node in homes:
            set_stamp(node, stamp_of(node).but(pool=Pool.HOST))
        rates = (ctx.throttle.bytes_per_s(lane) for lane in (Lane.H2D, Lane.D2H))
        up, down = rates
        return Notes(
            uploads=bring_shards(graph, homes, up, fuses=ctx.fuses),
            downloads=send_gradients(graph, down),
            host_bytes=sum(map(num_bytes, homes)),
        )
