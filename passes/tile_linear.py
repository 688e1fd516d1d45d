"""Gather and multiply a weight that is too large for the device a block of columns at a time.

    w = unshard(shard)                       w0 = unshard(shard, "head.weight.block0")
    y = mm(x, t(w))                          y = mm(x[:, :b], t(w0))
    …                                    →   w1 = unshard(shard, "head.weight.block1")
    dw = mm(t(g), x)                         y = addmm_(y, x[:, b:], t(w1))
    return reshard_grad(dw)                  …
                                             d0 = reshard_grad(mm(t(g), x[:, :b]), "….block0")
                                             d1 = reshard_grad(mm(t(g), x[:, b:]), "….block1")
                                             return cat([d0, d1], 1)

Memory-centric tiling (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3). Shards are rows, so
that a block of columns is gathered of the same columns of every shard: the layout that `shard` gave
stays, and optimizer state with it. Every read has blocks of its own, so that a weight that is the
embedding and the head is not there from one to the other; their gradients are reduced apart and
added up as shards. From here on a block is what a parameter is to the passes: `shard_params`
gathers it, `shard_grads` reduces it and puts the shards of all side by side, `bucket` lets it
travel alone, `prefetch` has two blocks of a weight on the device at most, one that is computed with
and one on its way, and one block of its full gradient.

Where columns are summed over (the forward of a linear layer) sums are taken in another order, and
in 16 bits rounded once a block; where they stand side by side (its input's gradient, the weight's
gradient, an embedding) every number is the sum that it was, and BLAS alone may take it otherwise.
A weight that two read is reduced twice, which is a mean of sums taken as a sum of means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxzero.errors import ConfigError
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.stamps import stamp_of
from fxzero.passes.base import Context, Fact, Notes
from fxzero.passes.column_blocks import (
    Read,
    WholeError,
    check_gradient,
    gradient_of_block,
    read_by_blocks,
    reads_of,
)
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.shard_params import shard_source
from fxzero.settings import at_least
from fxzero.sharding.params import ParamSpec

_aten = torch.ops.aten


@dataclass(frozen=True)
class Tiled:
    """One weight in blocks."""

    weight: str
    """By name."""
    columns: int
    """Of each block; the last one may have fewer."""
    blocks: int
    block_bytes: int
    """Of one block, in full."""
    full_bytes: int
    """Of the whole weight."""


@dataclass(frozen=True)
class Tiles(Decision):
    """Which weights are gathered block by block."""

    weights: tuple[Tiled, ...] = ()


def column_bytes(spec: ParamSpec) -> int:
    """What a column of a matrix takes where it is gathered."""
    rows = spec.padded_rows if spec.shard_group is not None else spec.shape[0]
    return rows * spec.compute_dtype.itemsize


def gathered_bytes(spec: ParamSpec) -> int:
    """What a full parameter takes where it is gathered."""
    if len(spec.shape) != 2:
        return spec.num_elements * spec.compute_dtype.itemsize
    return spec.shape[1] * column_bytes(spec)


def is_gathered(spec: ParamSpec) -> bool:
    """Whether a parameter is whole for no longer than it is used."""
    return spec.zero == 3 and spec.shard_group is not None


@dataclass(frozen=True)
class Uses:
    """What is done with a weight in a step."""

    reads: list[Read]
    gradients: list[fx.Node]
    """Markers."""


def uses_of(graph: StepGraph, key: str) -> Uses:
    """What is done with a weight.

    Raises:
        WholeError: it is needed whole.
    """
    spec = graph.specs[key]
    if len(spec.shape) != 2:
        raise WholeError(f"it has {len(spec.shape)} dimensions, and blocks are columns of a matrix")
    markers, gradients = (
        [node for node in graph.nodes(role=role) if key in stamp_of(node).params]
        for role in (Role.UNSHARD, Role.RESHARD)
    )
    if any(shard_source(m.all_input_nodes[0]).op != "placeholder" for m in markers):
        raise WholeError("the forward changes it")
    reads = [read for marker in markers for read in reads_of(marker)]
    returned: set[fx.Node] = set()
    for position, owner in graph.gradients.items():
        value = graph.output_values[position]
        if owner == key and isinstance(value, fx.Node):
            returned |= _summed(value)
    if returned != set(gradients):
        raise WholeError("something else than sums is done with its gradient")
    for marker in gradients:
        check_gradient(marker)
    return Uses(reads, gradients)


def _summed(node: fx.Node) -> set[fx.Node]:
    """The markers whose sum a gradient is.

    Raises:
        WholeError: it is something else.
    """
    if node.op == "call_function" and stamp_of(node).role is Role.RESHARD:
        return {node}
    if node.target is _aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs:
        return {marker for part in node.all_input_nodes for marker in _summed(part)}
    if is_view(node) and len(node.all_input_nodes) == 1:
        return _summed(node.all_input_nodes[0])
    raise WholeError(f"its gradient leaves the step by {node.target}")


def tile(graph: StepGraph, key: str, columns: int) -> int:
    """Let a weight travel in blocks of some columns; return how many gathers that asks for.

    Raises:
        WholeError: it is needed whole.
    """
    uses = uses_of(graph, key)
    spec = graph.specs[key]
    made: dict[str, ParamSpec] = {}

    def blocks(read: int) -> list[ParamSpec]:
        """Those of one read in a phase: no two reads gather together."""
        again = f"read{read}." if read else ""
        for i, start in enumerate(range(0, spec.shape[1], columns)):
            word = f"{again}block{i}"
            if word not in made:
                made[word] = spec.columns(start, min(start + columns, spec.shape[1]), word)
        return [one for word, one in made.items() if word.startswith(f"{again}block")]

    gathers = 0
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        reads = [read for read in uses.reads if stamp_of(read.node).phase is phase]
        for number, read in enumerate(sorted(reads, key=lambda read: read.node)):
            read_by_blocks(graph, read, blocks(number))
            gathers += len(blocks(number))
    reduced: list[str] = []
    for number, marker in enumerate(sorted(uses.gradients)):
        _gradient_in_blocks(graph, marker, blocks(number))
        reduced += [block.key for block in blocks(number)]
    for marker in {read.marker: None for read in uses.reads}:
        _erase_unread(graph, marker)
    graph.add_blocks(made.values())
    graph.blocks[key] = tuple(reduced)
    return gathers


def _gradient_in_blocks(graph: StepGraph, marker: fx.Node, blocks: list[ParamSpec]) -> None:
    """Let a weight's gradient be those of its blocks, side by side."""
    parts = [gradient_of_block(graph, marker, block) for block in blocks]
    with graph.graph.inserting_before(marker), graph.made_for(marker):
        stamp = stamp_of(marker).but(role=Role.COMPUTE, params=(), alone=True)
        whole = graph.call(_aten.cat.default, (parts, 1), stamp=stamp.but(made_by="tile_linear"))
    marker.replace_all_uses_with(whole)
    _erase_unread(graph, marker)


def _erase_unread(graph: StepGraph, node: fx.Node) -> None:
    """Drop a node that nobody reads, and what it alone has read."""
    if node.op == "call_function" and not node.users and not node._erased:
        sources = node.all_input_nodes
        graph.graph.erase_node(node)
        for source in sources:
            _erase_unread(graph, source)


@dataclass(frozen=True)
class TileLinear(DecidingPass[Tiles]):
    """Have no more than a block of a large weight on the device."""

    name: ClassVar[str] = "tile_linear"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED, Fact.RECOMPUTED})
    decides: ClassVar[type[Any]] = Tiles

    max_bytes: int | None = None
    """At stage 3: a linear or embedding weight with more bytes than this in full, in the dtype in
    which it is gathered, is gathered and multiplied by equal blocks of columns that have no more,
    forward and backward. None, the default, and 0 gather every weight whole."""

    def __post_init__(self) -> None:
        """A block holds something."""
        super().__post_init__()
        at_least("tile_linear.max_bytes", self.max_bytes, 0)

    def is_above(self, spec: ParamSpec) -> bool:
        """Whether a full parameter has more bytes than are allowed."""
        return bool(self.max_bytes) and gathered_bytes(spec) > (self.max_bytes or 0)

    def cuts(self, spec: ParamSpec) -> bool:
        """Whether a parameter would travel in blocks, were it read as they can be."""
        return self.is_above(spec) and is_gathered(spec)

    def _above(self, graph: StepGraph) -> list[str]:
        """The keys of parameters above the limit that the graph reads."""
        read = {key for node in graph.nodes(role=Role.UNSHARD) for key in stamp_of(node).params}
        return [key for key in graph.specs if key in read and self.is_above(graph.specs[key])]

    def question(self, graph: StepGraph, ctx: Context) -> str:
        """Ranks tile alike where they have the same large weights: blocks are collectives."""
        return "\n".join(f"{graph.labels[k]} {graph.specs[k].shape}" for k in self._above(graph))

    def decide(self, graph: StepGraph, ctx: Context) -> Tiles:
        """As few equal blocks as the limit allows."""
        found: list[Tiled] = []
        for key in self._above(graph):
            spec = graph.specs[key]
            asked = f"tile_linear.max_bytes={self.max_bytes}"
            if not is_gathered(spec):
                where = f"zero={spec.zero}" if spec.zero < 3 else "in one process"
                ctx.warnings.append(
                    f"{asked} has no effect on {spec.name}: {where}, it is whole on the device. "
                    "Blocks are gathered at zero=3, of several ranks."
                )
                continue
            try:
                uses_of(graph, key)
                columns = self._columns(spec)
            except WholeError as error:
                ctx.warnings.append(
                    f"{asked} has no effect on {spec.name}, which has {gathered_bytes(spec)} "
                    f"bytes: {error}. It is gathered whole."
                )
                continue
            found.append(
                Tiled(
                    graph.labels[key],
                    columns,
                    -(-spec.shape[1] // columns),
                    columns * column_bytes(spec),
                    gathered_bytes(spec),
                )
            )
        return Tiles(tuple(found))

    def _columns(self, spec: ParamSpec) -> int:
        """How many columns a block has.

        Raises:
            WholeError: a single one is above the limit.
        """
        assert self.max_bytes
        most = self.max_bytes // column_bytes(spec)
        if not most:
            raise WholeError(f"one column of it has {column_bytes(spec)} bytes")
        blocks = -(-spec.shape[1] // most)
        return -(-spec.shape[1] // blocks)

    def apply(self, graph: StepGraph, decision: Tiles, ctx: Context) -> Notes:
        """See the module's docstring.

        Raises:
            ConfigError: the decision names a weight that there is not, or that is needed whole.
        """
        by_label = {label: key for key, label in graph.labels.items()}
        gathers = 0
        for tiled in decision.weights:
            key = by_label.get(tiled.weight, "")
            if not key:
                raise ConfigError(f"the plan tiles {tiled.weight!r}, which the graph does not have")
            spec = graph.specs[key]
            if not is_gathered(spec) or not 1 <= tiled.columns < spec.shape[-1]:
                raise ConfigError(
                    f"the plan tiles {tiled.weight!r}, of shape {spec.shape} at zero={spec.zero}, "
                    f"by {tiled.columns} columns: drop tile_linear, and it is decided anew"
                )
            try:
                gathers += tile(graph, key, tiled.columns)
            except WholeError as error:
                raise ConfigError(f"the plan tiles {tiled.weight!r}: {error}") from None
        if not decision.weights:
            return Notes()
        return Notes(
            weights=len(decision.weights),
            blocks=sum(tiled.blocks for tiled in decision.weights),
            gathers=gathers,
        )
