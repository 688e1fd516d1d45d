"""Regions of a step that nobody compiles, planned where the peak depends on what they hold.

    held     │        ╷ at most ───────── may be the peak: planned by Inductor
             │  ──────┼ estimated
             │        ╵ at least   ╲_____________ peak
             │  ╷ at most ───────── is below whatever it holds: stays an estimate
             │  ┼ estimated

What is looked at is not compiled. What a region holds is estimated then, and may be twice as much,
or half of it; Inductor knows before it compiles anything, in up to seconds for a large region.
Equal layers are one region, so that a step of a hundred layers needs two or three plans.
"""

from __future__ import annotations

from fxzero.cost.region_memory import bounds_of, exact_bytes, piece_bytes, plan
from fxzero.graph import StepGraph
from fxzero.graph.pieces import Piece
from fxzero.regions.cutout import piece_of_run
from fxzero.schedule.simulate import Program
from fxzero.transfer import Pool

MOST = 2.0
"""What a region holds at most, of what is estimated: 1.8 is the most that was seen among 152
regions of ten models. Another one, a Mamba's scan, had 2.5."""
BESIDE = 1.1
"""The same of what it would hold if nothing ended, and convolutions took twice what they read and
write: 1.02 was seen, and 1.9 of the scan."""
SURE = 0.02
"""Of the peak: what it may be off by where nothing is decided by it."""


def plan_at_peak(graph: StepGraph, program: Program, *, on_cpu: bool, sure: float = SURE) -> bool:
    """Plan regions until the peak of a step that is lowered by Inductor is known.

    Args:
        graph: lowered, or not yet.
        program: its tasks, by what was known of its regions.
        on_cpu: whether it would run on a CPU.
        sure: of the peak, what it may be off by.

    Returns:
        Whether more is known of them now.
    """
    held = [num_bytes for _, num_bytes in program.memory().curve]
    unsure: dict[int, Piece] = {}
    for i, group in enumerate(program.groups):
        piece = piece_of_run(graph, list(group))
        if piece is not None and exact_bytes(piece) is None:
            unsure[i] = piece
    own = {i: program.temporary.get(i, 0) for i in unsure}
    results = {i: program.graph.tasks[i].bytes_in(Pool.DEVICE) - own[i] for i in unsure}
    beside = {i: held[i] - own[i] for i in unsure}

    def held_with(i: int, num_bytes: float) -> float:
        """What is held at a region, if that is what it holds itself."""
        return beside[i] + max(num_bytes - results[i], 0)

    planned = False
    while unsure:
        peak = max(held)
        least, most = {}, {}
        for i, piece in unsure.items():
            bounds = bounds_of(piece)
            least[i] = held_with(i, bounds.least)
            most[i] = held_with(i, min(MOST * bounds.estimated, BESIDE * bounds.most))
        i = max(most, key=most.__getitem__)
        if most[i] <= (1 + sure) * peak:
            i = max(unsure, key=held.__getitem__)
            if held[i] < peak or least[i] >= (1 - sure) * peak:
                return planned
        piece = unsure[i]
        plan(piece, graph.fake_mode, on_cpu=on_cpu)
        planned = True
        for j in [j for j, other in unsure.items() if other is piece]:
            del unsure[j]
            held[j] = round(held_with(j, piece_bytes(piece)))
    return planned
