"""Start the first gathers of the next step while the last updates of this one run.

    g = gather(w); …; update(w); update(v)
→   g = take(w);   …; update(w); ahead(w); update(v)

The gathers that a step would begin with, before any compute, have nothing to hide behind. In
a whole step their parameters' updates are known, so each is started right behind the last of
them and taken by the next call. See `fxzero.runtime.ahead` for what happens to a parameter
that somebody changes in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero.cost.model import group_of
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import Transfer
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime.ahead import Ahead, Launch, Take


def first_transfers(graph: StepGraph) -> list[Transfer]:
    """The gathers that are launched before any compute."""
    first: set[fx.Node] = set()
    for node in graph.nodes():
        stamp = stamp_of(node)
        if stamp.lane is Lane.COMPUTE and stamp.role in (Role.COMPUTE, Role.REGION):
            break
        if stamp.role is Role.LAUNCH and stamp.lane is Lane.GATHER:
            first.add(node)
    return [t for t in graph.transfers(name=Lane.GATHER.value) if t.launch in first]


def shards_of(transfer: Transfer) -> list[fx.Node]:
    """The graph inputs that a transfer is made of, through what prepares it."""
    own = {*transfer.prepare, transfer.launch}
    found = [n for node in sorted(own) for n in node.all_input_nodes if n not in own]
    return list(dict.fromkeys(found))


def last_updates(graph: StepGraph) -> dict[str, fx.Node]:
    """By parameter, the last node that changes it."""
    return {key: node for node in graph.nodes(role=Role.UPDATE) for key in stamp_of(node).params}


def starter(transfer: Transfer, shards: list[fx.Node]) -> Any:
    """A function of shards that prepares and launches a gather."""
    graph = fx.Graph()
    copies = {shard: graph.placeholder(f"shard_{i}") for i, shard in enumerate(shards)}
    for node in (*transfer.prepare, transfer.launch):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[transfer.launch])
    module = fx.GraphModule(torch.nn.Module(), graph, class_name="Start")
    forward = type(module).forward
    return lambda *tensors: forward(module, *tensors)


def start_ahead(
    graph: StepGraph, transfer: Transfer, shards: list[fx.Node], after: fx.Node
) -> None:
    """Replace a launch by a take, and launch it for the next step behind a node."""
    launch = transfer.launch
    ahead = Ahead(starter(transfer, shards), group_of(launch), launch.name)
    stamp = replace(stamp_of(launch), made_by="gather_ahead")
    with graph.graph.inserting_before(launch), graph.made_for(launch):
        take = graph.call(
            Take(ahead), tuple(shards), stamp=stamp, name=launch.name, value=launch.meta["val"]
        )
    launch.replace_all_uses_with(take)
    graph.graph.erase_node(launch)
    for node in reversed(transfer.prepare):
        if not node.users:
            graph.graph.erase_node(node)
    with graph.graph.inserting_after(after), graph.made_for(take):
        graph.call(
            Launch(ahead),
            tuple(shards),
            stamp=Stamp(
                Phase.OPTIMIZER,
                lane=Lane.GATHER,
                role=Role.AHEAD,
                layer=stamp.layer,
                params=stamp.params,
                bucket=stamp.bucket,
                made_by="gather_ahead",
            ),
            name=f"ahead_{launch.name}",
            value=(),
        )


@dataclass(frozen=True)
class GatherAhead(Pass):
    """Prefetch across the end of the step."""

    name: ClassVar[str] = "gather_ahead"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT})

    enabled: bool = True
    """In whole steps: let the first gathers run between two calls. What they fill is held
    meanwhile."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        if not self.enabled or graph.loss is None:
            return Notes()
        updates = last_updates(graph)
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        started = 0
        for transfer in reversed(first_transfers(graph)):
            shards = shards_of(transfer)
            keys = {graph.inputs[s] for s in shards if s in graph.inputs}
            if len(keys) != len(shards) or not keys <= updates.keys():
                continue  # frozen, or made of something else
            after = max((updates[key] for key in keys), key=order.__getitem__)
            start_ahead(graph, transfer, shards, after)
            started += 1
        return Notes(started=started)
