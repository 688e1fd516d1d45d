"""One graph in detail, as data: its nodes, its timeline, what it holds, what was decided for it.

What a person asks about one node is answered from here, by `explain`, `report` and `diff`, of a
capture and of a dump alike: nothing in it is a graph, and nothing of it is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxzero.compiler.compilation import Compilation
from fxzero.compiler.run import PassRecord
from fxzero.cost.model import CostModel
from fxzero.graph import StepGraph
from fxzero.graph.modules import module_path
from fxzero.graph.node_text import node_line, source_line
from fxzero.graph.operators import num_bytes
from fxzero.graph.pieces import called, is_call, piece_of
from fxzero.graph.stamps import Role, has_stamp, stamp_of
from fxzero.schedule.engine import replay
from fxzero.schedule.simulate import FREE, Program, Simulation, tasks_of
from fxzero.settings import plain

LONGEST_TEXT = 600
"""Of a node's line: a bucket of a thousand tensors would fill pages."""


@dataclass(frozen=True)
class NodeRow:
    """One node of the scheduled graph, before runs of compute became regions."""

    name: str
    text: str
    """Value, operator, arguments and stamp, as `StepGraph.text` prints them, but no longer than
    `LONGEST_TEXT`."""
    operator: str
    phase: str = ""
    lane: str = ""
    role: str = ""
    layer: str = ""
    module: str = ""
    """The innermost module whose forward made it; empty of what a pass made for no module."""
    params: tuple[str, ...] = ()
    """The parameters that it moves, by name."""
    bucket: str = ""
    made_by: str = ""
    """The pass that made it; ``capture`` of what the model itself does."""
    again: str = ""
    """The node that it repeats in backward."""
    micro_step: int = 0
    piece: str = ""
    """The piece whose body it is in; empty in the outline. A piece stands for each of its calls."""
    num_bytes: int = 0
    us: float = 0.0
    """By the cost model, by itself: a region of several takes less than their sum."""
    inputs: tuple[str, ...] = ()
    """The nodes that it reads, of the same body."""
    source: str = ""
    """The line of the user's code that it comes from."""
    start_us: float | None = None
    """When it begins in a simulated step for which the step before has started nothing; None inside
    of a piece, and of what is no call."""


@dataclass(frozen=True)
class SpanRow:
    """When something ran in the simulated step."""

    node: str
    """The node, or the first one of a run."""
    name: str
    layer: str
    lane: str
    start_us: float
    us: float
    runs: int = 1


@dataclass(frozen=True)
class StallRow:
    """When compute stood still for a transfer."""

    node: str
    """What could not run before: a wait, mostly."""
    lane: str
    """The transfer's."""
    start_us: float
    us: float


@dataclass(frozen=True)
class HeldRow:
    """What is held while one task runs."""

    node: str
    start_us: float
    num_bytes: tuple[int, ...]
    """By kind, as `GraphDetail.kinds` names them."""


@dataclass(frozen=True)
class AliveRow:
    """A tensor that is alive at the peak."""

    node: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class PassText:
    """The graph behind a pass, as text."""

    name: str
    """Of the pass; ``capture`` for the graph that came to the first one, and ``cut`` for what was
    cut out of it, and came to the next."""
    text: str


@dataclass(frozen=True)
class Measured:
    """One callable of a graph, as it ran."""

    part: str
    """``step``, or ``forward`` and ``backward`` where a loop calls them apart."""
    calls_us: tuple[float, ...]
    """Whole calls, one after the other, after the first ones."""
    spans: tuple[SpanRow, ...]
    """Node by node, in one call that was watched, and is slower therefore."""
    peak_bytes: int | None
    """Of tensors; None where that was not to be found out."""
    device: str


@dataclass(frozen=True)
class GraphDetail:
    """All that is known of one graph."""

    graph: int
    nodes: tuple[NodeRow, ...]
    """In launch order; then the pieces' bodies; then the regions that a whole step calls in the
    place of runs of nodes, which the timeline names."""
    spans: tuple[SpanRow, ...]
    stalls: tuple[StallRow, ...]
    kinds: tuple[str, ...]
    """What memory is for: the columns of `held`."""
    held: tuple[HeldRow, ...]
    """The curve of the device's memory."""
    alive: tuple[AliveRow, ...]
    decisions: dict[str, Any] = field(default_factory=dict)
    """By pass, what it chose, with the numbers that decided."""
    digest: str = ""
    """Of the graph that was decided on."""
    texts: tuple[PassText, ...] = ()
    """Only where `Config.keep_text` asked for them."""
    measured: tuple[Measured, ...] = ()
    """Only of a dump of a run."""

    @staticmethod
    def of(number: int, compilation: Compilation) -> GraphDetail | None:
        """Read a compilation; None if its graph was not kept."""
        graph = compilation.joint
        if graph is None:
            return None
        costs = compilation.context.costs
        scheduled = compilation.scheduled or graph
        program = tasks_of(graph, costs, fuses=compilation.config.fuses)
        simulation = program.run()
        kinds, held = _held(program)
        decisions = compilation.context.decisions
        return GraphDetail(
            graph=number,
            nodes=(
                *_node_rows(scheduled, costs, _starts(scheduled, costs, compilation)),
                *_region_rows(graph, costs),
            ),
            spans=tuple(_spans(simulation)),
            stalls=tuple(_stalls(simulation)),
            kinds=kinds,
            held=held,
            alive=tuple(
                AliveRow(a.name, a.kind.value, a.num_bytes) for a in program.memory().alive
            ),
            decisions={name: plain(made) for name, made in decisions.made.items()},
            digest=decisions.digest,
            texts=tuple(_texts(compilation.records)),
        )


def _texts(records: Sequence[PassRecord]) -> Iterator[PassText]:
    last = ""
    for record in records:
        if record.before != last:
            yield PassText("cut" if last else "capture", record.before)
        if record.after:
            yield PassText(record.name, record.after)
        last = record.after


def _starts(graph: StepGraph, costs: CostModel, compilation: Compilation) -> dict[fx.Node, float]:
    """When each node begins: those of a run together."""
    program = tasks_of(graph, costs, fuses=compilation.config.fuses)
    starts = replay(program.graph, range(len(program.graph))).start_us
    return {
        node: round(start, 3)
        for group, start in zip(program.groups, starts, strict=True)
        for node in group
    }


def _node_rows(
    graph: StepGraph, costs: CostModel, starts: dict[fx.Node, float]
) -> Iterator[NodeRow]:
    names = {key: spec.name for key, spec in graph.specs.items()}
    for node in graph.graph.nodes:
        yield replace(_node_row(node, "", names, costs), start_us=starts.get(node))
    for piece in called(graph.graph.nodes):
        for node in piece.body.nodes:
            yield _node_row(node, piece.__name__, names, costs)


def _region_rows(graph: StepGraph, costs: CostModel) -> Iterator[NodeRow]:
    """What a graph that is lowered as it is calls; one that is cut first has none here."""
    for node in graph.nodes(role=Role.REGION):
        yield _node_row(node, "", {}, costs)


def _node_row(node: fx.Node, piece: str, names: dict[str, str], costs: CostModel) -> NodeRow:
    row = NodeRow(
        name=node.name,
        text=_shortened(node_line(node)),
        operator=getattr(node.target, "__name__", None) or str(node.target),
        piece=piece,
        num_bytes=num_bytes(node),
        inputs=tuple(source.name for source in node.all_input_nodes),
        source=source_line(node),
    )
    if not has_stamp(node):
        return row
    stamp = stamp_of(node)
    return replace(
        row,
        phase=stamp.phase.value,
        lane=stamp.lane.value,
        role=stamp.role.value,
        layer=stamp.layer,
        module=module_path(node) or "",
        params=tuple(names.get(key, key) for key in stamp.params),
        bucket=stamp.bucket,
        made_by=stamp.made_by,
        again=stamp.again,
        micro_step=stamp.micro_step,
        us=_alone_us(node, costs),
    )


def _shortened(line: str) -> str:
    if len(line) <= LONGEST_TEXT:
        return line
    half = LONGEST_TEXT // 2
    return f"{line[:half]} … {line[-half:]}"


def _alone_us(node: fx.Node, costs: CostModel) -> float:
    """What a node takes by itself."""
    stamp = stamp_of(node)
    if stamp.transfer is not None:
        return costs.transfer(stamp.transfer).wire_us
    if node.op != "call_function" or stamp.role in FREE:
        return 0.0
    return costs.compute_us(piece_of(node).nodes) if is_call(node) else costs.operator_us(node)


def _spans(simulation: Simulation) -> Iterator[SpanRow]:
    for span in simulation.spans:
        yield SpanRow(
            node=span.node,
            name=span.name,
            layer=span.layer,
            lane=span.lane.value,
            start_us=round(span.start_us, 3),
            us=round(span.us, 3),
            runs=span.runs,
        )


def _stalls(simulation: Simulation) -> Iterator[StallRow]:
    for stall in simulation.stalls:
        yield StallRow(stall.node, stall.lane.value, round(stall.start_us, 3), round(stall.us, 3))


def _held(program: Program) -> tuple[tuple[str, ...], tuple[HeldRow, ...]]:
    by_kind = program.held_by_kind()
    starts = replay(program.graph, range(len(program.graph))).start_us
    columns = zip(*by_kind.values(), strict=True)
    rows = (
        HeldRow(task.name, round(start, 3), tuple(column))
        for task, start, column in zip(program.graph.tasks, starts, columns, strict=True)
    )
    return tuple(by_kind), tuple(rows) if by_kind else ()
