"""Turn coalesced collectives into what the process group's backend does best.

NCCL runs a list as one group launch: nothing changes. Gloo packs a list into a flat
scratch buffer first, and reduce-scatters by all-reducing everything; there

    gather([a, b])        →  gather(a); gather(b)               no list packed
    reduce_scatter([g])   →  mean(exchange(g), ranks)           half the bytes on two ranks
    all_reduce([g])       →  all_reduce(g)                      in place, if nobody else reads g

The sum over ranks is then taken by each rank for its own rows, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero._compat import resolve_process_group
from fxzero.graph import Stamp, StepGraph
from fxzero.graph.aliases import view_base
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import Transfer
from fxzero.groups import backend_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime import collectives

_c10d = torch.ops._c10d_functional

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


def is_own(node: fx.Node) -> bool:
    """Whether nobody but the collective reads a node's memory, through views or directly."""
    while len(node.users) == 1 and node.op == "call_function":
        base = view_base(node)
        if base is None:
            return True
        node = base
    return False


def one_gather(sent: fx.Node, size: int, group: str) -> tuple[Call, Call]:
    """How to gather one tensor: the launch and, its first argument to come, the wait."""
    return (collectives.gather, (sent, size, group)), (collectives.join, ())


def one_reduce_scatter(sent: fx.Node, op: str, size: int, group: str) -> tuple[Call, Call]:
    """How to average one full gradient into this rank's rows."""
    assert op == "avg"
    launch = (collectives.exchange, (sent, size, group, is_own(sent)))
    return launch, (collectives.join_exchange, (size,))


def one_all_reduce(sent: fx.Node, op: str, group: str) -> tuple[Call, Call]:
    """How to average, or to sum, one tensor over the ranks."""
    assert op in ("avg", "sum")
    launch = (collectives.all_reduce, (sent, group, is_own(sent)))
    return launch, (collectives.join_sum, (group_size(group) if op == "avg" else 1,))


def group_size(group: str) -> int:
    """Ranks in a group."""
    return resolve_process_group(group).size()


_ONE_BY_ONE: dict[Any, Callable[..., tuple[Call, Call]]] = {
    _c10d.all_gather_into_tensor_coalesced.default: one_gather,
    _c10d.reduce_scatter_tensor_coalesced.default: one_reduce_scatter,
    _c10d.all_reduce_coalesced.default: one_all_reduce,
}


def split(graph: StepGraph, transfer: Transfer) -> None:
    """Launch a transfer's tensors one after the other, where the joint launch stood."""
    choose = _ONE_BY_ONE[transfer.launch.target]
    own = replace(transfer.stamp, made_by="lower_transfers")
    for sent, part, wait in zip(transfer.tensors, transfer.parts, transfer.waits, strict=True):
        launch_call, wait_call = choose(sent, *transfer.launch.args[1:])
        value = wait.meta["val"]
        with graph.graph.inserting_before(transfer.launch), graph.made_for(wait):
            launch = _call(graph, launch_call, own, transfer.launch.name, value)
        with graph.graph.inserting_before(wait), graph.made_for(wait):
            function, arguments = wait_call
            joined = _call(
                graph,
                (function, (launch, *arguments)),
                replace(stamp_of(wait), made_by="lower_transfers"),
                wait.name,
                value,
            )
        wait.replace_all_uses_with(joined)
        graph.graph.erase_node(wait)
        graph.graph.erase_node(part)
    graph.graph.erase_node(transfer.launch)


def _call(graph: StepGraph, call: Call, stamp: Stamp, name: str, value: Any) -> fx.Node:
    function, arguments = call
    return graph.call(function, arguments, stamp=stamp, name=name, value=value)


def _is_gloo(transfer: Transfer) -> bool:
    if transfer.launch.target not in _ONE_BY_ONE:
        return False
    on_cpu = transfer.tensors[0].meta["val"].device.type == "cpu"
    return on_cpu and backend_of(str(transfer.launch.args[-1]), "cpu") == "gloo"


@dataclass(frozen=True)
class LowerTransfers(Pass):
    """Choose the collectives that the backend runs without packing lists."""

    name: ClassVar[str] = "lower_transfers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        transfers = [t for t in graph.transfers() if _is_gloo(t)]
        for transfer in transfers:
            assert len(transfer.parts) == len(transfer.tensors), stamp_of(transfer.launch)
            split(graph, transfer)
        return Notes(split=len(transfers))
