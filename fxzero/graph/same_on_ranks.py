"""Values of forward that all ranks of a group have: equal on each, bit by bit.

    w = unshard(shard)                      the same along every axis of the parameter's mesh
    v = w / norm(w)                         so is what is computed from nothing else
    z = wait(all_gather(y, group))          the same on the ranks of the group
    x = embedding(w, ids)                   not: every rank has a batch of its own

Inputs, buffers and constants of the graph may differ between ranks, and so do random numbers.
Numbers that are written in the graph may too: `expression` makes a text of all that a value is
computed by, which ranks compare before they rely on it.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxzero._compat import OpOverload, is_symbolic, resolve_process_group
from fxzero.graph.launch import is_wait_of_call
from fxzero.graph.operators import is_pure
from fxzero.graph.stamps import Phase, Role, stamp_of
from fxzero.graph.step_graph import StepGraph
from fxzero.ranks.groups import Group
from fxzero.transfer import TransferKind

_KNOWN = ("aten", "prims", "fxzero")
"""Whose operators compute the same from the same on every rank."""
_SAME_BEHIND = (TransferKind.ALL_GATHER, TransferKind.ALL_REDUCE, TransferKind.BROADCAST)
"""What leaves the same on all ranks that take part."""


@dataclass(frozen=True)
class Along:
    """Ranks that have the same value."""

    name: str
    """What all ranks call them: the role of a mesh's axis, or the model's own transfer."""
    group: Group


Alongs = tuple[Along, ...]

Ranks = frozenset[int]
"""By their places in the world."""


def same_on_ranks(graph: StepGraph) -> dict[fx.Node, Alongs]:
    """By node of forward, the groups whose ranks all have its value; nodes without are left out.

    Of groups there are those of the parameters' axes, and of the model's own transfers.
    """
    of_mesh = _of_parameters(graph)
    known: dict[str, Along] = {along.name: along for along in of_mesh}
    found: dict[fx.Node, Sets | None] = {}
    """None of what is computed from nothing, and so the same everywhere."""
    for node in graph.nodes(phase=Phase.FORWARD):
        stamp = stamp_of(node)
        if stamp.role is Role.UNSHARD:
            found[node] = _of_parameter(graph, stamp.params[0])
        elif stamp.role in (Role.WAIT, Role.PART):
            along = _of_transfer(node)
            found[node] = (along.group.ranks,) if along is not None else ()
            if along is not None:
                known.setdefault(along.name, along)
        elif stamp.role is Role.COMPUTE and _computes_the_same(node):
            found[node] = _common([found.get(source, ()) for source in node.all_input_nodes])
    by_sets: dict[Sets, Alongs] = {}
    for sets in found.values():
        if sets and sets not in by_sets:
            by_sets[sets] = _within(known.values(), sets)
    return {node: by_sets[s] for node, s in found.items() if s and by_sets[s]}


Sets = tuple[Ranks, ...]
"""Ranks that have a value: those of each set have the same."""


def _of_parameters(graph: StepGraph) -> list[Along]:
    """The axes of the parameters' mesh: over a shard's in the group that gathers it."""
    return [
        Along(axis.role.value, axis.gather_group or axis.group)
        for spec in graph.specs.values()
        for axis in spec.layout.axes
    ]


def _of_parameter(graph: StepGraph, key: str) -> Sets:
    """All ranks of its mesh."""
    layout = graph.specs[key].layout
    if layout.ranks:
        return (layout.ranks,)
    return tuple(axis.group.ranks for axis in layout.axes)


def _of_transfer(node: fx.Node) -> Along | None:
    launch = node.all_input_nodes[0]
    while launch.op == "call_function" and stamp_of(launch).role is not Role.LAUNCH:
        launch = launch.all_input_nodes[0]
    record = stamp_of(launch).transfer if launch.op == "call_function" else None
    if record is None or record.kind not in _SAME_BEHIND or record.size == 1:
        return None
    return Along(launch.name, Group.of(resolve_process_group(record.group)))


def _within(alongs: Iterable[Along], sets: Sets) -> Alongs:
    """The groups all of whose ranks have a value; of several of the same ranks the first."""
    found: dict[Ranks, Along] = {}
    for along in alongs:
        ranks = along.group.ranks
        if len(ranks) > 1 and any(ranks <= together for together in sets):
            found.setdefault(ranks, along)
    return tuple(found.values())


def _computes_the_same(node: fx.Node) -> bool:
    if node.target is operator.getitem or is_wait_of_call(node):
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace in _KNOWN and is_pure(node)


def _common(sources: list[Sets | None]) -> Sets | None:
    """What several values have in common."""
    known = [sets for sets in dict.fromkeys(sources) if sets is not None]
    if not known:
        return None
    first, *others = known
    for other in others:
        shared = dict.fromkeys(mine & theirs for mine in first for theirs in other)
        first = tuple(ranks for ranks in shared if len(ranks) > 1)
    return first


def expression(node: fx.Node) -> str:
    """A digest of all that a value is computed by: operators, numbers, shapes, parameters, and
    which of the model's own transfers."""
    texts: dict[fx.Node, str] = {}
    order: list[fx.Node] = []
    stack = [node]
    while stack:
        top = stack.pop()
        if top in texts:
            continue
        texts[top] = ""
        order.append(top)
        if not _is_source(top):
            stack += top.all_input_nodes
    for top in sorted(order):
        value = top.meta.get("val")
        shape = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
        if _is_source(top):
            names = [key.partition("/")[2] for key in stamp_of(top).params]
            text = f"{names} {_place_of_transfer(top)} {shape}"
        else:
            args = fx.map_arg((top.args, top.kwargs), lambda n: texts[n])
            text = f"{top.target} {args} {shape}"
        texts[top] = hashlib.sha256(text.encode()).hexdigest()
    return texts[node]


def _is_source(node: fx.Node) -> bool:
    """Whether a value is the same whatever it is made of: a parameter, or behind a transfer."""
    return node.op != "call_function" or stamp_of(node).role in (Role.UNSHARD, Role.WAIT)


def _place_of_transfer(node: fx.Node) -> int:
    """How many launches come before the one that a wait joins, which all ranks make in one order;
    -1 for what joins none."""
    if node.op != "call_function" or stamp_of(node).role is not Role.WAIT:
        return -1
    launch = node.all_input_nodes[0]
    before = itertools.takewhile(lambda other: other is not launch, launch.graph.nodes)
    return sum(n.op == "call_function" and stamp_of(n).role is Role.LAUNCH for n in before)


def can_be_cut(value: Any) -> bool:
    """Whether a value can be kept in parts: it lies in memory in one piece."""
    return (
        isinstance(value, torch.Tensor)
        and not is_symbolic(value)
        and value.is_contiguous()
        and not value.is_complex()
        and value.numel() > 0
    )
