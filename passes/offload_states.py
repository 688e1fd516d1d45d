"""Keep optimizer state, and the parameters that it belongs to, in the host's memory.

    g = gather([w]); …                     up = upload([w]); …; g = gather([join(up)[0]]); …
    dw = wait(reduce)[0]               →   down = download([dw]); h = arrived(down)[0]
    adamw([w], [dw], [[exp_avg], …])       u = host_adamw([w], [h], [[exp_avg], …]); …
                                           join_updates([u])

ZeRO-Offload (Ren et al. 2021): what the optimizer alone reads leaves the device. A parameter's
own shard is the fp32 master, on the host; compute reads a copy of it, in the dtype in which it is
gathered. Each bucket's gradient goes down as soon as it is there, torch's fused kernel updates it
on the host's cores while backward goes on, and the result comes back behind it, for the next step
to find (`fxzero.runtime.residents`). Where gradients are clipped, or a loss is scaled, updates wait
for the norm, and copies do not.

With ``update=device`` state streams through the device instead, and is updated there: see
`fxzero.passes.streamed_updates`.

With a `share` it is the buckets whose gradients come first that go: those that come last stay, as
nothing is left that their copies could hide behind (SuperOffload, Lian et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import fx
from torch.optim import Optimizer

from fxzero.errors import ConfigError
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.launch import Call, emit_copy
from fxzero.graph.operators import is_cast_or_copy, num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes, Room
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.streamed_updates import large_state, stream
from fxzero.runtime import copies, updates
from fxzero.runtime.ahead import Take
from fxzero.runtime.arena import aligned
from fxzero.runtime.delayed import LateUpdate, pending_of
from fxzero.runtime.residents import Resident, resident_of
from fxzero.settings import Share, a_share, at_least, decided
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool, Transfer, TransferKind


class Place(StrEnum):
    """Where what lives on the host is updated."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True)
class Offloaded(Decision):
    """Which updates' state lives on the host."""

    updates: tuple[str, ...] = ()
    """Their nodes, in the order in which their gradients are there."""
    host_bytes: int = 0
    """Of parameters and optimizer state that are held there."""


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


def readers_of(param: fx.Node) -> list[fx.Node]:
    """Everything that reads a parameter on the device."""
    return [user for user in param.users if stamp_of(user).role is not Role.UPDATE]


def read_copies(
    graph: StepGraph,
    update: fx.Node,
    bytes_per_s: float,
    optimizer: Optimizer | None,
    *,
    fuses: bool,
) -> None:
    """Let the device compute with copies of an update's parameters that live on the host.

    Args:
        fuses: whether compute is, or will be, compiled regions.
        optimizer: whose copies stay on the device from step to step; None makes new ones in each.
    """
    on_host = [param for param in params_of(update) if stamp_of(param).pool is Pool.HOST]
    params = [param for param in on_host if readers_of(param)]
    by_dtype: dict[torch.dtype, list[fx.Node]] = {}
    for param in params:
        by_dtype.setdefault(dtype_on_device(param, fuses=fuses), []).append(param)
    for dtype, own in by_dtype.items():
        record = Transfer(
            TransferKind.COPY,
            full_bytes=0,
            dtype=dtype,
            resource=PCIE_UP,
            source=Pool.HOST,
            target=Pool.DEVICE,
            bytes_per_s=bytes_per_s,
        )
        name = f"upload_{_place(update)}"
        stamp = stamp_of(update).but(
            phase=Phase.FORWARD,
            lane=Lane.H2D,
            bucket=f"upload.{_place(update)}" + (f".{str(dtype)[6:]}" if len(by_dtype) > 1 else ""),
            made_by="offload_states",
        )
        resident = None
        if optimizer is not None:
            keys = tuple(key for param in own for key in stamp_of(param).params)
            resident = resident_of(optimizer, keys, dtype, name)
        with graph.graph.inserting_before(first_call(graph)), graph.made_for(own[0]):
            parts = emit_upload(graph, own, record, stamp, name, resident)
        (launch,) = parts[0].all_input_nodes[0].all_input_nodes
        for param, part in zip(own, parts, strict=True):
            for reader in readers_of(param):
                if reader is launch:
                    continue
                reader.replace_input_with(param, part)
                if dtype is not param.meta["val"].dtype:  # the copy has cast it
                    reader.replace_all_uses_with(part)
                    graph.graph.erase_node(reader)


def emit_upload(
    graph: StepGraph,
    params: list[fx.Node],
    like: Transfer,
    stamp: Stamp,
    name: str,
    resident: Resident | None = None,
    device: torch.device | None = None,
) -> list[fx.Node]:
    """Emit a copy of parameters to the device, joined at once; return what it brings.

    Args:
        like: what it is, but for what it carries.
        resident: what keeps the copies from step to step, if something does.
        device: where they go; by default they are tensors of it by the books alone.
    """
    dtype = like.dtype
    num_elements = sum(param.meta["val"].numel() for param in params)
    record = replace(like, full_bytes=num_elements * dtype.itemsize, num_tensors=len(params))
    keys = [key for param in params for key in stamp_of(param).params]
    stamp = stamp.but(params=tuple(keys), pool=Pool.DEVICE, transfer=None)
    call: Call = (copies.upload, (params, dtype, like.bytes_per_s))
    if resident is not None:
        call = (Take(resident), call[1])
    if device is not None:
        call = (copies.bring, (params, dtype, device, like.bytes_per_s))
    form = {"dtype": dtype} if device is None else {"dtype": dtype, "device": device}
    values = [graph.value_of(torch.empty_like, (param,), form) for param in params]
    return emit_copy(graph, call, copies.join_upload, record, stamp, name, values)


def first_call(graph: StepGraph) -> fx.Node:
    """The first node that is no input, nor an upload of before."""
    return next(
        node
        for node in graph.graph.nodes
        if node.op != "placeholder"
        and not (node.op == "call_function" and stamp_of(node).lane is Lane.H2D)
    )


def dtype_on_device(param: fx.Node, *, fuses: bool) -> torch.dtype:
    """The dtype in which the device reads a parameter: another one where all that it does with it
    is to cast it.

    Args:
        fuses: whether a cast beside compute becomes part of a compiled region, where Inductor does
            not round: what is copied as that dtype is rounded, and would be another number.
    """
    own: torch.dtype = param.meta["val"].dtype
    readers = readers_of(param)
    if not all(_only_casts(reader, fuses) for reader in readers):
        return own
    cast = {reader.meta["val"].dtype for reader in readers}
    return cast.pop() if len(cast) == 1 else own


def _only_casts(node: fx.Node, fuses: bool) -> bool:
    if node.op != "call_function" or not is_cast_or_copy(node):
        return False
    if fuses and stamp_of(node).role is not Role.PREPARE:
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return (value.device, value.stride()) == (source.device, source.stride())


def update_on_host(
    graph: StepGraph, update: fx.Node, staging: fx.Node, offset: int, bytes_per_s: float
) -> int:
    """Run an update on the host; return where in the staging area the next gradients may be."""
    params, grads = params_of(update), grads_of(update)
    offsets = []
    for grad in grads:
        offsets.append(offset)
        offset += aligned(num_bytes(grad))
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
    stamp = stamp_of(update).but(
        lane=Lane.D2H,
        pool=Pool.HOST,
        bucket=f"download.{_place(update)}",
        made_by="offload_states",
    )
    values = [grad.meta["val"] for grad in grads]
    dtypes = [value.dtype for value in values]
    with graph.graph.inserting_before(update), graph.made_for(update):
        parts = emit_copy(
            graph,
            (copies.download, (grads, params, staging, offsets, dtypes, [], bytes_per_s)),
            copies.arrived,
            record,
            stamp,
            f"download_{_place(update)}",
            values,
            joined_on=Lane.HOST,
        )
    update.update_arg(1, parts)
    update.target = copies.HostUpdate(update.target)  # type: ignore[arg-type]
    set_stamp(update, stamp_of(update).but(lane=Lane.HOST))
    return offset


def run_later(update: fx.Node, optimizer: Optimizer, after: int) -> None:
    """Let an update on the host leave its gradients to the next step."""
    assert isinstance(update.target, copies.HostUpdate)
    pending = pending_of(optimizer, stamp_of(update).params, update.target.kernel)
    update.target = LateUpdate(pending, after)


def _place(update: fx.Node) -> str:
    return update.name.removeprefix("update_")


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


@dataclass(frozen=True)
class OffloadStates(DecidingPass[Offloaded]):
    """Update parameters on the host."""

    name: ClassVar[str] = "offload_states"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATED, Fact.BUCKETED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})
    decides: ClassVar[type[Any]] = Offloaded

    share: Share = None
    """In whole steps: the part of the parameters' bytes whose optimizer state, and fp32 masters,
    live in the host's memory and are updated there; the buckets whose gradients come first go
    first. ``auto`` decides it by cost: as much as makes the step no slower, or within a
    `memory_budget` as much as makes it fastest. None, the default, is what `memory` says: 1 with
    ``states_host``, else 0."""
    ahead: bool = True
    """Copy parameters back to the device as soon as they are updated, where their copies then stay
    from step to step; else in the step that needs them, until it has read them last. Under a
    `memory_budget` that leaves no room, it is else."""
    update: Place = Place.HOST
    """Where it is updated: on the ``host``, by its cores, or on the ``device``, where state comes
    in for an update and goes back behind it, two updates' at a time: more bytes, and no work for
    the host. Parameters stay on the device then, but for fp32 masters of what is computed in a
    lower precision, and for what `offload_params` brings."""
    delay: int = 0
    """1 leaves each update to the next step, where it runs beside forward and backward, which read
    parameters of before it (ZeRO-Offload's delayed parameter update). Of whole steps alone whose
    copies stay on the device (`ahead`, no `offload_params`, nothing on disk)."""
    delay_after: int = 0
    """With `delay`: how many steps to train without, as gradients change much in the beginning."""

    def __post_init__(self) -> None:
        """A part is between nothing and all of it."""
        super().__post_init__()
        a_share("offload_states.share", self.share)
        at_least("offload_states.delay", self.delay, 0)
        at_least("offload_states.delay_after", self.delay_after, 0)
        if self.delay > 1:
            raise ConfigError(
                f"offload_states.delay={self.delay}: an update can be one step late, or none"
            )
        if self.delay and not self.ahead:
            raise ConfigError(
                "offload_states.delay=1 needs copies that stay on the device while the update "
                "changes the parameters: leave out offload_states.ahead=False"
            )
        if self.delay and self.update is Place.DEVICE:
            raise ConfigError(
                "offload_states.delay=1 and offload_states.update=device: an update on the device "
                "has nothing to hide behind. Leave out one of them."
            )

    def decide(self, graph: StepGraph, ctx: Context) -> Offloaded:
        """Take the buckets whose gradients come first.

        Raises:
            ConfigError: the optimizer's update is no call of torch's kernels, or not on the CPU.
        """
        self._refuse(graph, ctx)
        movable = [u for u in movable_updates(graph) if self._homes_of(u, ctx)]
        every_bytes = sum(num_bytes(p) for update in movable for p in params_of(update))
        wanted_bytes = decided(self.share) * every_bytes
        chosen: list[fx.Node] = []
        taken_bytes = 0
        for update in movable:
            own_bytes = sum(map(num_bytes, params_of(update)))
            if taken_bytes + own_bytes / 2 > wanted_bytes:
                break
            chosen.append(update)
            taken_bytes += own_bytes
        if not movable and self.update is Place.DEVICE:
            ctx.warnings.append(
                "offload_states.update=device moves nothing: this optimizer keeps no state, and "
                "parameters stay on the device"
            )
        elif movable and not chosen:
            least = sum(map(num_bytes, params_of(movable[0])))
            ctx.warnings.append(
                f"offload_states.share={decided(self.share):g} moves nothing: the bucket whose "
                f"gradients come first has {least} of {every_bytes} bytes. Raise it, or make "
                "buckets smaller (bucket.cap_bytes)."
            )
        return Offloaded(
            tuple(update.name for update in chosen),
            sum(num_bytes(node) for update in chosen for node in self._homes_of(update, ctx)),
        )

    def _homes_of(self, update: fx.Node, ctx: Context) -> list[fx.Node]:
        """What lives on the host of what an update changes."""
        if self.update is Place.HOST:
            return homes_of(update)
        params = [
            param
            for param in params_of(update)
            if ctx.params_on_host
            or dtype_on_device(param, fuses=ctx.fuses) is not param.meta["val"].dtype
        ]
        return [*params, *large_state(update)]

    def _refuse(self, graph: StepGraph, ctx: Context) -> None:
        layout = ctx.optimizer
        assert layout is not None
        asked = f"offload_states.share={decided(self.share):g}"
        if not layout.kernels:
            raise ConfigError(
                f"{asked}: {layout.name} runs its own step() here, which offload cannot take "
                "apart. What torch has a fused CPU kernel for can be offloaded: SGD (without "
                "dampening), Adam, AdamW and Adagrad, without foreach=True, fused=False or hooks, "
                "on parameters without gaps in memory, of dtypes that the kernel is right for."
            )
        devices = {node.meta["val"].device.type for node in graph.inputs}
        if devices - {"cpu"}:
            raise ConfigError(
                f"{asked}: the parameters are on {', '.join(sorted(devices))}. Copies to and from "
                "a GPU are not built yet: offload runs on CPU devices alone."
            )
        fused = {update.name for update in graph.nodes(role=Role.UPDATE) if stamp_of(update).params}
        own = fused - {update.name for update in movable_updates(graph)}
        if own and self.share == 1:
            ctx.warnings.append(
                f"{asked} leaves {', '.join(sorted(own))} on the device: the forward writes to "
                "their parameters, or lower_kernels.force=adamw takes our own kernel for them"
            )

    def apply(self, graph: StepGraph, decision: Offloaded, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: the decision names an update that there is not, or that must stay.
        """
        known = {update.name: update for update in movable_updates(graph)}
        for name in decision.updates:
            if name not in known:
                raise ConfigError(
                    f"the plan offloads {name!r}, and could offload: {', '.join(known) or 'none'}. "
                    "Where buckets were changed, drop offload_states: it is then decided anew."
                )
        chosen = [known[name] for name in decision.updates]
        if not chosen:
            return Notes()
        place = {node: i for i, node in enumerate(graph.graph.nodes)}
        by_update = {update: self._homes_of(update, ctx) for update in chosen}
        homes = [home for own in by_update.values() for home in own]
        for home in homes:
            set_stamp(home, stamp_of(home).but(pool=Pool.HOST))

        assert ctx.optimizer is not None
        least = ctx.level is not None and ctx.level.room is Room.LEAST
        stays = self.delay or (self.ahead and not least)
        optimizer = ctx.optimizer.optimizer if stays else None

        def first_read(update: fx.Node) -> int:
            readers = [place[r] for param in params_of(update) for r in readers_of(param)]
            return min(readers, default=len(place))

        for update in sorted(chosen, key=first_read):
            rate = ctx.throttle.bytes_per_s(Lane.H2D)
            read_copies(graph, update, rate, optimizer, fuses=ctx.fuses)
        if self.update is Place.DEVICE:
            for update, own in by_update.items():
                params = [param for param in params_of(update) if param in own]
                stream(graph, update, params, ctx.throttle)
            return self._notes(graph, chosen, sum(map(num_bytes, homes)))
        staging_bytes = sum(aligned(num_bytes(g)) for u in chosen for g in grads_of(u))
        staging, offset = staging_area(graph, staging_bytes)
        for update in chosen:
            offset = update_on_host(
                graph, update, staging, offset, ctx.throttle.bytes_per_s(Lane.D2H)
            )
        if self.delay:
            for update in chosen:
                run_later(update, ctx.optimizer.optimizer, self.delay_after)
        end_with_updates(graph, chosen)
        return self._notes(graph, chosen, sum(map(num_bytes, homes)) + staging_bytes)

    def _notes(self, graph: StepGraph, chosen: list[fx.Node], host_bytes: int) -> Notes:
        up, down = (
            sum(copy.record.full_bytes for copy in graph.transfers(name=lane.value))
            for lane in (Lane.H2D, Lane.D2H)
        )
        return Notes(updates=len(chosen), host_bytes=host_bytes, up_bytes=up, down_bytes=down)
