"""Turn "the full parameter is needed here" into gathers, waits and releases.

    w = unshard(shard)                       gather = all_gather([shard]); w = wait(gather)[0]
    y = mm(x, w)                         →   y = mm(x, w)
                                             release([w])

How long a full parameter lives is the ZeRO stage: at stage 3 each phase gathers its
own and releases it after the phase's last use; at stages 1 and 2 backward reads what
forward gathered; at stage 0 nothing is gathered. A parameter that is read many times
(tied weights, a module used twice) is gathered once per phase. In a step of several
micro-batches, stage 3 gathers for each of them, stages 1 and 2 once. Of a block of columns
(`tile_linear`) each rank sends those of its shard.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero._compat import copy_node
from fxzero.errors import CaptureError
from fxzero.graph import Lane, Role, Segment, Stamp, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.launch import emit_transfer, record_for
from fxzero.graph.node_text import source_line
from fxzero.graph.operators import is_cast_or_copy
from fxzero.graph.pieces import first_read, is_call
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.sharding.params import ParamSpec

_aten = torch.ops.aten


def shard_source(node: fx.Node) -> fx.Node:
    """The graph input that an unshard reads, through the views that DTensor leaves."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _cast(graph: StepGraph, source: fx.Node, spec: ParamSpec, stamp: Stamp) -> fx.Node:
    form: dict[str, object] = {}
    if spec.compute_dtype != spec.dtype:
        form["dtype"] = spec.compute_dtype
    if spec.device is not None and source.meta["val"].device != spec.device:
        form["device"] = spec.device  # a copy, which `offload_shards` makes a transfer of
    if not form:
        return source
    return graph.call(_aten._to_copy.default, (source,), form, stamp=stamp)


def _own_columns(graph: StepGraph, source: fx.Node, spec: ParamSpec, stamp: Stamp) -> fx.Node:
    """This rank's rows of a block, where a spec is of one: a view."""
    if spec.block is None:
        return source
    columns = (source, 1, spec.block.start, spec.block.stop)
    return graph.call(_aten.slice.Tensor, columns, stamp=stamp)


def emit_gathers(graph: StepGraph, source: fx.Node, spec: ParamSpec, stamp: Stamp) -> fx.Node:
    """Emit the nodes that make a full parameter of a shard; return the full one."""
    if spec.shard_group is None:
        return _cast(graph, source, spec, stamp.but(lane=Lane.COMPUTE, role=Role.COMPUTE))
    prepare = stamp.but(role=Role.PREPARE)
    part = _own_columns(graph, source, spec, prepare)
    part = _cast(graph, part, spec, prepare)
    if spec.block is not None and spec.compute_dtype == spec.dtype:
        form = {"memory_format": torch.contiguous_format}
        part = graph.call(_aten.clone.default, (part,), form, stamp=prepare)
    if spec.is_padded:
        missing = spec.chunk_rows - spec.local_shape[0]
        padding = [0, 0] * (len(spec.shape) - 1) + [0, missing]
        part = graph.call(_aten.constant_pad_nd.default, (part, padding), stamp=prepare)
    full = part
    for kind, axis in spec.layout.gathers:
        record = record_for(kind, axis, full)
        full = emit_transfer(graph, full, record, stamp, spec.name.replace(".", "_"))
    if spec.is_padded:
        full = graph.call(
            _aten.slice.Tensor,
            (full, 0, 0, spec.shape[0]),
            stamp=stamp.but(role=Role.FINISH),
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


def read_in(graph: StepGraph, node: fx.Node, full: fx.Node, segment: Segment) -> None:
    """Let one segment read `full` where it read `node`, or a view of it made elsewhere."""
    copies = {node: full}
    for original in derived(node)[1:]:
        if stamp_of(original).segment != segment and is_read_in(original, segment):
            for needed in _chain(original, node):
                if needed in copies:
                    continue
                copy = copy_node(graph.graph, needed, lambda n: copies.get(n, n))
                set_stamp(
                    copy,
                    stamp_of(needed).but(
                        phase=segment.phase,
                        micro_step=segment.micro_step,
                        stage=segment.stage,
                        half=segment.half,
                        made_by="shard_params",
                        again=needed.name,
                    ),
                )
                copies[needed] = copy
    for original, copy in copies.items():
        for user in list(original.users):
            if _is_in(user, segment) and user not in copies.values():
                user.replace_input_with(original, copy)


def is_read_in(node: fx.Node, segment: Segment) -> bool:
    """Whether a node of the segment reads this one."""
    return any(_is_in(user, segment) for user in node.users)


def _is_in(node: fx.Node, segment: Segment) -> bool:
    return node.op != "output" and stamp_of(node).segment == segment


def _chain(node: fx.Node, start: fx.Node) -> list[fx.Node]:
    """The nodes from just after `start` to `node`."""
    chain = [node]
    while (previous := chain[-1].all_input_nodes[0]) is not start:
        chain.append(previous)
    return chain[::-1]


def first_use(nodes: list[fx.Node], segment: Segment) -> fx.Node | None:
    """The first node of a segment that reads one of `nodes`."""
    users = {u for n in nodes for u in n.users}
    return min((u for u in users if _is_in(u, segment)), default=None)


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


def _release_after_last_use(graph: StepGraph, full: fx.Node, stamp: Stamp) -> bool:
    """End a full parameter's life after its segment's last use; False if it leaves the graph."""
    aliases = _all_views(full)
    users = {u for n in aliases for u in n.users}
    if any(u.op == "output" for u in users):
        return False
    last = max(u for u in (*users, *aliases) if stamp_of(u).segment == stamp.segment)
    owner = full.all_input_nodes[0] if stamp_of(full).role is Role.FINISH else full
    with graph.graph.inserting_after(last):
        graph.call(
            torch.ops.fxzero.release.default,
            ([owner],),
            stamp=stamp.but(role=Role.RELEASE),
        )
    return True


def _all_views(node: fx.Node) -> list[fx.Node]:
    """A node and everything that looks at its memory."""
    found = [node]
    for current in found:
        found.extend(user for user in current.users if is_view(user) and user not in found)
    return found


def refuse_changed_shard(graph: StepGraph, spec: ParamSpec, source: fx.Node) -> None:
    """Gathers, and copies of what is in the host's memory, may start before anything else has run:
    a shard must be there from the start.

    Raises:
        CaptureError: the forward changes a sharded parameter and then reads it, or changes one of
            which it computes with a copy.
    """
    line = source_line(source)
    where = f" at {line}" if line else ""
    if spec.device is not None and (source.op != "placeholder" or source in graph.mutated):
        raise CaptureError(
            f"the forward changes the parameter {spec.name}{where}, which shard(offload=True) "
            "keeps in the host's memory: it computes with a copy. Change it between two steps, "
            "under torch.no_grad(), keep it as a buffer, or shard without offload."
        )
    if spec.shard_group is None or source.op == "placeholder":
        return
    raise CaptureError(
        f"the forward changes the parameter {spec.name}{where} and reads it afterwards. At "
        f"zero={spec.zero} that would gather in the middle of a step. Change it between two steps, "
        "under torch.no_grad(), keep it as a buffer, or use fxzero.shard(model, zero=0)."
    )


def is_needed_again(graph: StepGraph, spec: ParamSpec, source: fx.Node) -> bool:
    """Whether each segment makes its own full parameter of the shard."""
    if source in graph.mutated and graph.loss is None:
        return False  # by the time of backward the input has its new value
    return spec.shard_group is None or spec.zero == 3


class Queue:
    """What is gathered for one call, in the order in which it is read there."""

    def __init__(self) -> None:
        self.waiting: dict[fx.Node, list[tuple[int, fx.Node]]] = defaultdict(list)
        """By call: the number of the first node that reads a parameter, and its gather's first."""

    @contextlib.contextmanager
    def before(
        self, graph: StepGraph, needed: fx.Node, values: Collection[fx.Node]
    ) -> Iterator[None]:
        """Make nodes before a node that reads some values, or before those for later reads."""
        waiting = self.waiting[needed]
        number = first_read(needed, values) if is_call(needed) else 0
        place = bisect_right([other for other, _ in waiting], number)
        anchor = waiting[place][1] if place < len(waiting) else needed
        last = anchor.prev
        with graph.graph.inserting_before(anchor):
            yield
        if last.next is not anchor:
            waiting.insert(place, (number, last.next))


def place_gathers(
    graph: StepGraph, spec: ParamSpec, marker: fx.Node, segments: list[Segment], queue: Queue
) -> int:
    """Replace one parameter's marker by what its stage asks for; return the gathers made.

    Args:
        segments: those of the step, in the order in which they run.
    """
    source = shard_source(marker.all_input_nodes[0])
    changes = source in graph.mutated
    per_segment = is_needed_again(graph, spec, source)
    fulls: list[tuple[fx.Node, Stamp]] = []
    for segment in segments:
        if fulls and not per_segment:
            break
        values = derived(marker)
        needed = first_use(values, segment)
        if needed is None and segment == segments[0] and leaves_the_graph(marker):
            needed = marker
        if needed is None:
            continue
        stamp = Stamp(
            segment.phase,
            lane=Lane.GATHER,
            layer=spec.layer if spec.shard_group is not None else stamp_of(needed).layer,
            params=(spec.key,),
            made_by="shard_params",
            micro_step=segment.micro_step,
            stage=segment.stage,
            half=segment.half,
        )
        with queue.before(graph, needed, values), graph.made_for(marker):
            full = emit_gathers(graph, source, spec, stamp)
            if full is source and changes and not per_segment:
                compute = stamp.but(lane=Lane.COMPUTE, role=Role.COMPUTE)
                full = graph.call(_aten.clone.default, (source,), stamp=compute)
            if segment != segments[0] and per_segment:
                read_in(graph, marker, full, segment)
        fulls.append((full, stamp))
    # What is left reads the first one: its own segment, and at stages 1 and 2 all others.
    if (first := fulls[0][0] if fulls else source) is not marker:
        marker.replace_all_uses_with(first)
    _erase_with_views(graph, marker)
    if spec.shard_group is None:
        return 0
    if per_segment:
        for full, stamp in fulls:
            _release_after_last_use(graph, full, stamp)
    return len(fulls)


@dataclass(frozen=True)
class ShardParams(Pass):
    """Gather full parameters for as long as their ZeRO stage allows."""

    name: ClassVar[str] = "shard_params"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERED})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        # A parameter that the forward changes is read with several values: one gather for each.
        markers: dict[tuple[str, fx.Node], list[fx.Node]] = {}
        for node in graph.nodes(role=Role.UNSHARD):
            source = shard_source(node.all_input_nodes[0])
            markers.setdefault((stamp_of(node).params[0], source), []).append(node)
        made = 0
        segments = graph.segments()
        queue = Queue()
        for (key, source), nodes in markers.items():
            refuse_changed_shard(graph, graph.specs[key], source)
            made += place_gathers(
                graph, graph.specs[key], _one_marker(graph, nodes), segments, queue
            )
        return Notes(params=len(markers), gathers=made)
