"""What a region holds while it runs: its results, and the buffers that fusion leaves in memory.

measured     a compiled region was run, and its allocator asked
compiled     the Python that calls its kernels says what they are given
planned      the same, written by Inductor, and no kernel compiled
estimated    an operator that can be computed where it is read is not kept: off by up to a half
             either way, as Inductor writes over what it has read, and ends nothing within a kernel
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor, fx

from fxzero._compat import (
    Called,
    OpOverload,
    fresh_tracing_context,
    held_bytes,
    inductor_wrapper,
)
from fxzero.cost.fusion import fuses_into_readers
from fxzero.cost.library_workspace import (
    chooses_layouts,
    is_measuring,
    measured_region_bytes,
    seen_bytes,
)
from fxzero.cost.workspace import workspace_bytes
from fxzero.errors import FxZeroWarning
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import num_bytes, tensor_bytes
from fxzero.graph.pieces import Piece
from fxzero.graph.structure import StructureKey
from fxzero.regions.region import CACHE, Structure, ready_to_lower

_planned: dict[tuple[StructureKey, bool], int | None] = {}
"""Bytes of what was planned in this process, for a CPU or not; None of what Inductor could not."""


class Bounds(NamedTuple):
    """Bytes that a region may hold."""

    least: int
    """If Inductor writes all that it computes over what it has read."""
    estimated: int
    most: int
    """If nothing ends before the region does; what Inductor keeps though it could compute it again
    comes on top, which is not much."""


def piece_bytes(piece: Piece) -> int:
    """The most bytes that a piece holds once it is lowered, its results included and its inputs
    not: by the best of what is known, in the order of the module's table."""
    known = exact_bytes(piece)
    return bounds_of(piece).estimated if known is None else known


def bounds_of(piece: Piece) -> Bounds:
    """What is estimated of a piece, and how far off that may be."""
    found: Bounds | None = piece.facts.get("bounds")
    if found is None:
        found = piece.facts["bounds"] = estimate(piece.nodes)
    return found


def exact_bytes(piece: Piece) -> int | None:
    """The same where it is more than an estimate; None elsewhere."""
    known = CACHE.structures.get(piece.key)
    if known is not None and "compiled_bytes" not in piece.facts:
        piece.facts["compiled_bytes"] = _compiled_bytes(known, piece)
    compiled: int | None = piece.facts.get("compiled_bytes")
    return compiled if compiled is not None else piece.facts.get("planned_bytes")


def plan(piece: Piece, fake_mode: Any, *, on_cpu: bool) -> None:
    """Find out what a piece that nobody compiles would hold: 0.1 to 5 s, once for equal ones.

    Where Inductor cannot say, and where sizes are symbolic, it stays with an estimate.

    Args:
        fake_mode: of its values.
        on_cpu: whether it would run on a CPU. Operators of which only this one's library knows what
            they take are run then.
    """
    key = (piece.key, on_cpu)
    if key not in _planned:
        _planned[key] = _planned_bytes(piece, fake_mode, on_cpu)
    piece.facts["planned_bytes"] = _planned[key]


def _planned_bytes(piece: Piece, fake_mode: Any, on_cpu: bool) -> int | None:
    if piece.key.environment is not None:
        return None
    module = piece.module(piece.__name__)
    inputs = ready_to_lower(module)
    try:
        with fresh_tracing_context(fake_mode):
            written = inductor_wrapper(module, inputs)
    except Exception as error:  # whatever a compiler says: nobody has asked for a compiled region
        warnings.warn(
            f"what {piece.__name__} holds is estimated, and may be twice as much or half of it: "
            f"Inductor does not plan it ({error})",
            FxZeroWarning,
            stacklevel=2,
        )
        return None
    return held_bytes(written, _operators(piece, seen_bytes if on_cpu else _nothing))


def _nothing(_: fx.Node) -> None:
    return None


def _compiled_bytes(known: Structure, piece: Piece) -> int | None:
    """What a compiled region was seen to hold where that is measured, else what its code says."""
    if known.measured_bytes is None and CACHE.compiles and is_measuring():
        known.measured_bytes = measured_region_bytes(known.run, piece.inputs)
    if known.measured_bytes is not None:
        return known.measured_bytes
    return held_bytes(known.run, _operators(piece))


def _operators(piece: Piece, seen: Callable[[fx.Node], int | None] = _nothing) -> dict[str, Called]:
    """By name, the operators of a piece: the most that a call takes for itself, as it is seen or by
    its formula, and its results' elements."""
    found: dict[str, Called] = {}
    for node in piece.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        own = seen(node)
        values = node.meta.get("val")
        several = values if isinstance(values, (list, tuple)) else (values,)
        sizes = (v.element_size() if isinstance(v, Tensor) else 0 for v in several)
        name = node.target.overloadpacket.__name__
        before = found.get(name, Called())
        found[name] = Called(
            max(before.workspace_bytes, workspace_bytes(node) if own is None else own),
            tuple(max(pair) for pair in zip_longest(before.item_bytes, sizes, fillvalue=0)),
        )
    return found


def estimate(run: Sequence[fx.Node]) -> Bounds:
    """The most bytes that a region holds, its outputs included and its inputs not."""
    inside = set(run)
    roots: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in run:
        looks = is_view(node) or node.target is operator.getitem
        base = node.all_input_nodes[0] if looks and node.all_input_nodes else None
        roots[node] = roots.get(base, base) if base is not None else node
        for source in node.all_input_nodes:
            if not looks:
                readers[roots.get(source, source)].append(node)
    outside = {roots[n] for n in run if any(user not in inside for user in n.users)}
    order = {node: i for i, node in enumerate(run)}

    def in_memory(node: fx.Node) -> bool:
        if node in outside or not fuses_into_readers(node):
            return True
        return any(not fuses_into_readers(reader) for reader in readers[node])

    def last_read(node: fx.Node) -> int:
        last = order[node]
        for reader in readers[node]:
            last = max(last, order[reader] if in_memory(reader) else last_read(reader))
        return last

    held = peak = every = written = workspace = 0
    unknown = known = 0  # of what a library takes by the processor: up to twice what it touches
    ending: dict[int, int] = defaultdict(int)
    for i, node in enumerate(run):
        if roots[node] is node and in_memory(node):
            values = node.meta.get("val")
            several = values if isinstance(values, (list, tuple)) else (values,)
            amount = sum(map(tensor_bytes, several))
            held += amount
            every += amount
            if fuses_into_readers(node) or _looks_up(node):
                written += amount
            if node not in outside:
                ending[last_read(node)] += amount
        own = workspace_bytes(node)
        workspace = max(workspace, own)
        if chooses_layouts(node):
            touched = [*node.all_input_nodes, node]
            unknown, known = max(unknown, 2 * sum(map(num_bytes, touched))), max(known, own)
        peak = max(peak, held + own)
        held -= ending.pop(i, 0)
    return Bounds(max(peak - written - known, 0), peak, every + max(workspace, unknown))


def _looks_up(node: fx.Node) -> bool:
    """Whether a node takes elements by their numbers: kept in memory by an estimate, and perhaps
    not by Inductor."""
    target = node.target
    return isinstance(target, OpOverload) and target.overloadpacket.__name__ in _LOOK_UPS


_LOOK_UPS = {"embedding", "gather", "index", "index_select", "scatter"}
