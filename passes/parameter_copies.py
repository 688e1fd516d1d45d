"""Let the device read copies of parameters that live in the host's memory.

    g = gather([cast(w)])           →   up = upload([w], bf16); g = gather([join(up)[0]])
    y = mm(x, move(w, "cuda"))          up = upload([w], …, "cuda"); y = mm(x, join(up)[0])

A copy does what readers would do first: it casts where all that they do is to cast, for fewer
bytes, and it goes to the device that computes. Where that is a CPU by the books alone it goes to no
other one, and is a copy all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx
from torch.optim import Optimizer

from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.launch import Call, emit_copy
from fxzero.graph.operators import is_cast_or_copy
from fxzero.graph.stamps import stamp_of
from fxzero.runtime import copies
from fxzero.runtime.ahead import Take
from fxzero.runtime.residents import Resident, resident_of
from fxzero.sharding.host import HOST
from fxzero.transfer import PCIE_UP, Pool, Transfer, TransferKind


def computed_on(graph: StepGraph, param: fx.Node) -> torch.device | None:
    """Where copies of a parameter, or of its state, go; None where that is a CPU by the books."""
    key = graph.inputs[param]
    device: torch.device = graph.specs[key].device or param.meta["val"].device
    return None if device.type == HOST.type else device


def readers_of(param: fx.Node) -> list[fx.Node]:
    """Everything that reads a parameter on the device."""
    return [user for user in param.users if stamp_of(user).role is not Role.UPDATE]


def is_brought(node: fx.Node, device: torch.device | None, *, fuses: bool) -> bool:
    """Whether a copy to a device does what a reader of a parameter does: cast, or move.

    Args:
        fuses: whether a cast beside compute becomes part of a compiled region, where Inductor does
            not round: what is copied as that dtype is rounded, and would be another number.
    """
    if node.op != "call_function" or not is_cast_or_copy(node):
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    if fuses and stamp_of(node).role is not Role.PREPARE and value.dtype is not source.dtype:
        return False
    return bool(value.device == (device or source.device) and value.stride() == source.stride())


def dtype_on_device(
    own: torch.dtype, readers: Iterable[fx.Node], device: torch.device | None, *, fuses: bool
) -> torch.dtype:
    """The dtype in which the device reads a parameter: another one than its own where all that it
    does with it is to cast it."""
    dtypes = {
        reader.meta["val"].dtype if is_brought(reader, device, fuses=fuses) else own
        for reader in readers
    }
    return dtypes.pop() if len(dtypes) == 1 else own


def read_copies(
    graph: StepGraph,
    params: list[fx.Node],
    place: str,
    stamp: Stamp,
    bytes_per_s: float,
    optimizer: Optimizer | None,
    *,
    fuses: bool,
) -> None:
    """Let the device compute with copies of some parameters that live on the host.

    Args:
        place: what they are together, in names.
        stamp: of who changes them, or else of them.
        optimizer: whose copies stay on the device from step to step; None makes new ones in each.
        fuses: whether compute is, or will be, compiled regions.
    """
    by_kind: dict[tuple[torch.dtype, torch.device | None], list[fx.Node]] = {}
    for param in params:
        if not readers_of(param):
            continue
        device = computed_on(graph, param)
        own: torch.dtype = param.meta["val"].dtype
        dtype = dtype_on_device(own, readers_of(param), device, fuses=fuses)
        by_kind.setdefault((dtype, device), []).append(param)
    for (dtype, device), together in by_kind.items():
        record = Transfer(
            TransferKind.COPY,
            full_bytes=0,
            dtype=dtype,
            resource=PCIE_UP,
            source=Pool.HOST,
            target=Pool.DEVICE,
            bytes_per_s=bytes_per_s,
        )
        name = f"upload_{place}"
        own_stamp = stamp.but(
            phase=Phase.FORWARD,
            stage=stamp_of(min(r for param in together for r in readers_of(param))).stage,
            lane=Lane.H2D,
            bucket=f"upload.{place}" + (f".{str(dtype)[6:]}" if len(by_kind) > 1 else ""),
            made_by="offload_states",
        )
        resident = None
        if optimizer is not None:
            keys = tuple(key for param in together for key in stamp_of(param).params)
            resident = resident_of(optimizer, keys, dtype, name)
        with graph.graph.inserting_before(first_call(graph)), graph.made_for(together[0]):
            parts = emit_upload(graph, together, record, own_stamp, name, device, resident)
        (launch,) = parts[0].all_input_nodes[0].all_input_nodes
        for param, part in zip(together, parts, strict=True):
            for reader in readers_of(param):
                if reader is not launch:
                    read_copy(graph, reader, param, part)


def read_copy(graph: StepGraph, reader: fx.Node, param: fx.Node, part: fx.Node) -> None:
    """Let a reader of a parameter read its copy, or be it, where that has cast or moved it."""
    value, copied, own = (node.meta["val"] for node in (reader, part, param))
    has_changed = (copied.dtype, copied.device) != (own.dtype, own.device)
    is_it = has_changed and reader.op == "call_function" and is_cast_or_copy(reader)
    if is_it and _looks(value) == _looks(copied):
        reader.replace_all_uses_with(part)
        graph.graph.erase_node(reader)
    else:
        reader.replace_input_with(param, part)


def _looks(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, value.device, value.stride()


def emit_upload(
    graph: StepGraph,
    params: list[fx.Node],
    like: Transfer,
    stamp: Stamp,
    name: str,
    device: torch.device | None,
    resident: Resident | None = None,
) -> list[fx.Node]:
    """Emit a copy of parameters to the device, joined at once; return what it brings.

    Args:
        like: what it is, but for what it carries.
        device: see `computed_on`.
        resident: what keeps the copies from step to step, if something does.
    """
    dtype = like.dtype
    num_elements = sum(param.meta["val"].numel() for param in params)
    record = replace(like, full_bytes=num_elements * dtype.itemsize, num_tensors=len(params))
    keys = [key for param in params for key in stamp_of(param).params]
    stamp = stamp.but(params=tuple(keys), pool=Pool.DEVICE, transfer=None)
    arguments = (params, dtype, device, like.bytes_per_s)
    call: Call = (copies.upload if resident is None else Take(resident), arguments)
    form = {"dtype": dtype, "device": device}
    values = [graph.value_of(torch.empty_like, (param,), form) for param in params]
    return emit_copy(graph, call, copies.join_upload, record, stamp, name, values)


def snapshot_bytes(graph: StepGraph) -> int:
    """What the host holds of copies that stay on another device: see `fxzero.runtime.residents`."""
    return sum(
        copy.record.full_bytes
        for copy in graph.transfers(name=Lane.H2D.value)
        if isinstance(copy.launch.target, Take) and copy.launch.args[2] is not None
    )


def first_call(graph: StepGraph) -> fx.Node:
    """The first node that is no input, nor an upload of before."""
    return next(
        node
        for node in graph.graph.nodes
        if node.op != "placeholder"
        and not (node.op == "call_function" and stamp_of(node).lane is Lane.H2D)
    )
