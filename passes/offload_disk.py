"""Keep on disk what the host's memory has no room for.

    up = upload([w]); …                            up = read_params([w]); …
    u = host_adamw([w], [h], [[m], [v], [n]])   →  u = stored_adamw([w], [h], [[m], [v], [n]])

ZeRO-Infinity's third level (Rajbhandari et al. 2021): parameters and optimizer state of whole
buckets live in files, the buckets whose gradients come first before others. What the device needs
of them it is brought from there; an update reads them, changes them and writes them back, piece by
piece, with a fixed number of buffers (`fxzero.runtime.disk_streams`): `join_copies` places what
reads and what writes. Step counts stay in memory.

Gradients arrive where others have been used: see `fxzero.passes.gradient_places`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero.disk.scratch import DiskSettings
from fxzero.errors import ConfigError
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.lanes import aligned
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.base import Context, Door, Fact, Notes
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.gradient_places import (
    downloads_of,
    gradient_bytes,
    shared_bytes,
    waits_for_norm,
)
from fxzero.passes.parameter_copies import snapshot_bytes
from fxzero.passes.updates_on_host import homes_of, params_of
from fxzero.runtime.copies import HostUpdate
from fxzero.runtime.disk_arena import Bucket, bucket_of, section_bytes
from fxzero.runtime.disk_buffers import buffers_bytes
from fxzero.runtime.disk_streams import StoredUpdate, read_params_of
from fxzero.transfer import DISK_READ, Pool


@dataclass(frozen=True)
class Stored(Decision):
    """Which updates' parameters and state live on disk."""

    updates: tuple[str, ...] = ()
    """Their nodes, in the order in which their gradients are there."""
    disk_bytes: int = 0
    """Of what is there."""
    host_bytes: int = 0
    """Of what is left in the host's memory, gradients on their way and buffers among it."""


def host_updates(graph: StepGraph) -> list[fx.Node]:
    """The updates of what is in the host's memory, in the order in which their gradients are
    there."""
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    downloads = downloads_of(graph)
    found = [
        node
        for node in graph.nodes(role=Role.UPDATE)
        if isinstance(node.target, HostUpdate) and _is_congruent(node)
    ]
    return sorted(found, key=lambda node: max(place[grad] for grad in downloads[node].tensors))


def _is_congruent(update: fx.Node) -> bool:
    """Whether the state of each parameter lies as the parameter does, but for numbers."""
    params = [node.meta["val"] for node in params_of(update)]
    return len({value.dtype for value in params}) == 1 and all(
        value.dtype == param.dtype and value.shape == param.shape
        for part in _large_state(update)
        for value, param in zip((node.meta["val"] for node in part), params, strict=True)
    )


def _large_state(update: fx.Node) -> list[list[fx.Node]]:
    """State that is as large as a parameter: all but step counts, which come last."""
    return [list(part) for part, name in zip(update.args[2], _names(update), strict=True) if name]  # type: ignore[arg-type]


def large_homes(update: fx.Node) -> list[fx.Node]:
    """What of an update can be on disk: its parameters, and state that is as large."""
    return [*params_of(update), *(node for part in _large_state(update) for node in part)]


def _names(update: fx.Node) -> list[str]:
    """Names of an update's kinds of state; empty for step counts."""
    found = []
    for part in update.args[2]:  # type: ignore[union-attr]
        name = str(part[0].meta["fxzero_source"][2])  # type: ignore[index,union-attr]
        found.append("" if name == "step" else name)
    return found


def bucket_for(update: fx.Node, ctx: Context) -> Bucket:
    """What an update's parameters and state are on disk."""
    assert ctx.optimizer is not None
    names = tuple(name for name in _names(update) if name)
    return bucket_of(ctx.optimizer.optimizer, stamp_of(update).params, names)


def stored_bytes(update: fx.Node) -> int:
    """What an update's parameters and state take on disk."""
    return (1 + len(_large_state(update))) * _section_bytes(update)


def _section_bytes(update: fx.Node) -> int:
    return section_bytes([num_bytes(node) for node in params_of(update)])


def _in_memory(update: fx.Node) -> int:
    """What they take in the host's memory."""
    return sum(aligned(num_bytes(node)) for node in homes_of(update))


def bring_from_disk(
    graph: StepGraph, copy: TransferNodes, bucket: Bucket, buffers: fx.Node, bytes_per_s: float
) -> None:
    """Let a copy to the device begin on disk."""
    params, dtype, device, _ = copy.launch.args
    record = replace(copy.record, source=Pool.DISK, resource=DISK_READ, bytes_per_s=bytes_per_s)
    copy.launch.target = read_params_of(bucket, copy.stamp.params)
    copy.launch.args = (params, dtype, device, buffers, bytes_per_s)
    for node in (copy.launch, copy.wait, *copy.parts):
        changes: dict[str, Any] = {"lane": Lane.READ}
        if node is copy.launch:
            changes["transfer"] = record
        set_stamp(node, stamp_of(node).but(**changes))


@dataclass(frozen=True)
class OffloadDisk(DecidingPass[Stored]):
    """Hold on disk what the host has no room for."""

    name: ClassVar[str] = "offload_disk"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UPDATED, Fact.BUCKETED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})
    decides: ClassVar[type[Any]] = Stored

    budget_bytes: int | None = None
    """What may be held on the host; None to hold all on disk. See `host_budget`."""
    asked: str = field(default="least", repr=False)
    """The same as somebody has asked for it."""
    disk: DiskSettings = field(default_factory=DiskSettings)
    """See `disk`."""

    def decide(self, graph: StepGraph, ctx: Context) -> Stored:
        """Move as few buckets as leave what is on the host within its budget.

        Raises:
            ConfigError: even with all of them on disk the host has to hold more.
        """
        updates = host_updates(graph)
        every = [n for n in graph.nodes(role=Role.UPDATE) if isinstance(n.target, HostUpdate)]
        counts = range(len(updates) + 1)
        held = [self._held_bytes(graph, every, updates[:count]) for count in counts]
        if self.budget_bytes is None:
            count = len(updates)
        else:
            fits = [i for i, own in enumerate(held) if own <= self.budget_bytes]
            if not fits:
                least = min(held)
                raise ConfigError(
                    f"host_budget={self.asked!r} ({self.budget_bytes} bytes) is less than this "
                    f"step can do with: {least} bytes are held on the host with "
                    f"{held.index(least)} of {len(every)} buckets on disk (gradients on their way, "
                    "buffers of the disk, and what cannot go there). Allow that much, make "
                    "disk.chunk_bytes smaller, or buckets (bucket.cap_bytes)."
                )
            count = fits[0]
        chosen = updates[:count]
        return Stored(
            tuple(update.name for update in chosen),
            sum(map(stored_bytes, chosen)),
            held[count],
        )

    def _held_bytes(self, graph: StepGraph, every: list[fx.Node], chosen: list[fx.Node]) -> int:
        """What the host holds with some updates' buckets on disk."""
        found = sum(_in_memory(update) for update in every)
        found -= sum(aligned(num_bytes(node)) for update in chosen for node in large_homes(update))
        found += snapshot_bytes(graph)
        found += sum(
            num_bytes(node)
            for node in graph.graph.find_nodes(op="placeholder")
            if node.meta.get("fxzero_source") == ("staging",)
        )
        if chosen and not any(map(waits_for_norm, chosen)):
            sizes = list(map(gradient_bytes, chosen))
            found += shared_bytes(sizes) - sum(sizes)
        return found + self._buffers_bytes(chosen)

    def _buffers_bytes(self, chosen: list[fx.Node]) -> int:
        if not chosen:
            return 0
        most_kinds = max(1 + len(_large_state(update)) for update in chosen)
        piece_bytes = min(self.disk.chunk_bytes, max(map(_section_bytes, chosen)))
        return buffers_bytes(self.disk.depth, most_kinds, piece_bytes)

    def apply(self, graph: StepGraph, decision: Stored, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: the decision names an update that there is not, or that cannot go.
        """
        known = {update.name: update for update in host_updates(graph)}
        for name in decision.updates:
            if name not in known:
                raise ConfigError(
                    f"the plan holds {name!r} on disk, and could hold: {', '.join(known) or 'none'}"
                    ". Where offload_states was changed, drop offload_disk: it is then decided "
                    "anew."
                )
        chosen = [known[name] for name in decision.updates]
        if not chosen:
            return Notes()
        assert graph.fake_mode is not None
        with graph.fake_mode:
            value = torch.empty(self._buffers_bytes(chosen), dtype=torch.uint8)
        buffers = graph.input("disk_buffers", value, ("disk_buffers", self.disk))
        set_stamp(buffers, stamp_of(buffers).but(pool=Pool.HOST))
        copies = [c for c in graph.transfers(name=Lane.H2D.value) if c.of_parameters]
        for update in chosen:
            bucket = bucket_for(update, ctx)
            assert isinstance(update.target, HostUpdate)
            update.target = StoredUpdate(update.target.kernel, bucket)
            for home in large_homes(update):
                set_stamp(home, stamp_of(home).but(pool=Pool.DISK))
            own = set(params_of(update))
            for copy in copies:
                if own.issuperset(copy.tensors):
                    rate = ctx.throttle.bytes_per_s(Lane.READ)
                    bring_from_disk(graph, copy, bucket, buffers, rate)
        return Notes(
            updates=len(chosen), disk_bytes=decision.disk_bytes, host_bytes=decision.host_bytes
        )
