"""What a step keeps, repeats and gathers, layer by layer, and what it holds over time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fxzero.compiler.compilation import Compilation
from fxzero.compiler.placement import Tried
from fxzero.graph import Lane, Phase, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import runs_of
from fxzero.passes.base import Room
from fxzero.passes.repeat_values import Repetitions
from fxzero.schedule.simulate import simulate_memory
from fxzero.schedule.storage import Kind, storages_of

COLUMNS = 64
"""Of the curve."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class MemoryRow:
    """One layer; several where they are alike, one behind the other."""

    layers: tuple[str, ...]
    kept_bytes: int
    """Of each: what forward keeps for backward, in one micro-step."""
    repeated: int
    """Operators that backward computes again."""
    repeated_bytes: int
    """What is not kept therefore."""
    repeated_us: float
    """What that takes, by the cost model."""
    partitioned: int
    """Values of which only this rank's part is kept."""
    partitioned_bytes: int
    """What is not kept therefore."""
    partitioned_us: float
    """What gathering them again takes."""
    gathered_bytes: int
    """Full tensors, in all of the step."""
    moved_bytes: int = 0
    """Of each: what goes to the host's memory meanwhile, in one micro-step."""


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one graph."""

    graph: int
    budget: str
    level: int | None
    """How much more than what is cheap is repeated: a number among `num_levels`; None without a
    budget."""
    num_levels: int | None
    room: str
    """How much transfers may hold: `fxzero.passes.base.Room`."""
    rows: tuple[MemoryRow, ...]
    curve: tuple[int, ...]
    """The most bytes held in each of equal parts of the step's tasks."""
    rungs: tuple[Tried, ...] = ()
    """What was tried to find out what leaves the device, where that was left to be decided."""

    @staticmethod
    def of(number: int, compilation: Compilation) -> MemoryReport | None:
        """Read a compilation; None if its graph was not kept."""
        graph = compilation.joint
        if graph is None:
            return None
        level = compilation.context.level
        memory = simulate_memory(graph, fuses=compilation.config.fuses)
        known = level.levels if level is not None else None
        return MemoryReport(
            graph=number,
            budget=str(compilation.config.filled.memory_budget),
            level=level.number if level is not None else None,
            num_levels=len(known) if known is not None else None,
            room=(level.room if level is not None else Room.USUAL).value,
            rows=tuple(_folded(_rows(compilation, graph))),
            curve=tuple(_sampled([held for _, held in memory.curve])),
            rungs=compilation.rungs,
        )

    def curve_text(self) -> str:
        """The curve as one line of blocks, the highest of them the peak."""
        most = max(self.curve, default=0) or 1
        return "".join(_BLOCKS[round(held / most * (len(_BLOCKS) - 1))] for held in self.curve)


def _rows(compilation: Compilation, graph: StepGraph) -> list[MemoryRow]:
    kept: dict[str, int] = defaultdict(int)
    for storage in storages_of(graph, fuses=compilation.config.fuses).every:
        if storage.begin is None or storage.kind is not Kind.ACTIVATIONS:
            continue
        stamp = stamp_of(storage.begin)
        if stamp.phase is not Phase.FORWARD or stamp.micro_step:
            continue
        if any(stamp_of(reader).phase is Phase.BACKWARD for reader in storage.readers):
            kept[stamp.layer] += storage.num_bytes
    repeated: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    decision = compilation.context.decisions.made.get("recompute")
    for value in decision.values if isinstance(decision, Repetitions) else ():
        for layer in (value.layer, *compilation.stands_for.get(value.layer, ())):
            sums = repeated[layer]
            sums[0] += len(value.nodes)
            sums[1] += value.saved_bytes
            sums[2] += value.us
    parts: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for part in decision.parts if isinstance(decision, Repetitions) else ():
        for layer in (part.layer, *compilation.stands_for.get(part.layer, ())):
            sums = parts[layer]
            sums[0] += 1
            sums[1] += part.saved_bytes
            sums[2] += part.us
    gathered: dict[str, int] = defaultdict(int)
    for transfer in graph.transfers():
        if transfer.stamp.lane is Lane.GATHER:
            runs = runs_of(graph, transfer.stamp)
            gathered[transfer.stamp.layer] += transfer.record.full_bytes * runs
    moved: dict[str, int] = defaultdict(int)
    for copy in graph.transfers(name=Lane.D2H.value):
        if not copy.of_parameters and not copy.stamp.micro_step:
            moved[copy.stamp.layer] += copy.record.full_bytes
    layers = sorted({*kept, *repeated, *parts, *gathered, *moved}, key=_natural)
    return [
        MemoryRow(
            (layer,),
            kept[layer],
            int(repeated[layer][0]),
            int(repeated[layer][1]),
            round(repeated[layer][2], 1),
            int(parts[layer][0]),
            int(parts[layer][1]),
            round(parts[layer][2], 1),
            gathered[layer],
            moved[layer],
        )
        for layer in layers
    ]


def _natural(layer: str) -> list[tuple[bool, int, str]]:
    """``h.10`` behind ``h.9``."""
    words = re.split(r"(\d+)", layer)
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in words]


def _folded(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Equal layers that follow each other as one row."""
    found: list[MemoryRow] = []
    for _, group in groupby(rows, key=lambda row: replace(row, layers=())):
        members = list(group)
        found.append(replace(members[0], layers=tuple(name for m in members for name in m.layers)))
    return found


def _sampled(held: Sequence[int]) -> list[int]:
    """The most of each of some equal parts."""
    count = min(COLUMNS, len(held))
    return [
        max(held[i * len(held) // count : max((i + 1) * len(held) // count, i + 1)])
        for i in range(count)
    ]
