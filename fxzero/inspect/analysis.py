"""The decisions of a compilation as data: rows that print, diff and travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxzero.compiler.compilation import Compilation
from fxzero.compiler.run import PassRecord
from fxzero.cost.flops import model_flops
from fxzero.graph import Phase, StepGraph
from fxzero.graph.steady import runs_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.inspect.capture import Capture
from fxzero.inspect.detail import GraphDetail
from fxzero.inspect.memory import MemoryReport
from fxzero.inspect.model_states import ModelStates
from fxzero.schedule.region_plans import plan_at_peak
from fxzero.schedule.simulate import tasks_of
from fxzero.settings import build, plain
from fxzero.transfer import Pool, Transfer, TransferKind, sent_share

PLAIN = (str, int, float, bool, type(None))
"""What a note may be in JSON; any other one is text."""


@dataclass(frozen=True)
class PassRow:
    """What one pass did to one graph."""

    graph: int
    name: str
    options: str
    time_ms: float
    nodes_before: int
    nodes_after: int
    notes: dict[str, Any]


@dataclass(frozen=True)
class TransferRow:
    """One bucket on the wire."""

    graph: int
    bucket: str
    phase: str
    lane: str
    operator: str
    layer: str
    params: tuple[str, ...]
    num_elements: int
    """Elements of the full tensors: what each rank sends or receives, up to (N-1)/N."""
    num_bytes: int
    between_ranks: bool = True
    """Whether other ranks take part: a copy between pools is this rank's own."""
    runs: int = 1
    """How often it travels in a step: more than once in the micro-step that stands for others."""
    num_ranks: int = 1
    """How many take part."""

    @property
    def sent_bytes(self) -> float:
        """What each rank sends in a step, and receives as much."""
        if not self.between_ranks:
            return 0.0
        return self.num_bytes * self.runs * sent_share(TransferKind(self.operator), self.num_ranks)


@dataclass(frozen=True)
class ScheduleRow:
    """What one scheduled graph takes, by the cost model that it was scheduled with."""

    graph: int
    costs: str
    makespan_us: float
    exposed_us: float
    """How long compute stands still for transfers."""
    busy_us: dict[str, float]
    """By lane."""
    peak_bytes: int
    resident_bytes: int
    """Of the peak: parameters, optimizer state, the batch."""
    bytes_by_kind: dict[str, int]
    """What the peak is made of."""
    peak_node: str
    host_bytes: int = 0
    """What is held in the host's memory meanwhile."""
    disk_bytes: int = 0
    """What is held on disk: all else is the device's."""
    left_out: tuple[str, ...] = ()
    """What no figure counts: own steps of optimizers that do not run on tensors without values."""

    @staticmethod
    def of(number: int, compilation: Compilation) -> ScheduleRow | None:
        """Simulate a compilation's graph; None if it was not kept."""
        graph = compilation.joint
        if graph is None:
            return None
        costs, fuses = compilation.context.costs, compilation.config.fuses
        program = tasks_of(graph, costs, fuses=fuses)
        if fuses and plan_at_peak(graph, program, on_cpu=compilation.context.on_cpu):
            program = tasks_of(graph, costs, fuses=fuses)
        simulation, memory = program.run(), program.memory()
        return ScheduleRow(
            graph=number,
            costs=costs.name,
            makespan_us=simulation.makespan_us,
            exposed_us=simulation.exposed_us,
            busy_us=simulation.busy_us,
            peak_bytes=memory.peak_bytes,
            resident_bytes=memory.resident_bytes,
            bytes_by_kind=memory.by_kind(),
            peak_node=memory.peak_node,
            host_bytes=memory.host_bytes,
            disk_bytes=memory.disk_bytes,
            left_out=memory.left_out,
        )


@dataclass(frozen=True)
class Analysis:
    """A compilation, ready to be shown."""

    zero: int
    world_size: int
    num_parameters: int
    passes: tuple[PassRow, ...]
    transfers: tuple[TransferRow, ...]
    schedules: tuple[ScheduleRow, ...] = ()
    states: ModelStates = field(default_factory=ModelStates)
    """What ZeRO shares out, of this rank."""
    flops: float = 0.0
    """Of a step on this rank: `fxzero.cost.flops`."""
    memory: tuple[MemoryReport, ...] = ()
    """Only where it was asked for."""
    details: tuple[GraphDetail, ...] = ()
    """Only where it was asked for: nodes, timeline, decisions, texts."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The compiler's."""
    rank: int = 0
    names: dict[str, str] = field(default_factory=dict)
    """By each name that a parameter has in the model, the one that is used here; empty of one that
    no graph reads. Nothing of a run that was dumped."""

    @staticmethod
    def of(
        capture: Capture, *, memory: bool = False, detail: bool = False, first: int = 0
    ) -> Analysis:
        """Read a capture.

        Args:
            memory: also what is kept, repeated and gathered, by layer.
            detail: also every node, the simulated timeline, and the decisions; and, if
                `Config.keep_text` was set, the graph's text behind every pass.
            first: the number of the first graph.
        """
        numbered = list(enumerate(capture.compilations, start=first))
        rows = [ScheduleRow.of(i, c) for i, c in numbered]  # plans regions for all that follows
        reports = [MemoryReport.of(i, c) for i, c in numbered if memory]
        details = [GraphDetail.of(i, c) for i, c in numbered if detail]
        passes, transfers = [], []
        graphs = [c.joint for c in capture.compilations if c.joint is not None]
        used = {graph.specs[key].name for graph in graphs for key in graph.inputs.values()}
        for number, compilation in numbered:
            passes += [_pass_row(number, record) for record in compilation.records]
            if compilation.joint is not None:
                transfers += _transfer_rows(number, compilation.joint)
        return Analysis(
            zero=capture.zero,
            world_size=capture.world_size,
            num_parameters=capture.num_parameters,
            passes=tuple(passes),
            transfers=tuple(transfers),
            schedules=tuple(row for row in rows if row is not None),
            states=ModelStates.of(graphs, capture.trained),
            flops=sum(map(model_flops, graphs)),
            memory=tuple(report for report in reports if report is not None),
            details=tuple(found for found in details if found is not None),
            settings=plain(capture.compilations[0].config.filled) if capture.compilations else {},
            rank=capture.rank,
            names={name: owner * (owner in used) for name, owner in capture.names.items()},
        )

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> Analysis:
        """Read what `to_json` gave. Nothing of it is executed.

        Args:
            where: what is read, for messages.

        Raises:
            ConfigError: it is no analysis, or one of another version.
        """
        known = {name: part for name, part in data.items() if name != "totals"}
        found: Analysis = build(Analysis, known, where)
        return found

    def elements(self, lane: str) -> int:
        """Elements that one lane moves in a step."""
        return sum(row.num_elements * row.runs for row in self._moved() if row.lane == lane)

    def _moved(self) -> list[TransferRow]:
        """Transfers of parameters and gradients between ranks: all but the norm's single number."""
        return [
            row
            for row in self.transfers
            if row.between_ranks and row.phase != Phase.OPTIMIZER.value
        ]

    def wire_elements(self) -> int:
        """Elements per rank and step, counted as in the table of ZeRO stages.

        An all-reduce is a reduce-scatter and an all-gather, and counts twice.
        """
        return sum(
            row.num_elements * row.runs * (2 if "all_reduce" in row.operator else 1)
            for row in self._moved()
        )

    def sent_bytes(self) -> float:
        """What each rank sends to others in a step, and receives: parameters, gradients, the norm's
        number and what the model sends by itself."""
        return sum(row.sent_bytes for row in self.transfers)

    def num_bytes(self, lane: str) -> int:
        """Bytes that one lane moves in a step, a norm's single number included; of ``h2d`` and
        ``d2h``, ``read`` and ``write`` what moves between this rank's pools."""
        return sum(row.num_bytes * row.runs for row in self.transfers if row.lane == lane)

    def to_json(self) -> dict[str, Any]:
        """Everything, as what `json` can write."""
        data: dict[str, Any] = plain(self)
        data["totals"] = self.totals()
        return data

    def totals(self) -> dict[str, float]:
        """Sums over all transfers of a step."""
        return {
            "gathered_elements": self.elements("gather"),
            "reduced_elements": self.elements("reduce"),
            "wire_elements": self.wire_elements(),
            "gathered_bytes": self.num_bytes("gather"),
            "reduced_bytes": self.num_bytes("reduce"),
            "sent_bytes": self.sent_bytes(),
            "uploaded_bytes": self.num_bytes("h2d"),
            "downloaded_bytes": self.num_bytes("d2h"),
        }


def _pass_row(number: int, record: PassRecord) -> PassRow:
    return PassRow(
        graph=number,
        name=record.name,
        options=record.options,
        time_ms=round(record.time_ms, 3),
        nodes_before=record.nodes_before,
        nodes_after=record.nodes_after,
        notes={
            name: note if isinstance(note, PLAIN) else str(note)
            for name, note in record.notes.items()
        },
    )


def _transfer_rows(number: int, graph: StepGraph) -> list[TransferRow]:
    return [_transfer_row(number, graph, transfer) for transfer in graph.transfers()]


def _transfer_row(number: int, graph: StepGraph, transfer: TransferNodes) -> TransferRow:
    stamp = transfer.stamp
    record = transfer.record
    return TransferRow(
        graph=number,
        bucket=stamp.bucket,
        phase=stamp.phase.value,
        lane=stamp.lane.value,
        operator=_way(record) if transfer.is_copy else record.kind.value,
        layer=stamp.layer,
        params=tuple(graph.specs[key].name for key in stamp.params),
        num_elements=record.full_bytes // record.dtype.itemsize,
        num_bytes=record.full_bytes,
        between_ranks=not transfer.is_copy,
        runs=runs_of(graph, stamp),
        num_ranks=record.size,
    )


def _way(copy: Transfer) -> str:
    """Between which pools a copy goes."""
    return f"copy to {copy.target}" + (" from disk" if copy.source is Pool.DISK else "")
