"""What must hold of a copy between pools by itself: its record, its places, what it casts.

    up = upload([w], bf16, "cuda")    of what lives on the host, and is cast there; to the device
    down = download([dw], …)          of the device; to the CPU

What must hold between copies, and whoever runs beside them, is `fxzero.graph.lanes`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxzero.graph.belongings import Finding
from fxzero.graph.stamps import Lane, Role, stamp_of
from fxzero.graph.step_graph import StepGraph, TransferNodes
from fxzero.transfer import DISK_READ, PCIE_DOWN, PCIE_UP, Pool

_UP = frozenset({Lane.H2D, Lane.READ})
"""Lanes of copies to the device."""


def wrong_copy(copy: TransferNodes) -> Iterator[Finding]:
    """A record that says something else than is done, and a cast that comes too soon."""
    yield from _wrong_record(copy)
    yield from _cast_too_soon(copy)


def elsewhere(graph: StepGraph) -> Iterator[Finding]:
    """What is in the host's memory, or on disk, is a tensor of the CPU, wherever compute is; what
    is copied to the device is a tensor of the device that it is copied to."""
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        stamp = stamp_of(node)
        goes_up = stamp.role is Role.LAUNCH and stamp.lane in _UP
        wanted = node.args[2] if goes_up and len(node.args) > 2 else None
        device = wanted if isinstance(wanted, torch.device) else None
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            on_host = stamp.pool is not Pool.DEVICE
            if (on_host and tensor.device.type != "cpu") or (device and tensor.device != device):
                yield Finding(
                    node,
                    f"{node.name} is in pool {stamp.pool} and a tensor of {tensor.device}",
                    "Say where a copy goes: fxzero.passes.parameter_copies.computed_on.",
                )


_WAYS = {
    Lane.H2D: ((Pool.HOST, Pool.DEVICE), PCIE_UP),
    Lane.D2H: ((Pool.DEVICE, Pool.HOST), PCIE_DOWN),
    Lane.READ: ((Pool.DISK, Pool.DEVICE), DISK_READ),
}
"""By lane, the pools between which a copy goes, and what it occupies."""


def _wrong_record(copy: TransferNodes) -> Iterator[Finding]:
    """A record that says something else than what is copied."""
    record, sent = copy.record, copy.tensors
    goes_up = copy.stamp.lane is not Lane.D2H
    pools, resource = _WAYS[copy.stamp.lane]
    values = copy.launch.meta["val"]
    moved = sum(value.numel() * value.element_size() for value in values)
    dtype = (copy.launch.args[1] if goes_up else None) or record.dtype
    does: tuple[object, ...] = (len(sent), moved, *pools, copy.launch.args[-1], dtype, resource)
    said: tuple[object, ...] = (record.num_tensors, record.full_bytes)
    said += (record.source, record.target, record.bytes_per_s, record.dtype, record.resource)
    if said != does:
        yield Finding(
            copy.launch,
            f"{copy.launch.name} copies {len(sent)} tensors, {moved} bytes, from {pools[0]} to "
            f"{pools[1]}, by {does[4:]}, and its record says {said}",
            "Write the record when the tensors are known.",
        )


def _cast_too_soon(copy: TransferNodes) -> Iterator[Finding]:
    """The host casts before compute is where it launches the copy: what no node has made."""
    dtype = copy.launch.args[1] if copy.stamp.lane in _UP else None
    for source in copy.tensors:
        if dtype not in (None, source.meta["val"].dtype) and source.op != "placeholder":
            yield Finding(
                copy.launch,
                f"{copy.launch.name} casts {source.name} on the host, which may come before it is "
                "there",
                "Cast what lives on the host, or on the device.",
            )
