"""Which columns of a parameter a block is: what `verify` asks where one travels in blocks.

    gather([clone(slice(a, 1, 0, 2048))])    →  the columns of the block that it brings
    g = begin_blocks(d0, 1, 0, 4096)
    g = put_block_(g, d1, 1, 2048)           →  every block's shard once, where its columns are

Blocks of one size fit into each other's places, so that no shape would tell. See the pass
`tile_linear`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxzero.graph.belongings import Finding, named, value_before
from fxzero.graph.stamps import Lane, Role, stamp_of
from fxzero.graph.step_graph import StepGraph

_CUT = torch.ops.aten.slice.Tensor
_BEGIN = torch.ops.fxzero.begin_blocks.default
_PUT = torch.ops.fxzero.put_block_.default
_ADD = torch.ops.fxzero.add_block_.default


def wrong_blocks(graph: StepGraph) -> Iterator[Finding]:
    """Gathers of a block that send other columns than its own."""
    for transfer in graph.transfers(name=Lane.GATHER.value):
        if not graph.is_block(transfer) or stamp_of(transfer.launch).role is not Role.LAUNCH:
            continue
        block = graph.specs[transfer.stamp.params[0]].block
        assert block is not None
        cuts = [node.args[1:] for node in transfer.prepare if node.target is _CUT]
        if (1, block.start, block.stop) not in cuts and transfer.prepare:
            yield Finding(
                transfer.launch,
                f"{transfer.launch.name} is to gather columns {block.start} to {block.stop} of "
                f"{named((block.owner,))}, and sends {cuts or 'all of them'}",
                "Emit the gathers of a block by fxzero.passes.shard_params.emit_gathers.",
            )


def shards_side_by_side(graph: StepGraph, gradient: fx.Node) -> list[tuple[fx.Node, int, bool]]:
    """The shards that a gradient in blocks is made of: each with its first column, and whether it
    is added to what is there."""
    found: list[tuple[fx.Node, int, bool]] = []
    node = gradient
    while node.op == "call_function" and node.target not in (_BEGIN, _PUT, _ADD):
        node = value_before(node)
    while node.target in (_PUT, _ADD):
        whole, part, _, start = node.args
        assert isinstance(whole, fx.Node)
        assert isinstance(part, fx.Node)
        assert isinstance(start, int)
        found.append((part, start, node.target is _ADD))
        node = whole
    if node.target is _BEGIN:
        part, _, start, _ = node.args
        assert isinstance(part, fx.Node)
        assert isinstance(start, int)
        found.append((part, start, False))
    return found[::-1]


def wrong_columns(graph: StepGraph, gradient: fx.Node, key: str) -> Iterator[Finding]:
    """Blocks of a gradient that are missing in it, or not where their columns are."""
    name = graph.specs[key].name
    left = list(graph.blocks[key])
    filled: set[int] = set()
    for part, start, is_added in shards_side_by_side(graph, gradient):
        own = block_of(part)
        block = graph.specs[own].block if own in left else None
        if block is None or block.start != start:
            yield Finding(
                part,
                f"the gradient of {name} has {part.name}, of {named((own,))}, from column "
                f"{start} on",
                "Each block's shard has one place in its parameter's: passes/shard_grads.py.",
            )
            continue
        if is_added is not (start in filled):
            yield Finding(
                part,
                f"{part.name} is {'added to' if is_added else 'put over'} the columns of {name} "
                f"from {start} on, which hold {'nothing' if is_added else 'a gradient'}",
                "The first block of some columns is put there, others are added.",
            )
        filled.add(start)
        left.remove(own)
    if left:
        rule = f"the gradient of {name} lacks {named(tuple(left))}"
        yield Finding(gradient, rule, "Every block's gradient is part of its parameter's.")


def block_of(node: fx.Node) -> str:
    """Of which block a shard is the reduced gradient."""
    while node.op == "call_function" and stamp_of(node).role is not Role.COMPUTE:
        stamp = stamp_of(node)
        if stamp.role is Role.PART and stamp.lane is Lane.REDUCE:
            return next(iter(stamp.params), "")
        node = node.all_input_nodes[0]
    return ""
