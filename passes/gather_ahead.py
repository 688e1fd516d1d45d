"""Start the first gathers of the next step while the last updates of this one run.

    g = gather(w); …; update(w); update(v)
→   check(w); g = take(w); …; update(w); ahead(w); update(v)

The gathers that a step would begin with, before any compute, have nothing to hide behind. In
a whole step their parameters' updates are known, so each is started right behind the last of
them and taken by the next call, unless somebody has changed a parameter in between: see
`fxzero.runtime.ahead`. That is found out by comparing bits on the host, so it is done for gloo,
whose transfers the host runs anyway; a GPU would have to be waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero._compat import copy_node, resolve_process_group
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.base import Context, Door, Fact, Notes, Pass
from fxzero.runtime import collectives
from fxzero.runtime.ahead import Ahead, Check, Launch, Take


def first_transfers(graph: StepGraph) -> list[TransferNodes]:
    """The gathers that are launched before any compute."""
    first: set[fx.Node] = set()
    for node in graph.nodes():
        stamp = stamp_of(node)
        if stamp.lane is Lane.COMPUTE and stamp.role in (Role.COMPUTE, Role.REGION):
            break
        if stamp.role is Role.LAUNCH and stamp.lane is Lane.GATHER:
            first.add(node)
    return [t for t in graph.transfers(name=Lane.GATHER.value) if t.launch in first]


def shards_of(transfer: TransferNodes) -> list[fx.Node]:
    """The graph inputs that a transfer is made of, through what prepares it."""
    own = {*transfer.prepare, transfer.launch}
    found = [n for node in sorted(own) for n in node.all_input_nodes if n not in own]
    return list(dict.fromkeys(found))


def last_updates(graph: StepGraph) -> dict[str, fx.Node]:
    """By parameter, the last node that changes it."""
    return {key: node for node in graph.nodes(role=Role.UPDATE) for key in stamp_of(node).params}


def preparation(transfer: TransferNodes, shards: list[fx.Node]) -> Any:
    """A function from shards to the list that a gather sends of them."""
    graph = fx.Graph()
    copies = {shard: graph.placeholder(f"shard_{i}") for i, shard in enumerate(shards)}
    for node in transfer.prepare:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output([copies[sent] for sent in transfer.tensors])
    module = fx.GraphModule(torch.nn.Module(), graph, class_name="Prepare")
    forward = type(module).forward
    return lambda *tensors: forward(module, *tensors)


def take_ahead(graph: StepGraph, transfer: TransferNodes, shards: list[fx.Node]) -> Ahead:
    """Replace a launch by a take."""
    launch = transfer.launch
    record = transfer.record
    rank = resolve_process_group(record.group).rank()
    prepare = preparation(transfer, shards)
    ahead = Ahead(prepare, record.size, record.group, rank, launch.name)
    stamp = stamp_of(launch).but(made_by="gather_ahead")
    with graph.graph.inserting_before(launch), graph.made_for(launch):
        take = graph.call(
            Take(ahead), tuple(shards), stamp=stamp, name=launch.name, value=launch.meta["val"]
        )
    launch.replace_all_uses_with(take)
    graph.graph.erase_node(launch)
    for node in reversed(transfer.prepare):
        if not node.users:
            graph.graph.erase_node(node)
    return ahead


def launch_ahead(
    graph: StepGraph, ahead: Ahead, transfer: TransferNodes, shards: list[fx.Node], after: fx.Node
) -> None:
    """Launch a gather for the next step behind a node."""
    stamp = Stamp(
        Phase.OPTIMIZER,
        lane=Lane.GATHER,
        role=Role.AHEAD,
        layer=transfer.stamp.layer,
        params=transfer.stamp.params,
        bucket=transfer.stamp.bucket,
        made_by="gather_ahead",
        transfer=transfer.record,
    )
    name = f"ahead_{ahead.__name__}"
    with graph.graph.inserting_after(after), graph.made_for(after):
        graph.call(Launch(ahead), tuple(shards), stamp=stamp, name=name, value=())


def check_first(graph: StepGraph, found: list[tuple[Ahead, list[fx.Node]]]) -> None:
    """Decide before anything else whether what is in flight can be taken."""
    first = next(graph.nodes())
    stamp = Stamp(Phase.FORWARD, lane=Lane.GATHER, role=Role.PREPARE, made_by="gather_ahead")
    check = Check([ahead for ahead, _ in found], [len(shards) for _, shards in found])
    with graph.graph.inserting_before(first):
        shards = tuple(shard for _, own in found for shard in own)
        graph.call(check, shards, stamp=stamp, name="check_ahead", value=())


@dataclass(frozen=True)
class GatherAhead(Pass):
    """Prefetch across the end of the step."""

    name: ClassVar[str] = "gather_ahead"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT})
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    enabled: bool = True
    """In whole steps over gloo: let the first gathers run between two calls. What they fill is
    held meanwhile."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        if not self.enabled or graph.loss is None:
            return Notes()
        updates = last_updates(graph)
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        found: list[tuple[Ahead, list[fx.Node]]] = []
        for transfer in first_transfers(graph):
            if transfer.launch.target is not collectives.gather:
                continue
            cost = ctx.costs.transfer(transfer.record)
            if not cost.is_worth_hiding:
                continue
            shards = shards_of(transfer)
            keys = {graph.inputs[s] for s in shards if s in graph.inputs}
            if len(keys) != len(shards) or not keys <= updates.keys():
                continue  # frozen, or made of something else
            after = max((updates[key] for key in keys), key=order.__getitem__)
            ahead = take_ahead(graph, transfer, shards)
            launch_ahead(graph, ahead, transfer, shards, after)
            found.append((ahead, shards))
        if found:
            check_first(graph, found)
        return Notes(started=len(found))
