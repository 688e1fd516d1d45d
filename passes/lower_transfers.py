"""Turn coalesced collectives into what the process group's backend does best.

NCCL runs a list as one group launch: nothing changes. Gloo packs a list into a flat
scratch buffer first, and reduce-scatters by all-reducing everything; there

    gather([a, b])        →  gather(a); gather(b)               no scratch
    reduce_scatter([g])   →  mean(all_to_all(g), ranks)         half the bytes on two ranks
    all_reduce([g])       →  all_reduce_(g)                     in place, if nobody else reads g

The sum over ranks is then taken by each rank for its own rows, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import Role, StepGraph
from fxzero.graph.aliases import view_base
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import Transfer
from fxzero.groups import backend_of
from fxzero.passes.base import Context, Fact, Notes, Pass

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def _launch_one(
    graph: StepGraph, transfer: Transfer, target: torch._ops.OpOverload, args: tuple[object, ...]
) -> fx.Node:
    stamp = replace(transfer.stamp, made_by="lower_transfers")
    return graph.call(target, args, stamp=stamp, name=transfer.launch.name)


def all_gather(graph: StepGraph, transfer: Transfer, sent: fx.Node) -> fx.Node:
    """Gather one tensor."""
    target = _c10d.all_gather_into_tensor.default
    return _launch_one(graph, transfer, target, (sent, *transfer.launch.args[1:]))


def all_to_all(graph: StepGraph, transfer: Transfer, sent: fx.Node) -> fx.Node:
    """Send each rank its rows of one full gradient."""
    _, _, size, group = transfer.launch.args
    assert isinstance(size, int)
    rows = [sent.meta["val"].shape[0] // size] * size
    return _launch_one(graph, transfer, _c10d.all_to_all_single.default, (sent, rows, rows, group))


def mean_over_ranks(graph: StepGraph, transfer: Transfer, wait: fx.Node) -> fx.Node:
    """Average what the ranks sent for this rank's rows."""
    size = transfer.launch.args[2]
    value = wait.meta["val"]
    stamp = replace(transfer.stamp, role=Role.FINISH, made_by="lower_transfers")
    shape = [size, value.shape[0] // size, *value.shape[1:]]
    stacked = graph.call(_aten.view.default, (wait, shape), stamp=stamp)
    return graph.call(_aten.mean.dim, (stacked, [0]), stamp=stamp)


def all_reduce(graph: StepGraph, transfer: Transfer, sent: fx.Node) -> fx.Node:
    """Reduce one tensor, in its own memory when nothing else reads that."""
    own = len(sent.users) == 1 and view_base(sent) is None and sent.op == "call_function"
    target = _c10d.all_reduce_.default if own else _c10d.all_reduce.default
    return _launch_one(graph, transfer, target, (sent, *transfer.launch.args[1:]))


_ONE_BY_ONE = {
    _c10d.all_gather_into_tensor_coalesced.default: (all_gather, None),
    _c10d.reduce_scatter_tensor_coalesced.default: (all_to_all, mean_over_ranks),
    _c10d.all_reduce_coalesced.default: (all_reduce, None),
}


def split(graph: StepGraph, transfer: Transfer) -> None:
    """Launch a transfer's tensors one after the other, where the joint launch stood."""
    emit, finish = _ONE_BY_ONE[transfer.launch.target]  # type: ignore[index]
    for sent, part, wait in zip(transfer.tensors, transfer.parts, transfer.waits, strict=True):
        with graph.graph.inserting_before(transfer.launch):
            launch = emit(graph, transfer, sent)
        wait.replace_input_with(part, launch)
        graph.graph.erase_node(part)
        if finish is None:
            continue
        wait.meta["val"] = launch.meta["val"]
        readers = list(wait.users)
        with graph.graph.inserting_after(wait):
            anchor = graph.graph.call_function(_aten.alias.default, (wait,))
        with graph.graph.inserting_before(anchor):
            result = finish(graph, transfer, wait)
        graph.graph.erase_node(anchor)
        for reader in readers:
            reader.replace_input_with(wait, result)
    graph.graph.erase_node(transfer.launch)


def _is_gloo(transfer: Transfer) -> bool:
    if transfer.launch.target not in _ONE_BY_ONE:
        return False
    on_cpu = transfer.tensors[0].meta["val"].device.type == "cpu"
    return on_cpu and backend_of(str(transfer.launch.args[-1]), "cpu") == "gloo"


@dataclass(frozen=True)
class LowerTransfers(Pass):
    """Choose the collectives that the backend runs without scratch memory."""

    name: ClassVar[str] = "lower_transfers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CUT})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        transfers = [t for t in graph.transfers() if _is_gloo(t)]
        for transfer in transfers:
            assert len(transfer.parts) == len(transfer.tensors), stamp_of(transfer.launch)
            split(graph, transfer)
        return Notes(split=len(transfers))
