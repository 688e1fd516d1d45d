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

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from torch import fx

from fxzero.errors import ConfigError
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.lanes import aligned
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes, Room
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.parameter_copies import (
    computed_on,
    dtype_on_device,
    read_copies,
    readers_of,
    snapshot_bytes,
)
from fxzero.passes.streamed_updates import large_state, stream
from fxzero.passes.updates_on_host import (
    end_with_updates,
    grads_of,
    homes_of,
    movable_updates,
    numbers_on_host,
    params_of,
    place_of,
    run_later,
    staging_area,
    update_on_host,
    value_on_host,
)
from fxzero.runtime.optimizers import fused_on
from fxzero.settings import Share, a_share, at_least, decided
from fxzero.sharding.host import HOST
from fxzero.transfer import Pool


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


def _on_another_device(params: list[fx.Node]) -> bool:
    """Whether parameters' own memory is that of a device, which is no CPU by the books."""
    return any(param.meta["val"].device.type != HOST.type for param in params)


def _live_on_host(graph: StepGraph, params: list[fx.Node]) -> bool:
    """Whether `fxzero.shard` keeps parameters in the host's memory."""
    return all(graph.specs[graph.inputs[param]].device is not None for param in params)


def _frozen(graph: StepGraph, updated: Collection[fx.Node]) -> list[fx.Node]:
    """Parameters that `fxzero.shard` keeps in the host's memory, and that no update changes."""
    trained = {param for update in updated for param in params_of(update)}
    return [
        node
        for node, key in graph.inputs.items()
        if graph.specs[key].device is not None and node not in trained and node.users
    ]


def copy_frozen(
    graph: StepGraph, frozen: list[fx.Node], bytes_per_s: float, *, fuses: bool
) -> None:
    """Let the device read copies of parameters that nobody updates, a layer's together: new ones in
    each step, as to compare them with what was sent takes the host as long."""
    by_layer: dict[str, list[fx.Node]] = {}
    for param in frozen:
        by_layer.setdefault(graph.specs[graph.inputs[param]].layer, []).append(param)
    for layer, own in by_layer.items():
        stamp = Stamp(Phase.FORWARD, layer=layer)
        place = f"frozen_{layer.replace('.', '_')}"
        read_copies(graph, own, place, stamp, bytes_per_s, None, fuses=fuses)


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
    lower precision, and for what `offload_params` brings. On a GPU parameters are on the host if
    ``fxzero.shard(offload=True)`` keeps them there, and only then: an update on the host needs it,
    and one on the device leaves them where they are."""
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
            ConfigError: the optimizer's update is no call of torch's kernels, or what is to be
                updated on the host does not live there.
        """
        self._refuse(graph, ctx)
        movable = [u for u in self._movable(graph, ctx) if self._homes_of(graph, u, ctx)]
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
            sum(num_bytes(n) for update in chosen for n in self._homes_of(graph, update, ctx)),
        )

    def _movable(self, graph: StepGraph, ctx: Context) -> list[fx.Node]:
        """The updates that can be of what is on the host: one there changes parameters there."""
        found = movable_updates(graph)
        if self.update is Place.HOST or ctx.params_on_host:
            found = [update for update in found if not _on_another_device(params_of(update))]
        return found

    def _homes_of(self, graph: StepGraph, update: fx.Node, ctx: Context) -> list[fx.Node]:
        """What lives on the host of what an update changes."""
        if self.update is Place.HOST:
            return homes_of(update)
        params = params_of(update)
        if not _live_on_host(graph, params):
            params = [] if _on_another_device(params) else self._masters(graph, params, ctx)
        return [*params, *large_state(update)]

    def _masters(self, graph: StepGraph, params: list[fx.Node], ctx: Context) -> list[fx.Node]:
        """Parameters that compute reads as another dtype, or brings for each use."""
        return [
            param
            for param in params
            if ctx.params_on_host
            or dtype_on_device(
                param.meta["val"].dtype,
                readers_of(param),
                computed_on(graph, param),
                fuses=ctx.fuses,
            )
            is not param.meta["val"].dtype
        ]

    def _refuse(self, graph: StepGraph, ctx: Context) -> None:
        layout = ctx.optimizer
        assert layout is not None
        asked = f"offload_states.share={decided(self.share):g}"
        if not layout.kernels:
            raise ConfigError(
                f"{asked}: {layout.name} runs its own step() here, which offload cannot take "
                "apart. What torch has a fused CPU kernel for can be offloaded: SGD (without "
                "dampening), Adam, AdamW and Adagrad, without foreach=True, fused=False or hooks, "
                "on parameters without gaps in memory, of dtypes that the kernel is right for, on "
                "a GPU with fused=True."
            )
        movable = self._movable(graph, ctx)
        if not movable and (at_all := movable_updates(graph)):
            params = params_of(at_all[0])
            raise ConfigError(
                f"{asked}: the parameters are on {params[0].meta['val'].device}, and what is "
                "updated on the host, or brought where it is used, lives there. Shard with "
                "fxzero.shard(model, offload=True), before the optimizer is made; or let state "
                "alone go to the host, with options={'memory': 'states_host', 'offload_states': "
                "{'update': 'device'}}."
            )
        every = [param for update in movable for param in params_of(update)]
        device = computed_on(graph, every[0]) if every else None
        if self.update is Place.DEVICE and device is not None and not fused_on(layout, device):
            raise ConfigError(
                f"offload_states.update=device: torch has no fused {layout.name} on {device} that "
                "is right for these parameters. Leave out the setting: it has one on the host."
            )
        stay = [param for param in every if self._should_go(graph, param, ctx)]
        if stay:
            ctx.warnings.append(
                f"{asked} leaves {len(stay)} fp32 masters on {stay[0].meta['val'].device}, where "
                "their parameters live: fxzero.shard(model, offload=True) keeps them on the host"
            )
        fused = {update.name for update in graph.nodes(role=Role.UPDATE) if stamp_of(update).params}
        own = fused - {update.name for update in movable}
        if own and self.share == 1:
            ctx.warnings.append(
                f"{asked} leaves {', '.join(sorted(own))} on the device: the forward writes to "
                "their parameters, lower_kernels.force=adamw takes our own kernel for them, or "
                "fxzero.shard(ignored=…) leaves them there"
            )

    def _should_go(self, graph: StepGraph, param: fx.Node, ctx: Context) -> bool:
        """Whether a parameter of a GPU is a master that would be on the host, were it not there."""
        return _on_another_device([param]) and bool(self._masters(graph, [param], ctx))

    def apply(self, graph: StepGraph, decision: Offloaded, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: the decision names an update that there is not, or that must stay.
        """
        known = {update.name: update for update in self._movable(graph, ctx)}
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
        by_update = {update: self._homes_of(graph, update, ctx) for update in chosen}
        frozen = _frozen(graph, by_update)
        homes = [home for own in by_update.values() for home in own] + frozen
        for home in homes:
            home.meta["val"] = value_on_host(graph, home)
            set_stamp(home, stamp_of(home).but(pool=Pool.HOST))
        rate = ctx.throttle.bytes_per_s(Lane.H2D)
        copy_frozen(graph, frozen, rate, fuses=ctx.fuses)

        assert ctx.optimizer is not None
        least = ctx.level is not None and ctx.level.room is Room.LEAST
        stays = self.delay or (self.ahead and not least)
        optimizer = ctx.optimizer.optimizer if stays else None

        def first_read(update: fx.Node) -> int:
            readers = [place[r] for param in params_of(update) for r in readers_of(param)]
            return min(readers, default=len(place))

        for update in sorted(chosen, key=first_read):
            own = [param for param in params_of(update) if stamp_of(param).pool is Pool.HOST]
            name, stamp = place_of(update), stamp_of(update)
            read_copies(graph, own, name, stamp, rate, optimizer, fuses=ctx.fuses)
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
        numbers_on_host(graph, chosen, ctx.throttle.bytes_per_s(Lane.D2H))
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
        host_bytes += snapshot_bytes(graph)
        return Notes(updates=len(chosen), host_bytes=host_bytes, up_bytes=up, down_bytes=down)
