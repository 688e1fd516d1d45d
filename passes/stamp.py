"""Read a joint graph's structure once and write it on every node.

    phase   forward is what the forward's outputs need; the rest is backward
    layer   from the module stack; in backward from the forward node of equal sequence
    role    markers, inputs and outputs, the model's own collectives; the rest is compute

Backward nodes that need no gradient (they only prepare saved values) move down to
their first use, so that they hold no memory before it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.errors import CaptureError
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.launch import (
    LANES,
    WAIT_OF_CALL,
    emit_part,
    emit_wait,
    is_wait_of_call,
    record_of_call,
)
from fxzero.graph.modules import module_path
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.sharding.params import layer_of

_ROLES = {
    torch.ops.fxzero.unshard.default: Role.UNSHARD,
    torch.ops.fxzero.reshard_grad.default: Role.RESHARD,
    torch.ops.fxzero.micro_batch.default: Role.ROWS,
}


def ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes given and everything they are computed from."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found


def layers(graph: fx.Graph) -> dict[fx.Node, str]:
    """The layer of each call node; a node that does not say takes its predecessor's."""
    by_sequence: dict[int, str] = {}
    found: dict[fx.Node, str] = {}
    last = ""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        path = module_path(node)
        sequence = node.meta.get("seq_nr")
        if path is not None:
            last = layer_of(path)
        elif sequence in by_sequence:
            last = by_sequence[sequence]
        if sequence is not None:
            by_sequence.setdefault(sequence, last)
        found[node] = last
    return found


_MOVES = (Role.LAUNCH, Role.WAIT, Role.PART, Role.FINISH)


def sink_backward(graph: StepGraph) -> int:
    """Move backward nodes that depend on no gradient down to their first use.

    Returns:
        How many nodes moved.
    """
    late: set[fx.Node] = set()
    backward = list(graph.nodes(phase=Phase.BACKWARD))
    tangents = {n for n in graph.graph.find_nodes(op="placeholder") if _is_tangent(n)}
    dependent = set(tangents)  # and on what other stages of a pipeline give
    dependent.update(node for node in backward if stamp_of(node).lane is Lane.RECEIVE)
    for node in backward:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        elif stamp_of(node).role not in _MOVES:  # where those stand is for `prefetch` to say
            late.add(node)
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            waiting = [i for i in stack[-1].all_input_nodes if i in late and i not in placed]
            if waiting:
                stack.append(waiting[0])
                continue
            top = stack.pop()
            if top not in placed:
                placed.add(top)
                order.append(top)

    for node in backward:
        if node not in late:
            place(node)
    for node in backward:
        if node not in placed:
            place(node)
    moved = sum(1 for a, b in zip(order, backward, strict=True) if a is not b)
    if moved:
        graph.reorder(order)
    return moved


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("tangents_")


def _check_markers(node: fx.Node, graph: StepGraph) -> None:
    key = node.args[1]
    if key not in graph.specs:
        raise CaptureError(f"node {node.name} reads the unknown parameter {key!r}")


def own_transfers(graph: StepGraph) -> int:
    """Stamp the collectives that the model brings itself: they are transfers like any other.

    Each is given one wait, right behind it where its author had none.

    Returns:
        How many there are.
    """
    count = 0
    for node in list(graph.nodes()):
        record = record_of_call(node)
        if record is None:
            continue
        count += 1
        stamp = stamp_of(node).but(lane=LANES[record.kind])
        set_stamp(node, stamp.but(role=Role.LAUNCH, transfer=record))
        if isinstance(node.meta["val"], (list, tuple)):
            _wait_for_list(graph, node, stamp)
            continue
        waits = sorted(user for user in node.users if is_wait_of_call(user))
        if not waits or len(waits) < len(node.users):
            with graph.graph.inserting_after(node), graph.made_for(node):
                wait = graph.call(WAIT_OF_CALL, (node,), stamp=stamp)
            node.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait)  # noqa: B023
        else:
            wait = waits[0]
        for other in waits:
            if other is not wait:
                other.replace_all_uses_with(wait)
                graph.graph.erase_node(other)
        set_stamp(wait, stamp_of(wait).but(lane=stamp.lane, role=Role.WAIT))
    return count


def _wait_for_list(graph: StepGraph, launch: fx.Node, stamp: Stamp) -> None:
    """Join a model's coalesced collective by one wait, where its first tensor was waited for."""
    parts = list(launch.users)
    first = min((wait for old in parts for wait in old.users), default=launch.next)
    with graph.graph.inserting_before(first), graph.made_for(launch):
        joined = emit_wait(graph, launch, stamp)
        new = [emit_part(graph, joined, i, stamp) for i in range(len(launch.meta["val"]))]
    for old in parts:
        index = old.args[1]
        assert isinstance(index, int)
        for user in list(old.users):
            if is_wait_of_call(user):
                user.replace_all_uses_with(new[index])
                graph.graph.erase_node(user)
        old.replace_all_uses_with(new[index])
        graph.graph.erase_node(old)


@dataclass(frozen=True)
class StampNodes(Pass):
    """Write phase, layer and role on every node."""

    name: ClassVar[str] = "stamp"
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        outputs = [n for n in graph.output_values[: graph.num_forward_outputs] if n is not None]
        forward = ancestors([n for n in outputs if isinstance(n, fx.Node)])
        for node in graph.graph.nodes:  # parts of a forward result belong to forward
            if node.target is operator.getitem and node.args[0] in forward:
                forward.add(node)
        layer = layers(graph.graph)
        for node in graph.graph.nodes:
            phase = Phase.FORWARD if node in forward else Phase.BACKWARD
            if node.op == "placeholder":
                phase = Phase.BACKWARD if _is_tangent(node) else Phase.FORWARD
                key = graph.inputs.get(node)
                params = (key,) if key is not None else ()
                set_stamp(node, Stamp(phase, role=Role.INPUT, params=params))
            elif node.op == "output":
                set_stamp(node, Stamp(Phase.BACKWARD, role=Role.OUTPUT))
            else:
                role = _ROLES.get(node.target, Role.COMPUTE)
                params = ()
                if role in (Role.UNSHARD, Role.RESHARD):
                    _check_markers(node, graph)
                    params = (str(node.args[1]),)
                set_stamp(node, Stamp(phase, role=role, layer=layer[node], params=params))
        own_transfers(graph)
        backward_nodes = list(graph.nodes(phase=Phase.BACKWARD))
        graph.reorder(backward_nodes)
        moved = sink_backward(graph)
        return Notes(
            forward=sum(1 for _ in graph.nodes(phase=Phase.FORWARD)),
            backward=len(backward_nodes),
            layers=len({stamp_of(n).layer for n in graph.nodes()}),
            sunk=moved,
        )
