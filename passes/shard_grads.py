"""Turn "here the gradient becomes a shard" into reductions.

    g = reshard_grad(dw)                 reduce = reduce_scatter([dw]); g = wait(reduce)[0]
    return g                         →   return g

A parameter that was read many times has many gradients: they are summed first and
reduced once. Parameters that are not sharded (stage 0, scalars) are all-reduced; on a
two-axis mesh a shard is all-reduced across its replicas after the reduce-scatter. Under
`no_sync` full gradients are kept instead. In a step of several micro-batches, stages 2 and
3 reduce every one's gradients, stages 0 and 1 their sum.

Blocks of columns (`tile_linear`) are reduced one by one, and their shards put side by side:

    d0 = reshard_grad(dw0)               d0 = wait(reduce_scatter([dw0]))[0]
    d1 = reshard_grad(dw1)           →   g = begin_blocks(d0, 1, 0, 4096)
    return cat([d0, d1], 1)              d1 = …; put_block_(g, d1, 1, 2048); return g
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero.errors import CaptureError, PassError
from fxzero.graph import Lane, Phase, Role, Segment, Stamp, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.launch import emit_transfer, record_for
from fxzero.graph.stamps import stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.runtime.updates import laid_out_like
from fxzero.sharding.params import GradSync, ParamSpec
from fxzero.transfer import TransferKind

_aten = torch.ops.aten
_fxzero = torch.ops.fxzero


def full_gradients(node: fx.Node) -> list[fx.Node]:
    """The markers whose sum a graph output is, in the order of summation.

    Raises:
        PassError: something else was done to the gradient on its way out.
    """
    if stamp_of(node).role is Role.RESHARD:
        return [node]
    if is_view(node):
        return full_gradients(node.all_input_nodes[0])
    if node.target is _aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs:
        return [m for part in node.args if isinstance(part, fx.Node) for m in full_gradients(part)]
    raise PassError(
        f"shard_grads expected the gradient {node.name} to be a sum of reshard_grad results, "
        f"found {node.target}. Its parameter is read outside of its module's forward; read it "
        "as module.weight inside a forward."
    )


def reduce(
    graph: StepGraph, total: fx.Node, spec: ParamSpec, stamp: Stamp, compute: Stamp
) -> fx.Node:
    """Emit the nodes that make this rank's reduced gradient of a full one.

    Args:
        stamp: for the nodes of the transfer.
        compute: for what is done to the full gradient before, which fuses with its producer.
    """
    prepare = stamp.but(role=Role.PREPARE)
    finish = stamp.but(role=Role.FINISH)
    value: torch.Tensor = total.meta["val"]
    communicates = bool(spec.layout.reductions)
    if communicates and value.layout is not torch.strided:
        raise CaptureError(
            f"the gradient of {spec.name} is sparse ({value.layout}), and ranks exchange dense "
            "ones. Use nn.Embedding(sparse=False)."
        )
    if communicates and value.dtype != spec.reduce_dtype:
        total = graph.call(
            _aten._to_copy.default, (total,), {"dtype": spec.reduce_dtype}, stamp=compute
        )
    if communicates and not total.meta["val"].is_contiguous():
        total = graph.call(
            _aten.clone.default,
            (total,),
            {"memory_format": torch.contiguous_format},
            stamp=compute,
        )
    part = total
    for kind, axis in spec.layout.reductions:
        padded = spec.is_padded and kind is TransferKind.REDUCE_SCATTER
        if padded:
            padding = [0, 0] * (len(spec.shape) - 1) + [0, spec.padded_rows - spec.shape[0]]
            part = graph.call(_aten.constant_pad_nd.default, (part, padding), stamp=prepare)
        part = emit_transfer(graph, part, record_for(kind, axis, part, "avg"), stamp)
        if padded:
            rows = spec.local_shape[0]
            part = graph.call(_aten.slice.Tensor, (part, 0, 0, rows), stamp=finish)
            if len(spec.reduced_over) > 1:
                part = graph.call(_aten.clone.default, (part,), stamp=finish)
    if part.meta["val"].dtype != spec.dtype:
        part = graph.call(_aten._to_copy.default, (part,), {"dtype": spec.dtype}, stamp=finish)
    return part


def _sum(graph: StepGraph, grads: list[fx.Node], stamp: Stamp) -> fx.Node:
    """Add full gradients in the order in which autograd would."""
    total = grads[0]
    for grad in grads[1:]:
        total = graph.call(_aten.add.Tensor, (total, grad), stamp=stamp)
    return total


def block_markers(graph: StepGraph, node: fx.Node) -> list[fx.Node]:
    """The blocks' markers whose values, side by side and summed up, a node is, in graph order."""
    if stamp_of(node).role is Role.RESHARD:
        return [node]
    known = node.target in (_aten.cat.default, _aten.add.Tensor) or is_view(node)
    assert known, f"{node.name} of a gradient in blocks is {node.target}"
    return sorted({m for source in node.all_input_nodes for m in block_markers(graph, source)})


def place_block_reductions(graph: StepGraph, spec: ParamSpec, node: fx.Node) -> fx.Node:
    """Reduce the gradients of a parameter's blocks; return what leaves the graph."""
    parts: dict[str, list[Partial]] = {}
    for term in accumulated(node):
        segment = stamp_of(term).segment
        for marker in block_markers(graph, term):
            found = parts.setdefault(stamp_of(marker).params[0], [])
            found.append(Partial([marker], [marker.all_input_nodes[0]], segment))
    reduced = {key: place_reductions(graph, graph.specs[key], own) for key, own in parts.items()}
    return _side_by_side(graph, spec, sorted(reduced.items(), key=lambda pair: pair[1]))


def _side_by_side(graph: StepGraph, spec: ParamSpec, blocks: list[tuple[str, fx.Node]]) -> fx.Node:
    """Put the shards of blocks into one of the whole parameter, as they come.

    Args:
        blocks: in graph order. Those of one reader are together.
    """
    stamp = stamp_of(blocks[-1][1]).but(
        lane=Lane.COMPUTE,
        role=Role.ACCUMULATE,
        layer=spec.layer,
        params=(spec.key,),
        made_by="shard_grads",
        transfer=None,
    )
    total: fx.Node | None = None
    seen: set[int] = set()
    for key, part in blocks:
        block = graph.specs[key].block
        assert block is not None
        last = part if total is None else max(total, part)
        with graph.graph.inserting_after(last), graph.made_for(part):
            if total is None:
                args: tuple[Any, ...] = (part, 1, block.start, spec.shape[1])
                total = graph.call(_fxzero.begin_blocks.default, args, stamp=stamp)
            else:
                put = _fxzero.add_block_ if block.start in seen else _fxzero.put_block_
                args = (total, part, 1, block.start)
                total = graph.call(put.default, args, stamp=stamp)
        seen.add(block.start)
    assert total is not None
    if graph.loss is None:
        return total
    with graph.graph.inserting_after(total), graph.made_for(total):
        return _laid_out(graph, total, spec, stamp.but(role=Role.FINISH))


@dataclass(frozen=True)
class Partial:
    """One micro-step's part of a parameter's gradient."""

    markers: list[fx.Node]
    """The gradient's markers; none if the model has none."""
    grads: list[fx.Node]
    """Full gradients, to be summed."""
    segment: Segment
    """The backward that computes them."""


def partials(graph: StepGraph, node: fx.Node, marked: bool) -> list[Partial]:
    """Take apart what a graph returns as a parameter's gradient, in order of summation."""
    found = []
    for term in accumulated(node):
        markers = full_gradients(term) if marked else []
        grads = [marker.all_input_nodes[0] for marker in markers] or [term]
        segment = stamp_of(term).segment
        found.append(Partial(markers, grads, segment))
    return found


def accumulated(node: fx.Node) -> list[fx.Node]:
    """The gradients of the micro-steps whose sum a node is."""
    terms = []
    while stamp_of(node).role is Role.ACCUMULATE:
        node, term = node.all_input_nodes
        terms.append(term)
    return [node, *reversed(terms)]


def place_reductions(graph: StepGraph, spec: ParamSpec, parts: list[Partial]) -> fx.Node:
    """Emit what follows a parameter's full gradients; return what leaves the graph.

    Stages 2 and 3 reduce each micro-step's gradient and add up shards; the others add up
    full gradients, in the parameter's own dtype, and reduce their sum.
    """
    reduce_each = spec.zero >= 2
    total: fx.Node | None = None
    for part in parts:
        last = max((g for g in part.grads if g.op != "placeholder"), default=None)
        anchor = last if last is not None else next(graph.nodes(segment=part.segment))
        compute = Stamp(
            Phase.BACKWARD,
            layer=stamp_of(anchor).layer,
            params=(spec.key,),
            made_by="shard_grads",
            micro_step=part.segment.micro_step,
            stage=part.segment.stage,
            half=stamp_of(anchor).half,
        )
        stamp = compute.but(lane=Lane.REDUCE, layer=spec.layer)
        origin = part.markers[0] if part.markers else anchor
        with graph.graph.inserting_before(anchor.next), graph.made_for(origin):
            grad = _sum(graph, part.grads, compute)
            if len(parts) > 1 and not reduce_each:
                grad = _addable(graph, grad, spec.dtype, compute, first=total is None)
            if reduce_each or len(parts) == 1:
                grad = _synchronise(graph, grad, spec, part.markers, stamp, compute)
            if len(parts) > 1 and reduce_each and spec.shard_group is None:
                grad = _addable(graph, grad, spec.dtype, compute, first=total is None)
            if total is None:
                total = grad
            else:
                role = compute.but(role=Role.ACCUMULATE)
                total = graph.call(_aten.add_.Tensor, (total, grad), stamp=role)
            if part is parts[-1] and len(parts) > 1 and not reduce_each:
                # What is done to the sum belongs to the transfer: no layer computes it.
                prepare = stamp.but(role=Role.PREPARE)
                total = _synchronise(graph, total, spec, part.markers, stamp, prepare)
            if part is parts[-1] and graph.loss is not None and spec.block is None:
                finish = stamp.but(role=Role.FINISH)
                total = _laid_out(graph, total, spec, finish)
    assert total is not None
    return total


def _laid_out(graph: StepGraph, grad: fx.Node, spec: ParamSpec, stamp: Stamp) -> fx.Node:
    """A gradient in the layout of its parameter, as autograd would accumulate it.

    Fused updates walk through both in the order of memory.
    """
    (parameter,) = (node for node, key in graph.inputs.items() if key == spec.key)
    mine, theirs = grad.meta["val"], parameter.meta["val"]
    if has_layout(mine, theirs):
        return grad
    assert graph.fake_mode is not None
    with graph.fake_mode:
        value = torch.empty_strided(
            theirs.shape, theirs.stride(), dtype=mine.dtype, device=mine.device
        )
    return graph.call(laid_out_like, (grad, parameter), stamp=stamp, value=value)


def has_layout(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same places."""
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in pairs if size > 1)


def _addable(
    graph: StepGraph, grad: fx.Node, dtype: torch.dtype, compute: Stamp, *, first: bool
) -> fx.Node:
    """A gradient in the dtype of the sum; the first one such that others may be added to it in
    place: contiguous, and in nobody's sight."""
    value: torch.Tensor = grad.meta["val"]
    if value.dtype != dtype:
        return graph.call(_aten._to_copy.default, (grad,), {"dtype": dtype}, stamp=compute)
    if not first or (value.is_contiguous() and _is_nobody_elses(grad)):
        return grad
    form = {"memory_format": torch.contiguous_format}
    return graph.call(_aten.clone.default, (grad,), form, stamp=compute)


def _is_nobody_elses(grad: fx.Node) -> bool:
    """Whether a gradient is what an operator has made for it alone, or a view of all of that."""
    node = grad
    while is_view(node) and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if len(source.users) > 1:
            return False
        node = source
    if node.op != "call_function" or is_view(node):
        return False
    made, value = node.meta.get("val"), grad.meta["val"]
    if not isinstance(made, torch.Tensor) or made.numel() != value.numel():
        return False
    marks = (Role.RESHARD, Role.ACCUMULATE)
    return len(grad.users) < 2 and all(stamp_of(user).role in marks for user in grad.users)


def _synchronise(
    graph: StepGraph,
    total: fx.Node,
    spec: ParamSpec,
    markers: list[fx.Node],
    stamp: Stamp,
    compute: Stamp,
) -> fx.Node:
    """Reduce a full gradient, or keep it, as its marker says."""
    sync = str(markers[0].args[2]) if markers else GradSync.REDUCE.value
    keep = stamp.but(role=Role.KEEP)
    if sync == GradSync.ACCUMULATE.value:
        return graph.call(torch.ops.fxzero.keep_grad.default, (total, spec.key), stamp=keep)
    if sync == GradSync.REDUCE_ACCUMULATED.value:
        total = graph.call(torch.ops.fxzero.add_kept_grad.default, (total, spec.key), stamp=keep)
    return reduce(graph, total, spec, stamp, compute)


def _erase_unused(graph: StepGraph, nodes: list[fx.Node]) -> None:
    """Drop the markers and the sums and views that hung on them."""
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node.op == "call_function" and not node.users and not node._erased:
            inputs = node.all_input_nodes
            graph.graph.erase_node(node)
            queue.extend(inputs)


@dataclass(frozen=True)
class ShardGrads(Pass):
    """Reduce every trainable parameter's gradient once."""

    name: ClassVar[str] = "shard_grads"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REDUCED})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        values = list(graph.output_values)
        marked = {p for n in graph.nodes(role=Role.RESHARD) for p in stamp_of(n).params}
        full: list[fx.Node] = []
        reduced = kept = 0
        for position, key in graph.gradients.items():
            node = values[position]
            if not isinstance(node, fx.Node):
                continue
            spec = graph.specs[key]
            if key in graph.blocks:
                values[position] = place_block_reductions(graph, spec, node)
            else:
                parts = partials(graph, node, key in marked)
                values[position] = place_reductions(graph, spec, parts)
            full.append(node)
            if stamp_of(values[position]).role is Role.KEEP:
                kept += 1
            elif spec.reduced_over:
                reduced += 1
        graph.set_output_values(values)
        _erase_unused(graph, full)
        return Notes(gradients=len(graph.gradients), reduced=reduced, kept=kept)
