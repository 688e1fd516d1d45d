"""Put compute into pieces, each made once and called wherever it stands.

    w = unshard(shard)                     w = unshard(shard)
    t = t(w); a = mm(x, t); …              h_0_forward = h_forward(w, x); y = h_0_forward[0]
    w1 = unshard(shard1)               →   w1 = unshard(shard1)
    t1 = t(w1); a1 = mm(y, t1); …          h_1_forward = h_forward(w1, y); z = h_1_forward[0]

What is left is the outline of the step, a few nodes for each layer: passes that place transfers,
repeat micro-steps and order the step work on calls. A piece is a run of compute of one layer, as a
region is (see `fxzero.regions.cutout`); markers are moved out of the way of it. Where `bucket`
lets a later transfer bring a layer's last parameters, `split_at_buckets` takes its calls apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from torch import fx

from fxzero.graph import Lane, Phase, Role, Segment, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import is_cast_or_copy, is_pure
from fxzero.graph.pieces import (
    called,
    first_read,
    is_call,
    piece_of,
    put_into_piece,
    replace_call,
    split,
)
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.passes.shard_params import derived, first_use, is_needed_again, read_in, shard_source
from fxzero.regions.cutout import move_parts_together, piece_name, runs
from fxzero.schedule.inventory import nodes_of
from fxzero.schedule.parts import is_own_part

LEAST_NODES = 3
"""Shorter runs are no shorter as a call."""


def read_again(graph: StepGraph) -> None:
    """Let backward look at a parameter itself, where its stage gathers it again.

    A cast or a view that forward made of it would be one of the values that a piece returns, and
    keep the parameter.
    """
    for marker in list(graph.nodes(role=Role.UNSHARD)):
        spec = graph.specs[stamp_of(marker).params[0]]
        if is_needed_again(graph, spec, shard_source(marker.all_input_nodes[0])):
            for half in (0, 1):
                backward = Segment(Phase.BACKWARD, stage=stamp_of(marker).stage, half=half)
                needed = first_use(derived(marker), backward)
                if needed is not None:
                    with graph.graph.inserting_before(needed):
                        read_in(graph, marker, marker, backward)


def move_markers(graph: StepGraph) -> Collection[fx.Node]:
    """Put markers of parameters first, and those of gradients last, so that they split no run.

    Returns:
        The markers of gradients, and what is made of them: the sums for parameters that are read
        several times. `shard_grads` takes those apart, so that they are in no piece.
    """
    first = next((n for n in graph.graph.nodes if n.op != "placeholder"), graph.output)
    for marker in list(graph.nodes(role=Role.UNSHARD)):
        chain = [marker]
        while is_view(chain[-1].all_input_nodes[0]):
            chain.append(chain[-1].all_input_nodes[0])
        if chain[-1].all_input_nodes[0].op != "placeholder":
            continue  # it reads what forward has written
        for node in reversed(chain):
            if node is first:
                first = first.next
            else:
                first.prepend(node)
    late: dict[fx.Node, None] = {}
    for node in graph.nodes(phase=Phase.BACKWARD):
        if stamp_of(node).role is Role.RESHARD or not late.keys().isdisjoint(node.all_input_nodes):
            late[node] = None
    if all(stamp_of(node).role is Role.RESHARD or is_pure(node) for node in late):
        for node in late:
            graph.output.prepend(node)
    return late.keys()


def move_parts_behind(graph: StepGraph) -> None:
    """Cut parts of values (`recompute`) behind the runs that make them, which they would split."""
    cuts = [node for node in graph.nodes(phase=Phase.FORWARD) if is_own_part(node)]
    for node in cuts:
        graph.output.prepend(node)
    for node in cuts:
        last = node.all_input_nodes[0]
        stamp = stamp_of(node)
        while (
            last.next.op == "call_function"
            and stamp_of(last.next).role is Role.COMPUTE
            and (stamp_of(last.next).layer, stamp_of(last.next).segment)
            == (stamp.layer, stamp.segment)
        ):
            last = last.next
        last.append(node)


def split_at_buckets(graph: StepGraph) -> int:
    """Take calls apart where they first read what a later transfer of their layer brings.

    Returns:
        How many calls there were.
    """
    begun: set[tuple[str, Segment]] = set()
    later: dict[fx.Node, list[TransferNodes]] = defaultdict(list)
    for transfer in graph.transfers(name=Lane.GATHER.value):
        if not transfer.of_parameters:
            continue
        key = (transfer.stamp.layer, transfer.stamp.segment)
        reader = _first_reader(transfer)
        if key in begun and reader is not None and is_call(reader):
            later[reader].append(transfer)
        begun.add(key)
    for call, transfers in later.items():
        positions = {first_read(call, transfer.results) for transfer in transfers} - {0}
        if not positions:
            continue
        body = split(piece_of(call), tuple(sorted(positions)))
        for node in replace_call(graph.graph, call, body):
            _bring_closer(node)
        for transfer in transfers:
            reader = _first_reader(transfer)
            assert reader is not None
            for node in nodes_of(transfer):
                reader.prepend(node)
    return len(later)


def _first_reader(transfer: TransferNodes) -> fx.Node | None:
    """The first of the computations that read what a transfer brings."""
    users = (u for n in transfer.results for u in n.users if u.op == "call_function")
    return min((u for u in users if stamp_of(u).role is Role.COMPUTE), default=None)


def _bring_closer(node: fx.Node) -> None:
    """Put what only looks at a value, or casts it, right behind it: a gradient on its way out."""
    for user in list(node.users):
        if (
            user.op == "call_function"
            and stamp_of(user).role is Role.COMPUTE
            and stamp_of(user).segment == stamp_of(node).segment
            and len(user.all_input_nodes) == 1
            and (is_view(user) or is_cast_or_copy(user))
        ):
            node.append(user)
            _bring_closer(user)


@dataclass(frozen=True)
class Outline(Pass):
    """Call pieces, a layer class at a time."""

    name: ClassVar[str] = "outline"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED, Fact.RECOMPUTED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.OUTLINED})
    for_regions: ClassVar[bool] = True

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        read_again(graph)
        late = move_markers(graph)
        move_parts_together(graph)
        move_parts_behind(graph)
        before = len(graph.graph.nodes)
        # A run may go on from forward into backward: the last layer's. A call is of one of them.
        for (_, is_late), nodes in groupby(
            graph.nodes(), key=lambda node: (stamp_of(node).segment, node in late)
        ):
            for run in runs(nodes) if not is_late else ():
                if len(run) < LEAST_NODES:
                    continue
                stamp = stamp_of(run[0])
                layer = stamp.layer.replace(".", "_") or "root"
                name = f"{layer}_{stamp.phase.value}"
                put_into_piece(graph.graph, run, graph.pieces, piece_name(run), name)
        calls = sum(map(is_call, graph.graph.nodes))
        pieces = len(called(graph.graph.nodes))
        return Notes(pieces=pieces, calls=calls, nodes=len(graph.graph.nodes), of=before)
