"""Where to cut a micro-step into the stages of a pipeline.

    o──o──o══o──o──o─o      cuts between 2 and 3 (little crosses), 4 and 5
      1     2    3

With m micro-steps a pipeline takes Σ t + (m − 1) max t (Alpa, Zheng et al. 2022, section 5.2): what
one micro-step takes from end to end, and behind it m − 1 times the slowest part. Parts are stages
and what travels between two of them. The sum of the stages' times is what it is, so that for every
bound on the slowest part the cuts are looked for that send least; bounds go from none at all down
to what no cuts can keep. Each stage's memory is within a budget.

A position is what lies in front of a cut: for a chain its first nodes, for other graphs a set of
nodes that contains all that its nodes need (an ideal: Tarnawski et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Positions:
    """Where cuts can be, sorted by time; the first has nothing in front of it, the last all."""

    us: Floats
    """What lies in front of each takes, forward and backward: (positions,)."""
    cut_us: Floats
    """What travels there takes, both ways."""
    state_bytes: Floats
    """Parameters, gradients and optimizer state in front of each."""
    saved_bytes: Floats
    """What one micro-step's forward keeps in front of each."""
    nested: NDArray[np.bool_]
    """(positions, positions): whether the first lies in front of the second."""
    num_reads: Floats | None = None
    """How often parameters are read in front of each; None where nobody asks."""

    @staticmethod
    def of_chain(
        us: Sequence[float],
        cut_us: Sequence[float],
        state_bytes: Sequence[float] = (),
        saved_bytes: Sequence[float] = (),
    ) -> Positions:
        """Positions between the nodes of a chain.

        Args:
            us: of each of n nodes.
            cut_us: of the n − 1 places between two of them.
            state_bytes: of each node; none by default.
            saved_bytes: of each node; none by default.
        """
        count = len(us) + 1
        sums = [
            np.concatenate([[0.0], np.cumsum(values or [0.0] * len(us))])
            for values in (list(us), list(state_bytes), list(saved_bytes))
        ]
        nested = np.triu(np.ones((count, count), dtype=np.bool_), 1)
        return Positions(sums[0], np.array([0.0, *cut_us, 0.0]), sums[1], sums[2], nested)


@dataclass(frozen=True)
class Cuts:
    """The stages that were found."""

    positions: tuple[int, ...]
    """Of each cut, first one first."""
    us: float
    """What the pipeline takes for all micro-steps, idle time among it."""
    slowest_us: float
    """The slowest stage, or what travels, for one micro-step."""


def best_cuts(
    positions: Positions,
    num_stages: int,
    num_micro_steps: int,
    *,
    budget_bytes: float = np.inf,
    in_flight: Sequence[int] = (),
    each_reads: bool = False,
) -> Cuts | None:
    """The fastest stages whose memory is within a budget; None if there are none.

    Args:
        budget_bytes: of each stage.
        in_flight: by stage, of how many micro-steps it keeps what is saved; one by default.
        each_reads: whether every stage must read a parameter.
    """
    flights = list(in_flight) or [1] * num_stages
    total_us = float(positions.us[-1])
    best: Cuts | None = None
    bound = np.inf
    while True:
        chosen = _least_sent(positions, num_stages, bound, budget_bytes, flights, each_reads)
        if chosen is None:
            return best
        sent_us = float(positions.cut_us[list(chosen)].sum())
        ends = positions.us[[0, *chosen, len(positions.us) - 1]]
        slowest_us = float(
            max(np.diff(ends).max(), positions.cut_us[list(chosen)].max(initial=0.0))
        )
        us = total_us + sent_us + (num_micro_steps - 1) * slowest_us
        if best is None or us < best.us:
            best = Cuts(chosen, us, slowest_us)
        bound = slowest_us  # nothing that sends more is faster unless its slowest part is


def reads_nothing(positions: Positions, cuts: Cuts) -> bool:
    """Whether one of the stages reads no parameter."""
    assert positions.num_reads is not None
    ends = positions.num_reads[[0, *cuts.positions, len(positions.us) - 1]]
    return bool((np.diff(ends) == 0).any())


def _least_sent(
    positions: Positions,
    num_stages: int,
    bound_us: float,
    budget_bytes: float,
    in_flight: Sequence[int],
    each_reads: bool,
) -> tuple[int, ...] | None:
    """The cuts that send least, with every part faster than a bound."""
    count = len(positions.us)
    least = np.full(count, np.inf)
    least[0] = 0.0
    came_from: list[NDArray[np.int64]] = []
    takes = positions.us[None, :] - positions.us[:, None]
    may = positions.nested & (takes < bound_us)
    may[:, :-1] &= positions.cut_us[None, :-1] < bound_us
    if each_reads:
        assert positions.num_reads is not None
        may &= positions.num_reads[None, :] > positions.num_reads[:, None]
    state = positions.state_bytes[None, :] - positions.state_bytes[:, None]
    saved = positions.saved_bytes[None, :] - positions.saved_bytes[:, None]
    for stage in range(num_stages):
        allowed = may & (state + in_flight[stage] * saved <= budget_bytes)
        sums = np.where(allowed, least[:, None], np.inf)
        came_from.append(sums.argmin(axis=0))
        least = sums.min(axis=0) + positions.cut_us
        if stage < num_stages - 1:
            least[-1] = np.inf  # later stages have something, too
    if not np.isfinite(least[-1]):
        return None
    found = [count - 1]
    for before in reversed(came_from):
        found.append(int(before[found[-1]]))
    return tuple(found[-2:0:-1])
