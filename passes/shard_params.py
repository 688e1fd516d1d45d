"""Turn "the full parameter is needed here" into gathers, waits and releases.

    w = unshard(shard)                       gather = all_gather([shard]); w = wait(gather[0])
    y = mm(x, w)                         →   y = mm(x, w)
                                             release([w])

How long a full parameter lives is the ZeRO stage: at stage 3 each phase gathers its
own and releases it after the phase's last use; at stages 1 and 2 backward reads what
forward gathered; at stage 0 nothing is gathered. A parameter that is read many times
(tied weights, a module used twice) is gathered once per phase.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import is_cast_or_copy
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.params import ParamSpec
from fxzero.passes.base import Context, Fact, Notes, Pass

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def shard_source(node: fx.Node) -> fx.Node:
    """The graph input that an unshard reads, through the views that DTensor leaves."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _cast(graph: StepGraph, source: fx.Node, spec: ParamSpec, stamp: Stamp) -> fx.Node:
    if spec.compute_dtype == spec.dtype:
        return source
    dtype = {"dtype": spec.compute_dtype}
    return graph.call(_aten._to_copy.default, (source,), dtype, stamp=stamp)


def gather(graph: StepGraph, source: fx.Node, spec: ParamSpec, stamp: Stamp) -> fx.Node:
    """Emit the nodes that make a full parameter of a shard; return the full one."""
    if spec.shard_group is None:
        return _cast(graph, source, spec, replace(stamp, lane=Lane.COMPUTE, role=Role.COMPUTE))
    prepare = replace(stamp, role=Role.PREPARE)
    part = _cast(graph, source, spec, prepare)
    if spec.is_padded:
        missing = spec.chunk_rows - spec.local_shape[0]
        padding = [0, 0] * (len(spec.shape) - 1) + [0, missing]
        part = graph.call(_aten.constant_pad_nd.default, (part, padding), stamp=prepare)
    launch = graph.call(
        _c10d.all_gather_into_tensor_coalesced.default,
        ([part], spec.shard_group.size, spec.shard_group.name),
        stamp=replace(stamp, role=Role.LAUNCH),
        name=f"gather_{spec.layer.replace('.', '_')}",
    )
    piece = graph.call(operator.getitem, (launch, 0), stamp=replace(stamp, role=Role.PART))
    full = graph.call(
        _c10d.wait_tensor.default,
        (piece,),
        stamp=replace(stamp, role=Role.WAIT),
        name=spec.name.replace(".", "_"),
    )
    if spec.is_padded:
        full = graph.call(
            _aten.slice.Tensor,
            (full, 0, 0, spec.shape[0]),
            stamp=replace(stamp, role=Role.FINISH),
        )
    return full


def derived(node: fx.Node) -> list[fx.Node]:
    """Views, casts and copies of a full parameter alone, in graph order, itself included.

    Backward must not read them from forward at stage 3: a saved transpose is a saved
    parameter.
    """
    found = {node}
    queue = [node]
    while queue:
        for user in queue.pop().users:
            if user in found or stamp_of(user).role is not Role.COMPUTE:
                continue
            if (is_view(user) or is_cast_or_copy(user)) and len(user.all_input_nodes) == 1:
                found.add(user)
                queue.append(user)
    return sorted(found)


def read_again_in_backward(graph: StepGraph, node: fx.Node, full: fx.Node) -> None:
    """Let backward read `full` where it read `node`, or a view of it, from forward."""
    copies = {node: full}
    for original in derived(node)[1:]:
        if stamp_of(original).phase is Phase.FORWARD and reads_from_forward(original):
            for needed in _chain(original, node):
                if needed in copies:
                    continue
                copy = graph.graph.node_copy(needed, lambda n: copies.get(n, n))
                set_stamp(
                    copy,
                    replace(
                        stamp_of(needed),
                        phase=Phase.BACKWARD,
                        made_by="shard_params",
                        again=needed.name,
                    ),
                )
                copies[needed] = copy
    for original, copy in copies.items():
        for user in list(original.users):
            if stamp_of(user).phase is Phase.BACKWARD and user not in copies.values():
                user.replace_input_with(original, copy)


def reads_from_forward(node: fx.Node) -> bool:
    """Whether a backward node reads this one."""
    return any(
        stamp_of(user).phase is Phase.BACKWARD and user.op != "output" for user in node.users
    )


def _chain(node: fx.Node, start: fx.Node) -> list[fx.Node]:
    """The nodes from just after `start` to `node`."""
    chain = [node]
    while (previous := chain[-1].all_input_nodes[0]) is not start:
        chain.append(previous)
    return chain[::-1]


def first_use(graph: StepGraph, nodes: list[fx.Node], phase: Phase) -> fx.Node | None:
    """The first node of a phase that reads one of `nodes`."""
    users = {u for n in nodes for u in n.users if u.op != "output"}
    return min((u for u in users if stamp_of(u).phase is phase), default=None)


def leaves_the_graph(marker: fx.Node) -> bool:
    """Whether a full parameter, or a view of it, is an output."""
    return any(user.op == "output" for node in derived(marker) for user in node.users)


def _one_marker(graph: StepGraph, markers: list[fx.Node]) -> fx.Node:
    """Let all reads of a parameter go through the first one, in each phase."""
    first = markers[0]
    for other in markers[1:]:
        other.replace_all_uses_with(first)
        _erase_with_views(graph, other)
    return first


def _erase_with_views(graph: StepGraph, node: fx.Node) -> None:
    """Drop a node that nobody reads, and the views that only it looked through."""
    while node.op == "call_function" and not node.users:
        source = node.all_input_nodes[0]
        graph.graph.erase_node(node)
        node = source


def _release_after_last_use(graph: StepGraph, full: fx.Node, phase: Phase, stamp: Stamp) -> bool:
    """End a full parameter's life after its phase's last use; False if it leaves the graph."""
    aliases = _all_views(full)
    users = {u for n in aliases for u in n.users}
    if any(u.op == "output" for u in users):
        return False
    last = max(u for u in (*users, *aliases) if stamp_of(u).phase is phase)
    owner = full.all_input_nodes[0] if stamp_of(full).role is Role.FINISH else full
    with graph.graph.inserting_after(last):
        graph.call(
            torch.ops.fxzero.release.default,
            ([owner],),
            stamp=replace(stamp, role=Role.RELEASE),
        )
    return True


def _all_views(node: fx.Node) -> list[fx.Node]:
    """A node and everything that looks at its memory."""
    found = [node]
    for current in found:
        found.extend(user for user in current.users if is_view(user) and user not in found)
    return found


def place(graph: StepGraph, spec: ParamSpec, marker: fx.Node) -> int:
    """Replace one parameter's marker by what its stage asks for; return the gathers made."""
    source = shard_source(marker.all_input_nodes[0])
    per_phase = spec.shard_group is None or spec.zero == 3
    made = 0
    fulls: dict[Phase, fx.Node] = {}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        if phase is Phase.BACKWARD and not per_phase and Phase.FORWARD in fulls:
            continue
        needed = first_use(graph, derived(marker), phase)
        if needed is None and phase is Phase.FORWARD and leaves_the_graph(marker):
            needed = marker
        if needed is None:
            continue
        stamp = Stamp(
            phase,
            lane=Lane.GATHER,
            layer=spec.layer if spec.shard_group is not None else stamp_of(needed).layer,
            params=(spec.key,),
            made_by="shard_params",
        )
        with graph.graph.inserting_before(needed), graph.made_for(marker):
            full = gather(graph, source, spec, stamp)
            if phase is Phase.BACKWARD:
                read_again_in_backward(graph, marker, full)
        fulls[phase] = full
        made += spec.shard_group is not None
    if (forward := fulls.get(Phase.FORWARD, source)) is not marker:
        marker.replace_all_uses_with(forward)
    _erase_with_views(graph, marker)
    for phase, full in fulls.items():
        if spec.shard_group is not None and per_phase:
            stamp = Stamp(phase, Lane.GATHER, layer=spec.layer, params=(spec.key,))
            _release_after_last_use(graph, full, phase, replace(stamp, made_by="shard_params"))
    return made


@dataclass(frozen=True)
class ShardParams(Pass):
    """Gather full parameters for as long as their ZeRO stage allows."""

    name: ClassVar[str] = "shard_params"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        markers: dict[str, list[fx.Node]] = {}
        for node in graph.nodes(role=Role.UNSHARD):
            markers.setdefault(stamp_of(node).params[0], []).append(node)
        made = 0
        for key, nodes in markers.items():
            made += place(graph, graph.specs[key], _one_marker(graph, nodes))
        return Notes(params=len(markers), gathers=made)
