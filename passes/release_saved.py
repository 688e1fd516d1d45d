"""End the life of each saved activation at its last use in backward.

    dw = mm(g, saved)               dw = mm(g, saved)
    ...                         →   release_saved([saved])
                                    ...

Autograd holds what was saved until the whole backward has returned. Backward's own
inputs that nothing else can see (they are neither inputs nor outputs of the forward)
are freed as soon as no node reads them. When the caller asked for ``retain_graph`` the
operator leaves them alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import Phase, Role, Stamp, StepGraph
from fxzero.graph.aliases import root, view_base
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import has_stamp, stamp_of
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.regions.cutout import end_of_run

MIN_BYTES = 1 << 12
"""Smaller tensors are not worth a call."""


def private_saved(
    joint: fx.Graph, saved: Collection[fx.Node], forward_outputs: Collection[fx.Node]
) -> set[str]:
    """Names of saved values whose memory nobody but backward can see.

    A value whose memory is looked at by another saved value is left out too, unless it
    is the only one.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in joint.nodes:
        base = view_base(node)
        roots[node] = roots[base] if base is not None else node
    visible = {roots[n] for n in forward_outputs}
    owners: dict[fx.Node, int] = {}
    for node in saved:
        owners[roots[node]] = owners.get(roots[node], 0) + 1
    return {
        node.name
        for node in saved
        if roots[node].op != "placeholder"
        and roots[node] not in visible
        and owners[roots[node]] == 1
    }


def last_reader(node: fx.Node) -> fx.Node | None:
    """The last node that reads this one's memory; None if that leaves the graph. A transfer reads
    what it sends until it is waited for."""
    owner = root(node)
    seen = [node]
    last: fx.Node | None = None
    for current in seen:
        for user in current.users:
            if user.op == "output":
                return None
            reader = _wait_of(user) if is_launch(user) else user
            last = reader if last is None or last < reader else last
            if user not in seen and root(user) is owner:  # parts of a split too
                seen.append(user)
    return last


def is_launch(node: fx.Node) -> bool:
    """Whether a node starts a transfer."""
    return has_stamp(node) and stamp_of(node).role is Role.LAUNCH


def _wait_of(launch: fx.Node) -> fx.Node:
    return next(user for user in launch.users if stamp_of(user).role is Role.WAIT)


@dataclass(frozen=True)
class ReleaseSaved(Pass):
    """Free saved activations while backward goes on."""

    name: ClassVar[str] = "release_saved"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.RELEASED})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.LOOP})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        ends: dict[fx.Node, list[fx.Node]] = {}
        freed_bytes = 0
        for node in graph.graph.find_nodes(op="placeholder"):
            if not node.meta.get("fxzero_private") or num_bytes(node) < MIN_BYTES:
                continue
            last = last_reader(node)
            if last is None:
                continue
            ends.setdefault(end_of_run(last) if ctx.fuses else last, []).append(node)
            freed_bytes += num_bytes(node)
        for last, nodes in ends.items():
            with graph.graph.inserting_after(last):
                graph.call(
                    torch.ops.fxzero.release_saved.default,
                    (nodes,),
                    stamp=Stamp(
                        Phase.BACKWARD,
                        role=Role.RELEASE,
                        layer=stamp_of(last).layer,
                        made_by=self.name,
                    ),
                )
        return Notes(released=sum(len(n) for n in ends.values()), bytes=freed_bytes)
