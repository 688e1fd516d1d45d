"""What of one or two analyses goes into the page, as data that `json` writes small.

Rows are columns of numbers, every string stands once, diffs and curves have bounds. All else is as
`Analysis` has it: a figure of the page is a figure of `fxzero inspect --json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fxzero.compiler.config import Config
from fxzero.inspect.analysis import Analysis, ScheduleRow, TransferRow
from fxzero.inspect.detail import AliveRow, GraphDetail, HeldRow, NodeRow, SpanRow, StallRow
from fxzero.inspect.report.blocks import as_data, phase_blocks, pieces_of
from fxzero.inspect.report.columns import Strings, columns
from fxzero.inspect.report.comparison import compared, flat_settings
from fxzero.inspect.report.pass_diffs import pass_diffs
from fxzero.inspect.report.repeats import once, repeats_of
from fxzero.inspect.report.traffic import ModuleTraffic, module_traffic
from fxzero.settings import plain

MOST_POINTS = 4000
"""Of a memory curve: more than a screen has columns. The highest of each stretch stays."""
MOST_ALIVE = 400
"""Tensors at the peak, the largest."""
LONGEST_LIST = 40
"""Parts of a decision's list that a page shows; `fxzero inspect TARGET --plan FILE` has all."""


def report_data(
    analysis: Analysis, title: str, against: tuple[Analysis, str] | None = None
) -> dict[str, Any]:
    """Choose what a page shows.

    Args:
        title: what was analysed, as somebody calls it.
        against: another analysis and its title, to compare with.
    """
    strings = Strings()
    graphs = [
        _graph(analysis, row, _detail_of(analysis, row.graph), strings)
        for row in analysis.schedules
    ]
    data: dict[str, Any] = {
        "title": title,
        "about": _about(analysis),
        "settings": changed_settings(analysis.settings),
        "graphs": graphs,
        "passes": [asdict(row) for row in analysis.passes],
        "transfers": columns(strings, analysis.transfers, TransferRow)
        | {"sent_bytes": [round(row.sent_bytes) for row in analysis.transfers]},
        "against": None,
    }
    if against is not None:
        other, name = against
        data["against"] = {
            "title": name,
            "about": _about(other),
            "graphs": [
                {"graph": row.graph, "schedule": asdict(row)}
                | _over_time(row, _detail_of(other, row.graph), strings)
                for row in other.schedules
            ],
            **compared(analysis, other),
        }
    return data | {"strings": strings.every()}


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that are not the compiler's own, by their path; but for ``keep_text``, which the
    page itself asks for."""
    defaults = flat_settings(plain(Config()))
    return {
        name: value
        for name, value in flat_settings(settings).items()
        if name != "keep_text" and defaults.get(name, value) != value
    }


def _about(analysis: Analysis) -> dict[str, Any]:
    return {
        "zero": analysis.zero,
        "world_size": analysis.world_size,
        "rank": analysis.rank,
        "num_parameters": analysis.num_parameters,
        "flops": analysis.flops,
        "states": asdict(analysis.states),
        "totals": analysis.totals(),
    }


def _detail_of(analysis: Analysis, graph: int) -> GraphDetail | None:
    return next((detail for detail in analysis.details if detail.graph == graph), None)


def _graph(
    analysis: Analysis, row: ScheduleRow, detail: GraphDetail | None, strings: Strings
) -> dict[str, Any]:
    data: dict[str, Any] = {"graph": row.graph, "schedule": asdict(row), "detail": None}
    if detail is None:
        return data
    passes = [r for r in analysis.passes if r.graph == row.graph]
    transfers = [r for r in analysis.transfers if r.graph == row.graph]
    memory = [report for report in analysis.memory if report.graph == row.graph]
    pieces = pieces_of(detail.nodes)
    alive = sorted(detail.alive, key=lambda tensor: -tensor.num_bytes)
    return data | {
        "detail": {
            **_over_time(row, detail, strings),
            "alive": columns(strings, alive[:MOST_ALIVE], AliveRow),
            "alive_left_out": [
                len(alive[MOST_ALIVE:]),
                sum(tensor.num_bytes for tensor in alive[MOST_ALIVE:]),
            ],
            "traffic": columns(strings, module_traffic(transfers, detail.nodes), ModuleTraffic),
            "by_layer": [asdict(layer) for report in memory for layer in report.rows],
            "nodes": columns(strings, detail.nodes, NodeRow),
            "blocks": as_data(phase_blocks(detail.nodes), strings),
            "pieces": {str(strings(name)): places for name, places in pieces.items()},
            "decisions": _short_decisions(detail.decisions),
            "diffs": [asdict(diff) for diff in pass_diffs(passes, detail.texts)],
            "measured": [
                {
                    "part": run.part,
                    "calls_us": list(run.calls_us),
                    "peak_bytes": run.peak_bytes,
                    "device": run.device,
                    "spans": columns(strings, run.spans, SpanRow),
                }
                for run in detail.measured
            ],
        }
    }


def _over_time(row: ScheduleRow, detail: GraphDetail | None, strings: Strings) -> dict[str, Any]:
    """The timeline and the curve of memory."""
    spans = detail.spans if detail else ()
    repeats = repeats_of(spans, row.makespan_us)
    stalls = [once(stall, repeats) for stall in (detail.stalls if detail else ())]
    return {
        "spans": columns(strings, spans, SpanRow),
        "stalls": columns(strings, stalls, StallRow),
        "repeats": [asdict(repeat) for repeat in repeats],
        "kinds": list(detail.kinds) if detail else [],
        "held": _curve(detail.held if detail else (), strings),
    }


def _curve(held: Sequence[HeldRow], strings: Strings) -> dict[str, list[Any]]:
    """The curve, a column a kind, with no more points than can be seen."""
    points = [
        (start_us, row)
        for i, (start_us, row) in enumerate(zip(reached_us(held), held, strict=True))
        if not i or row.num_bytes != held[i - 1].num_bytes
    ]
    count = min(MOST_POINTS, len(points))
    stretches = (
        points[i * len(points) // count : (i + 1) * len(points) // count] for i in range(count)
    )
    highest = [max(stretch, key=lambda point: sum(point[1].num_bytes)) for stretch in stretches]
    rows = [row for _, row in highest]
    return {
        "start_us": [start_us for start_us, _ in highest],
        "node": [strings(row.node) for row in rows],
        "num_bytes": [list(column) for column in zip(*(r.num_bytes for r in rows), strict=True)],
    }


def reached_us(held: Sequence[HeldRow]) -> list[float]:
    """When each place of the launch order is reached: a transfer whose lane is busy holds its
    memory from its launch, and what stands behind it may run before it does."""
    found: list[float] = []
    for row in reversed(held):
        found.append(min(row.start_us, found[-1]) if found else row.start_us)
    return found[::-1]


def _short_decisions(made: Any) -> Any:
    """A decision whose long lists end early, and say so."""
    if isinstance(made, dict):
        return {name: _short_decisions(part) for name, part in made.items()}
    if isinstance(made, (list, tuple)):
        parts = [_short_decisions(part) for part in made[:LONGEST_LIST]]
        more = len(made) - LONGEST_LIST
        return [*parts, f"… and {more} more"] if more > 0 else parts
    return made
