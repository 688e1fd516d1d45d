"""The decisions of a compilation as data: rows that print, diff and travel as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fxzero.graph import Lane, Phase, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.step_graph import Transfer
from fxzero.inspect.capture import Capture
from fxzero.passes.pipeline import PassRecord


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


@dataclass(frozen=True)
class Plan:
    """A compilation, ready to be shown."""

    zero: int
    world_size: int
    num_parameters: int
    passes: tuple[PassRow, ...]
    transfers: tuple[TransferRow, ...]

    @staticmethod
    def of(capture: Capture) -> Plan:
        """Read a capture."""
        passes, transfers = [], []
        for number, compilation in enumerate(capture.compilations):
            passes += [_pass_row(number, record) for record in compilation.records]
            if compilation.joint is not None:
                transfers += _transfer_rows(number, compilation.joint)
        return Plan(
            zero=capture.zero,
            world_size=capture.world_size,
            num_parameters=capture.num_parameters,
            passes=tuple(passes),
            transfers=tuple(transfers),
        )

    def elements(self, lane: str) -> int:
        """Elements that one lane moves in a step."""
        return sum(row.num_elements for row in self._moved() if row.lane == lane)

    def _moved(self) -> list[TransferRow]:
        """Transfers of parameters and gradients: all but the norm's single number."""
        return [row for row in self.transfers if row.phase != Phase.OPTIMIZER.value]

    def wire_elements(self) -> int:
        """Elements per rank and step, counted as in the table of ZeRO stages.

        An all-reduce is a reduce-scatter and an all-gather, and counts twice.
        """
        return sum(
            row.num_elements * (2 if "all_reduce" in row.operator else 1) for row in self._moved()
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as what `json` can write."""
        data = asdict(self)
        data["totals"] = {
            "gathered_elements": self.elements("gather"),
            "reduced_elements": self.elements("reduce"),
            "wire_elements": self.wire_elements(),
            "gathered_bytes": sum(r.num_bytes for r in self.transfers if r.lane == "gather"),
            "reduced_bytes": sum(r.num_bytes for r in self.transfers if r.lane == "reduce"),
        }
        return data


def _pass_row(number: int, record: PassRecord) -> PassRow:
    return PassRow(
        graph=number,
        name=record.name,
        options=record.options,
        time_ms=round(record.time_ms, 3),
        nodes_before=record.nodes_before,
        nodes_after=record.nodes_after,
        notes=dict(record.notes),
    )


def _transfer_rows(number: int, graph: StepGraph) -> list[TransferRow]:
    return [_transfer_row(number, graph, transfer) for transfer in graph.transfers()]


def _transfer_row(number: int, graph: StepGraph, transfer: Transfer) -> TransferRow:
    stamp = transfer.stamp
    gathers = stamp.lane is Lane.GATHER
    full = transfer.waits if gathers else tuple(transfer.tensors)
    return TransferRow(
        graph=number,
        bucket=stamp.bucket,
        phase=stamp.phase.value,
        lane=stamp.lane.value,
        operator=str(transfer.launch.target).split(".")[1],
        layer=stamp.layer,
        params=tuple(graph.specs[key].name for key in stamp.params),
        num_elements=sum(math.prod(node.meta["val"].shape) for node in full),
        num_bytes=sum(num_bytes(node) for node in full),
    )
