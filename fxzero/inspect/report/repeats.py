"""Micro-steps that stand for others: a timeline has them once, then nothing until all are done.

Of more than five micro-steps a step graph holds five, one of which runs several times
(`fxzero.graph.steady`). Its spans say how often; what stalls there does so in each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxzero.graph.stamps import Lane
from fxzero.inspect.detail import SpanRow, StallRow


@dataclass(frozen=True)
class Repeat:
    """A part of the timeline that is drawn once and runs several times."""

    start_us: float
    once_us: float
    """When it has run once."""
    end_us: float
    """When the last of its runs is done."""
    runs: int


def repeats_of(spans: Sequence[SpanRow], end_us: float) -> list[Repeat]:
    """Find them by what compute does.

    Args:
        end_us: of the step.
    """
    compute = sorted(
        (span for span in spans if span.lane == Lane.COMPUTE.value), key=lambda span: span.start_us
    )
    found: list[Repeat] = []
    is_open = False
    for span in compute:
        if is_open and span.runs != found[-1].runs:
            found[-1] = replace(found[-1], end_us=span.start_us)
            is_open = False
        if span.runs > 1 and not is_open:
            found.append(Repeat(span.start_us, span.start_us, end_us, span.runs))
            is_open = True
        if is_open:
            found[-1] = replace(found[-1], once_us=span.start_us + span.us)
    return found


def once(stall: StallRow, repeats: Sequence[Repeat]) -> StallRow:
    """A stall as it is in one run."""
    for repeat in repeats:
        if repeat.start_us <= stall.start_us < repeat.end_us:
            return replace(stall, us=stall.us / repeat.runs)
    return stall
