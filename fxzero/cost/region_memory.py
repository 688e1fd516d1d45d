"""What a region holds while it runs: its results, and the buffers that fusion leaves in memory.

measured     a compiled region was run, and its allocator asked
compiled     the Python that calls its kernels says what they are given
planned      the same, written by Inductor with nothing compiled
estimated    an operator that can be computed where it is read is not kept: off by up to a half
             either way, as Inductor writes over what it has read, and ends nothing within a kernel
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxzero._compat import fresh_tracing_context, held_bytes, inductor_wrapper
from fxzero.cost.fusion import fuses_into_readers
from fxzero.cost.library_workspace import is_measuring, measured_region_bytes, seen_bytes
from fxzero.cost.workspace import workspace_bytes
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import tensor_bytes
from fxzero.graph.pieces import Piece
from fxzero.graph.structure import StructureKey
from fxzero.regions.region import CACHE, Structure, take_casts_apart

log = logging.getLogger("fxzero")

_planned: dict[tuple[StructureKey, bool], int | None] = {}
"""Bytes of what was planned in this process, for a CPU or not; None of what Inductor could not."""


def piece_bytes(piece: Piece) -> int:
    """The most bytes that a piece holds once it is lowered, its results included and its inputs
    not: by the best of what is known, in the order of the module's table."""
    known = exact_bytes(piece)
    if known is not None:
        return known
    if "estimated_bytes" not in piece.facts:
        piece.facts["estimated_bytes"] = region_bytes(piece.nodes)
    estimated: int = piece.facts["estimated_bytes"]
    return estimated


def exact_bytes(piece: Piece) -> int | None:
    """The same where it is more than an estimate; None elsewhere."""
    known = CACHE.structures.get(piece.key)
    if known is not None and "compiled_bytes" not in piece.facts:
        piece.facts["compiled_bytes"] = _compiled_bytes(known, piece)
    compiled: int | None = piece.facts.get("compiled_bytes")
    return compiled if compiled is not None else piece.facts.get("planned_bytes")


def plan(piece: Piece, fake_mode: Any, *, on_cpu: bool) -> None:
    """Find out what a piece that nobody compiles would hold: 0.1 to 3 s, once for equal ones.

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
    take_casts_apart(module.graph)
    module.recompile()
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    try:
        with fresh_tracing_context(fake_mode):
            written = inductor_wrapper(module, inputs)
    except Exception as error:  # whatever a compiler says: nobody has asked for a compiled region
        log.debug("Inductor does not plan %s: %s", piece, error)
        return None
    return held_bytes(written, _own_workspaces(piece, seen_bytes if on_cpu else _nothing))


def _nothing(_: fx.Node) -> None:
    return None


def _compiled_bytes(known: Structure, piece: Piece) -> int | None:
    """What a compiled region was seen to hold where that is measured, else what its code says."""
    if known.measured_bytes is None and CACHE.compiles and is_measuring():
        known.measured_bytes = measured_region_bytes(known.run, piece.inputs)
    if known.measured_bytes is not None:
        return known.measured_bytes
    return held_bytes(known.run, _own_workspaces(piece))


def _own_workspaces(
    piece: Piece, seen: Callable[[fx.Node], int | None] = _nothing
) -> dict[str, int]:
    """By operator, the most that one of its calls takes for itself: as it is seen, or by its
    formula."""
    own: dict[str, int] = defaultdict(int)
    for node in piece.nodes:
        found = seen(node)
        if num_bytes := workspace_bytes(node) if found is None else found:
            name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
            own[name] = max(own[name], num_bytes)
    return own


def region_bytes(run: Sequence[fx.Node]) -> int:
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

    held = peak = 0
    ending: dict[int, int] = defaultdict(int)
    for i, node in enumerate(run):
        if roots[node] is node and in_memory(node):
            values = node.meta.get("val")
            several = values if isinstance(values, (list, tuple)) else (values,)
            amount = sum(map(tensor_bytes, several))
            held += amount
            if node not in outside:
                ending[last_read(node)] += amount
        peak = max(peak, held + workspace_bytes(node))
        held -= ending.pop(i, 0)
    return peak
