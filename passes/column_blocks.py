"""What reads a matrix, or makes its gradient, done by blocks of the matrix's columns.

    t = t(w); y = mm(x, t)          t0 = t(w0); y0 = mm(x[:, :b], t0)
                               →    t1 = t(w1); y  = addmm_(y0, x[:, b:], t1)     columns are summed
    dx = mm(g, w)              →    dx = put(mm(g, w0), mm(g, w1))                or stand side by
    y = embedding(w, i)        →    y = put(embedding(w0, i), embedding(w1, i))   side
    dw = mm(t(g), x)           →    dw0 = mm(t(g), x[:, :b]); dw1 = …

A read is followed from the matrix through what only turns or casts it to the operator that
computes; a gradient from its marker through what turns, casts or adds to the operator that makes
it. What is in neither of the tables below is refused with the reason, before anything is rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxzero._compat import OpOverload
from fxzero.errors import PassError
from fxzero.graph import Role, Stamp, StepGraph
from fxzero.graph.operators import is_cast_or_copy, is_pure
from fxzero.graph.stamps import stamp_of
from fxzero.sharding.params import ParamSpec

_aten = torch.ops.aten
_fxzero = torch.ops.fxzero

_TURNS = {_aten.t.default, _aten.transpose.int, _aten.permute.default}
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_SAME = {_aten.alias.default, _aten.detach.default}
_PUTS = {
    _aten.index_put.default: 1,
    _aten._unsafe_index_put.default: 1,
    _aten._unsafe_masked_index_put_accumulate.default: 2,  # an embedding's gradient, taken apart
}
"""Where an operator that puts rows into a matrix has the rows' numbers; their values follow."""
_MATMULS = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Where the first of the two factors stands."""
_LOOKUPS = {_aten.embedding.default, _aten.index.Tensor}
_FILLED = {_aten.full.default: 0, _aten.zeros.default: 0, _aten.new_zeros.default: 1}
"""Where an operator that fills a new tensor has its sizes."""


class WholeError(PassError):
    """A matrix is needed whole; the message says what for."""


@dataclass(frozen=True)
class Read:
    """One operator that computes with a matrix."""

    marker: fx.Node
    chain: tuple[fx.Node, ...]
    """What turns and casts the matrix on its way."""
    node: fx.Node
    """The operator."""
    place: int
    """Which of its arguments the matrix is."""
    dim: int
    """Which dimension of the argument the matrix's columns are."""


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _is_same(node: fx.Node) -> bool:
    """Whether a node has its source's shape and elements."""
    return node.target in _SAME or (
        node.target in _RESHAPES and _shape(node) == _shape(node.all_input_nodes[0])
    )


def _dim_behind(node: fx.Node, dim: int) -> int | None:
    """Which dimension the columns are behind a node that turns, casts or passes on a matrix; None
    of any other node. Turning twice is no turn, so that it answers for both directions."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return None
    if node.target in _TURNS:
        given: Any = node.args[1:] or (0, 1)
        dims = given[0] if node.target is _aten.permute.default else given
        turns = dims[0] % 2 != (0 if node.target is _aten.permute.default else dims[1] % 2)
        return 1 - dim if turns else dim
    return dim if is_cast_or_copy(node) or _is_same(node) else None


def reads_of(marker: fx.Node) -> list[Read]:
    """What computes with a matrix.

    Raises:
        WholeError: something else is done with it.
    """
    return list(_reads(marker, marker, 1, ()))


def _reads(marker: fx.Node, node: fx.Node, dim: int, chain: tuple[fx.Node, ...]) -> Iterator[Read]:
    for user in node.users:
        if user.op == "output":
            raise WholeError("the model returns it")
        behind = _dim_behind(user, dim)
        if behind is not None:
            yield from _reads(marker, user, behind, (*chain, user))
            continue
        places = [i for i, argument in enumerate(user.args) if argument is node]
        if len(places) != 1 or not _computes_by_blocks(user, places[0], dim):
            raise WholeError(f"{user.name} reads it by {user.target}")
        yield Read(marker, chain, user, places[0], dim)


def _computes_by_blocks(node: fx.Node, place: int, dim: int) -> bool:
    if stamp_of(node).role is not Role.COMPUTE:
        return False
    if node.target in _MATMULS:
        first = _MATMULS[node.target]
        factors = [argument for argument in node.args[first:] if isinstance(argument, fx.Node)]
        two = all(_is_parameter(factor) for factor in factors)  # they would be cut two ways
        return place >= first and not two and not node.kwargs and len(node.args) < 4
    if node.target is _aten.index.Tensor and _only_index(node.args[1]) is None:
        return False
    return node.target in _LOOKUPS and (place, dim) == (0, 1)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a factor is a full parameter, turned or cast perhaps."""
    while _dim_behind(node, 0) is not None:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and stamp_of(node).role is Role.UNSHARD


def _only_index(indices: Any) -> fx.Node | None:
    """The one tensor that rows are chosen by."""
    chosen = list(indices) if isinstance(indices, (list, tuple)) else []
    return chosen[0] if len(chosen) == 1 and isinstance(chosen[0], fx.Node) else None


@dataclass(frozen=True)
class Emitter:
    """Makes nodes of one block in the place of some node."""

    graph: StepGraph
    block: ParamSpec
    like: fx.Node
    """What they are made for."""

    @property
    def stamp(self) -> Stamp:
        """Of what computes."""
        stamp = stamp_of(self.like)
        return stamp.but(layer=self.block.layer, alone=True, made_by="tile_linear")

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: Any = None, value: Any = None
    ) -> Any:
        """Make a node."""
        return self.graph.call(target, args, kwargs, stamp=self.stamp, value=value)

    def columns(self, node: fx.Node, dim: int) -> fx.Node:
        """The part of a value that goes with the block: a view."""
        assert self.block.block is not None
        start, stop = self.block.block.start, self.block.block.stop
        made: fx.Node = self.call(_aten.slice.Tensor, (node, dim, start, stop))
        return made

    def marker(self, like: fx.Node, source: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """The marker of a block where `like` is that of the matrix."""
        stamp = stamp_of(like).but(
            layer=self.block.layer, params=(self.block.key,), made_by="tile_linear"
        )
        whole: torch.Tensor = like.meta["val"]
        assert self.graph.fake_mode is not None
        with self.graph.fake_mode:
            value = whole.new_empty(shape)
        args = (source, self.block.key, like.args[2])
        return self.graph.call(like.target, args, stamp=stamp, value=value)  # type: ignore[arg-type]


def read_by_blocks(graph: StepGraph, read: Read, blocks: list[ParamSpec]) -> None:
    """Compute what reads a matrix block by block."""
    node, total = read.node, None
    (source,) = read.marker.all_input_nodes
    with graph.graph.inserting_before(node), graph.made_for(node):
        for block in blocks:
            emit = Emitter(graph, block, node)
            part = emit.marker(read.marker, source, block.shape)
            for turn in read.chain:
                if not _is_same(turn):
                    part = emit.call(turn.target, (part, *turn.args[1:]), turn.kwargs)
            total = _compute(emit, read, part, total)
    assert total is not None
    node.replace_all_uses_with(total)
    graph.graph.erase_node(node)
    for turn in reversed(read.chain):
        if not turn.users:
            graph.graph.erase_node(turn)


def _compute(emit: Emitter, read: Read, part: fx.Node, total: fx.Node | None) -> fx.Node:
    """What a block gives, put to what the blocks before have given."""
    node, args = read.node, list[Any](read.node.args)
    args[read.place] = part
    if node.target in _LOOKUPS:
        return _beside(emit, emit.call(node.target, tuple(args), node.kwargs), -1, total)
    first = _MATMULS[node.target]  # type: ignore[index]
    is_first = read.place == first
    if read.dim == (1 if is_first else 0):  # its columns are what is summed over
        other = first + 1 if is_first else first
        args[other] = emit.columns(args[other], 0 if is_first else 1)
        if total is None:
            made: fx.Node = emit.call(node.target, tuple(args))
            return made
        args = [total, *args[first:]]
        summed: fx.Node = emit.call(_aten.addmm_.default, tuple(args), value=total.meta["val"])
        return summed
    if first and _shape(args[0])[-1:] == _shape(node)[-1:] and not is_first:
        args[0] = emit.columns(args[0], len(_shape(args[0])) - 1)
    elif first and is_first and len(_shape(args[0])) == 2 and _shape(args[0])[0] != 1:
        args[0] = emit.columns(args[0], 0)
    return _beside(emit, emit.call(node.target, tuple(args)), 0 if is_first else 1, total)


def _beside(emit: Emitter, part: fx.Node, dim: int, total: fx.Node | None) -> fx.Node:
    """Put a part where it belongs in the whole result."""
    shape, block = _shape(emit.like), emit.block.block
    assert block is not None
    dim %= len(shape)
    if total is None:
        args: tuple[Any, ...] = (part, dim, block.start, shape[dim])
        made: fx.Node = emit.call(_fxzero.begin_blocks.default, args)
        return made
    args = (total, part, dim, block.start)
    put: fx.Node = emit.call(_fxzero.put_block_.default, args, value=total.meta["val"])
    return put


def check_gradient(marker: fx.Node) -> None:
    """See that a matrix's gradient can be made by blocks of columns.

    Args:
        marker: its `reshard_grad`.

    Raises:
        WholeError: it cannot, or something else reads it.
    """
    spine: dict[fx.Node, None] = {}
    queue = [(marker.all_input_nodes[0], 1)]
    while queue:
        node, dim = queue.pop()
        if node in spine or node.target in _FILLED:
            continue
        spine[node] = None
        queue += [(source, at) for source, at in _spine_of(node, dim)]
    for node in spine:
        others = [user for user in node.users if user not in spine and user is not marker]
        if others:
            raise WholeError(f"{others[0].name} reads its gradient")


def _spine_of(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """Of a full gradient, the matrices of its size that it is made of.

    Raises:
        WholeError: it is made by an operator that is in no table.
    """
    behind = _dim_behind(node, dim)
    if behind is not None:
        return [(node.all_input_nodes[0], behind)]
    if node.target is _aten.mm.default or node.target in _FILLED:
        return []
    if node.target is _aten.embedding_dense_backward.default and dim == 1:
        return []
    if node.target in _PUTS and dim == 1:
        base, *rest = node.args
        indices, values = rest[_PUTS[node.target] - 1 :][:2]
        masks = [mask for mask in rest[: _PUTS[node.target] - 1] if isinstance(mask, fx.Node)]
        assert isinstance(base, fx.Node)
        assert isinstance(values, fx.Node)
        by_row = _only_index(indices) is not None and all(_shape(m)[-1:] == (1,) for m in masks)
        if by_row and _shape(values)[-1:] == _shape(node)[-1:]:
            return [(base, dim)]
    if _is_pointwise(node):
        return [(source, dim) for source in node.all_input_nodes if not _is_spread(source, dim)]
    raise WholeError(f"its gradient is made by {node.target}")


def _is_pointwise(node: fx.Node) -> bool:
    return (
        is_pure(node)
        and isinstance(node.target, OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and all(_shape(s) == _shape(node) or _is_spread(s, 0) for s in node.all_input_nodes)
    )


def _is_spread(node: fx.Node, dim: int) -> bool:
    """Whether a value is the same for all columns."""
    return math.prod(_shape(node)) == 1


def gradient_of_block(graph: StepGraph, marker: fx.Node, block: ParamSpec) -> fx.Node:
    """Emit a block's gradient and its marker, before the matrix's own marker."""
    made: dict[tuple[fx.Node, int], fx.Node] = {}

    def cut(node: fx.Node, dim: int) -> fx.Node:
        if (node, dim) not in made:
            made[node, dim] = _cut_once(Emitter(graph, block, node), node, dim, cut)
        return made[node, dim]

    with graph.graph.inserting_before(marker), graph.made_for(marker):
        part = cut(marker.all_input_nodes[0], 1)
        return Emitter(graph, block, marker).marker(marker, part, block.local_shape)


def _cut_once(emit: Emitter, node: fx.Node, dim: int, cut: Any) -> fx.Node:
    """One node of a gradient, for a block's columns."""
    args = list[Any](node.args)
    behind = _dim_behind(node, dim)
    if behind is not None:
        args[0] = cut(args[0], behind)
        if _is_same(node):
            part: fx.Node = args[0]
            return part
    elif node.target is _aten.mm.default:
        args[dim] = emit.columns(args[dim], dim)
    elif node.target in _FILLED:
        sizes = list(args[_FILLED[node.target]])
        sizes[dim] = emit.block.shape[1]
        args[_FILLED[node.target]] = sizes
    elif node.target is _aten.embedding_dense_backward.default:
        args[0] = emit.columns(args[0], len(_shape(args[0])) - 1)
    elif node.target in _PUTS:
        args[0] = cut(args[0], dim)
        values = _PUTS[node.target] + 1
        args[values] = emit.columns(args[values], len(_shape(args[values])) - 1)
    else:
        args = [
            cut(a, dim) if isinstance(a, fx.Node) and not _is_spread(a, dim) else a for a in args
        ]
    made: fx.Node = emit.call(node.target, tuple(args), node.kwargs)
    return made
