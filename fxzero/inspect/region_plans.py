"""Regions of a step that nobody compiles, planned where the peak depends on what they hold.

    held     │                    ╷ up to ──────────── may be the peak: planned by Inductor
             │        ─────       ╵ estimated
             │  ╷ up to   ╲______________ peak
             │  ╵ estimated ───────────── can not be: stays an estimate

What is looked at is not compiled. What a region holds is estimated then, and may be twice as much,
or half of it; Inductor knows, and needs no compiler for that, but seconds for a large region. Equal
layers are one region, so that a step of a hundred layers needs two or three plans.
"""

from __future__ import annotations

from fxzero.cost.model import FixedCosts
from fxzero.cost.region_memory import exact_bytes, piece_bytes, plan
from fxzero.graph import StepGraph
from fxzero.regions.cutout import piece_of_run
from fxzero.schedule.simulate import tasks_of
from fxzero.transfer import Pool

MOST = 2.0
"""What a region holds at most, of what is estimated: of 120 regions of eleven models the most that
was seen is 1.8."""
SURE = 0.02
"""Of the peak: what it may be off by."""


def plan_at_peak(graph: StepGraph, *, on_cpu: bool) -> None:
    """Plan regions until the peak of a step that is lowered by Inductor is known.

    Args:
        graph: lowered, or not yet.
        on_cpu: whether it would run on a CPU.
    """
    program = tasks_of(graph, FixedCosts(0.0, latency_us=0.0), fuses=True)
    held = [num_bytes for _, num_bytes in program.memory().curve]
    unsure = {}
    for i, group in enumerate(program.groups):
        piece = piece_of_run(graph, list(group))
        if piece is not None and exact_bytes(piece) is None:
            unsure[i] = piece
    results = {i: program.graph.tasks[i].bytes_in(Pool.DEVICE) for i in unsure}
    for i in unsure:
        results[i] -= program.temporary.get(i, 0)
    beside = {i: held[i] - program.temporary.get(i, 0) for i in unsure}

    def held_with(i: int, num_bytes: float) -> float:
        """What is held at a region, if that is what it holds itself."""
        return beside[i] + max(num_bytes - results[i], 0)

    while unsure:
        most = {i: held_with(i, MOST * piece_bytes(piece)) for i, piece in unsure.items()}
        i = max(most, key=most.__getitem__)
        if most[i] <= (1 + SURE) * max(held):
            return
        piece = unsure[i]
        plan(piece, graph.fake_mode, on_cpu=on_cpu)
        for j in [j for j, other in unsure.items() if other is piece]:
            del unsure[j]
            held[j] = round(held_with(j, piece_bytes(piece)))
