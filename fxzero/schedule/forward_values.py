"""A step graph's forward as values that can be kept for backward or computed again."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxzero._compat import checkpoint_number, checkpoint_tag, is_symbolic
from fxzero.cost.analytic import value_bytes
from fxzero.cost.fusion import fuses_into_readers, is_reduction, rounds_by_place
from fxzero.cost.model import CostModel
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view, root
from fxzero.graph.launch import record_for
from fxzero.graph.operators import can_draw_again, is_pure, num_bytes, tensor_bytes
from fxzero.graph.same_on_ranks import Along, Alongs, can_be_cut, same_on_ranks
from fxzero.graph.stamps import stamp_of
from fxzero.schedule.candidates import Read
from fxzero.schedule.parts import part_record
from fxzero.schedule.repetition import Value

LEAST_DRAWN_BYTES = 1 << 16
"""Less is saved rather than drawn again: a generator's state is some kilobytes."""
LEAST_CUT_BYTES = 1 << 14
"""Less is not worth a collective."""
FUSED = 0.5
"""What an operator that fuses into its reader takes, of what it takes alone: it writes nothing, or
reads nothing."""


@dataclass(frozen=True)
class ForwardValues:
    """Forward's computations in a valid order, as nodes and as values."""

    nodes: tuple[fx.Node, ...]
    values: tuple[Value, ...]
    along: Mapping[fx.Node, Along]
    """By value that can be kept in parts, the ranks over which it pays most."""
    reads: tuple[Read, ...]
    """When backward reads each."""


def asked_to_repeat(node: fx.Node) -> bool:
    """Whether `torch.utils.checkpoint` wants a node repeated, and it may be."""
    if node.target is operator.getitem:  # a part is repeated with what it is a part of
        return asked_to_repeat(node.all_input_nodes[0]) and not is_handed_on(node)
    return checkpoint_tag(node) == "recompute" and is_pure(node) and not is_handed_on(node)


def is_handed_on(node: fx.Node) -> bool:
    """Whether a checkpoint's result, or a look at it, is what a later checkpoint begins with: that
    one keeps its inputs. Otherwise blocks of which each is a checkpoint would all be repeated at
    once, from the first one's input."""
    mine = checkpoint_number(node)
    if mine is None:
        return False
    for user in node.users:
        theirs = checkpoint_number(user)
        if theirs is not None and theirs > mine:
            return True
        if theirs == mine and is_view(user) and is_handed_on(user):
            return True
    return False


def reads_what_changes(graph: StepGraph, node: fx.Node) -> bool:
    """Whether a node reads an input that the forward changes, or a view of one: later it would read
    another value."""
    return bool(graph.mutated) and not graph.mutated.isdisjoint(map(root, node.all_input_nodes))


def forward_values(
    graph: StepGraph,
    costs: CostModel,
    *,
    fuses: bool,
    stays: Callable[[fx.Node], bool] = lambda _: False,
    draws_again: bool = True,
) -> ForwardValues:
    """What forward computes, and what each of it takes to keep and to repeat.

    Args:
        graph: stamped, with markers where parameters are read.
        fuses: whether runs of compute will be compiled regions. In another region a sum may be
            made in another order: sums are kept then, which are small, so that no bit changes. So
            is what `rounds_by_place`.
        stays: what shall be kept as it is, for whatever reason.
        draws_again: whether random numbers may be drawn again from their generator's state.
    """
    outputs = set(graph.output_values[: graph.num_forward_outputs])
    nodes = _in_order(graph)
    position = {node: i for i, node in enumerate(nodes)}
    gathered_again = _read_in_backward(graph)
    same = same_on_ranks(graph)
    along: dict[fx.Node, Along] = {}
    values = []
    for node in nodes:
        is_needed = any(stamp_of(user).phase is Phase.BACKWARD for user in node.users)
        sources = tuple(position[n] for n in node.all_input_nodes if n in position)
        role = stamp_of(node).role
        if role is Role.UNSHARD:
            us = 0.0 if node in gathered_again else _gather_us(graph, node, costs)
            values.append(Value(node.name, 0, us, (), is_needed, may_keep=False))
            continue
        looks = is_view(node) and bool(sources)
        several = isinstance(node.meta.get("val"), (list, tuple))
        is_part = node.target is operator.getitem and bool(sources) and not looks
        part_bytes, part_us = 0, None
        whole = looks or several or node in outputs or stays(node) or asked_to_repeat(node)
        if node in same and not whole:
            part = _best_part(node, same[node], costs)
            if part is not None:
                along[node], part_bytes, part_us = part
        values.append(
            Value(
                node.name,
                0 if looks or several or node in outputs else num_bytes(node),
                repeat_us(node, costs, fuses),
                sources,
                is_needed and node not in outputs,
                may_repeat=(
                    role is Role.COMPUTE
                    and (looks or is_pure(node) or (draws_again and _is_drawn_again(node)))
                    # A list is not kept, so that its parts are repeated with it or not at all.
                    and not (is_part and not values[sources[0]].may_repeat)
                    and node not in outputs
                    and not is_symbolic(node.meta.get("val"))
                    and not reads_what_changes(graph, node)
                    and checkpoint_tag(node) != "save"
                    and (looks or not is_handed_on(node))
                    and not (fuses and (is_reduction(node) or rounds_by_place(node)))
                    and not stays(node)
                ),
                may_keep=not (looks or several or asked_to_repeat(node)),
                part_bytes=part_bytes,
                part_us=part_us,
                keep_us=0.0 if whole or not fuses else _keep_us(node, costs),
                repeat_bytes=0 if looks or several else _repeat_bytes(node, fuses),
            )
        )
    return ForwardValues(tuple(nodes), tuple(values), along, _backward_reads(graph, nodes))


def _backward_reads(graph: StepGraph, nodes: Sequence[fx.Node]) -> tuple[Read, ...]:
    """When backward reads each of some nodes, by the places of its readers in the graph."""
    place = {node: i for i, node in enumerate(graph.nodes(phase=Phase.BACKWARD))}
    found = []
    for node in nodes:
        places = [place[user] for user in node.users if user in place]
        found.append(Read(min(places), max(places)) if places else Read())
    return tuple(found)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node or looks at it, but for the looks."""
    for user in node.users:
        if user.op != "output" and is_view(user):
            yield from _readers(user)
        else:
            yield user


def _keep_us(node: fx.Node, costs: CostModel) -> float:
    """What keeping a node takes where it would be fused into its readers: reading it, and writing
    it unless forward does that anyway."""
    if not fuses_into_readers(node):
        return 0.0
    streamed_us = costs.stream_us(num_bytes(node))
    in_forward = [
        user
        for user in _readers(node)
        if user.op != "output" and stamp_of(user).phase is Phase.FORWARD
    ]
    return streamed_us * (1 + all(map(fuses_into_readers, in_forward)))


def _repeat_bytes(node: fx.Node, fuses: bool) -> int:
    """What a node holds once it is repeated: nothing where everything that reads it is fused with
    it."""
    is_fused = fuses and fuses_into_readers(node)
    if is_fused and all(u.op != "output" and fuses_into_readers(u) for u in _readers(node)):
        return 0
    return num_bytes(node)


def _is_drawn_again(node: fx.Node) -> bool:
    """Whether a random node's numbers are worth a generator's state."""
    return value_bytes(node) >= LEAST_DRAWN_BYTES and can_draw_again(node)


def _best_part(node: fx.Node, alongs: Alongs, costs: CostModel) -> tuple[Along, int, float] | None:
    """The ranks over which a value is best kept in parts, the bytes of a part, and what a gather
    takes; None if it cannot be. The most ranks, unless fewer save twice as much in a microsecond.
    """
    value: Any = node.meta.get("val")
    if not can_be_cut(value) or tensor_bytes(value) < LEAST_CUT_BYTES:
        return None
    found = []
    for along in alongs:
        record = part_record(value, along)
        part_bytes = record.full_bytes // record.size
        us = costs.transfer(record).wire_us
        saved_bytes = tensor_bytes(value) - part_bytes
        found.append((saved_bytes / max(us, 1e-3), along, part_bytes, us))
    least_rate = max(rate for rate, *_ in found) / 2
    _, *best = min((c for c in found if c[0] >= least_rate), key=lambda choice: choice[2])
    return tuple(best)  # type: ignore[return-value]


def _in_order(graph: StepGraph) -> list[fx.Node]:
    """Forward's calls, the parts of a list right behind it."""
    found: list[fx.Node] = []
    for node in graph.nodes(phase=Phase.FORWARD):
        if stamp_of(node).role is Role.ROWS or node.target is operator.getitem:
            continue
        found.append(node)
        found += sorted(user for user in node.users if user.target is operator.getitem)
    return found


def repeat_us(node: fx.Node, costs: CostModel, fuses: bool) -> float:
    """What a node takes when it is repeated; nothing where it only looks at another one."""
    if is_view(node) or node.target is operator.getitem:
        return 0.0
    us = costs.operator_us(node)
    return us * FUSED if fuses and fuses_into_readers(node) else us


def _read_in_backward(graph: StepGraph) -> set[fx.Node]:
    """The markers of parameters that backward reads whatever is repeated, through views too."""
    found = set()
    for marker in graph.nodes(role=Role.UNSHARD):
        aliases = [marker]
        for node in aliases:
            aliases += [user for user in node.users if user.op != "output" and is_view(user)]
        readers = (user for node in aliases for user in node.users if user.op != "output")
        if any(stamp_of(user).phase is Phase.BACKWARD for user in readers):
            found.add(marker)
    return found


def _gather_us(graph: StepGraph, marker: fx.Node, costs: CostModel) -> float:
    """What it takes to gather a parameter once more; nothing where it is there in backward."""
    spec = graph.specs[stamp_of(marker).params[0]]
    if spec.shard_group is None or spec.zero < 3:
        return 0.0
    (shard,) = marker.all_input_nodes
    # By the largest part: ranks with fewer rows send padding, and decide alike.
    part_bytes = spec.chunk_rows * math.prod(spec.shape[1:]) * shard.meta["val"].element_size()
    records = (record_for(kind, axis, shard) for kind, axis in spec.layout.gathers)
    return sum(costs.transfer(replace(r, full_bytes=r.size * part_bytes)).wire_us for r in records)
