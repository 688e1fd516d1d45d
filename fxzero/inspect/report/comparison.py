"""Where two analyses differ: figures, what passes noted, buckets, settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxzero.inspect.analysis import Analysis, TransferRow


def compared(this: Analysis, other: Analysis) -> dict[str, Any]:
    """Rows for tables, each with what the other one has and what this one has."""
    return {
        "figures": _figures(this, other),
        "notes": _notes(this, other),
        "buckets": _buckets(this, other),
        "changed": _differing(flat_settings(other.settings), flat_settings(this.settings)),
    }


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their path, ``prefetch.distance``."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat_settings(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _figures(this: Analysis, other: Analysis) -> list[dict[str, Any]]:
    """Sums over all graphs, each with its unit."""
    both = [_sums(other), _sums(this)]
    names = dict.fromkeys(name for sums in both for name in sums)
    names = dict.fromkeys(sorted(names, key=_topic))
    return [
        {"name": name, "unit": unit, "other": both[0].get((name, unit), 0), "this": value}
        for name, unit in names
        for value in [both[1].get((name, unit), 0)]
    ]


def _topic(name: tuple[str, str]) -> int:
    """Figures of one topic stand together, in the order in which people ask for them."""
    topics = ("step", "waiting", "busy", "peak", "at the peak", "model states", "sent", "moved")
    starts = (i for i, topic in enumerate(topics) if name[0].startswith(topic))
    return next(starts, len(topics))


def _sums(analysis: Analysis) -> dict[tuple[str, str], float]:
    rows = analysis.schedules
    sums: dict[tuple[str, str], float] = {
        ("step", "us"): sum(row.makespan_us for row in rows),
        ("waiting for transfers", "us"): sum(row.exposed_us for row in rows),
    }
    for row in rows:
        for lane, us in row.busy_us.items():
            sums[f"busy: {lane}", "us"] = sums.get((f"busy: {lane}", "us"), 0) + us
    top = max(rows, key=lambda row: row.peak_bytes, default=None)
    if top is not None:
        sums["peak", "B"] = top.peak_bytes
        for kind, held in top.bytes_by_kind.items():
            sums[f"at the peak: {kind.replace('_', ' ')}", "B"] = held
    sums["sent to other ranks", "B"] = analysis.sent_bytes()
    for transfer in analysis.transfers:
        name = (f"moved: {transfer.operator.replace('_', '-')}", "B")
        sums[name] = sums.get(name, 0) + transfer.num_bytes * transfer.runs
    sums["transfers", ""] = sum(transfer.runs for transfer in analysis.transfers)
    sums["model states", "B"] = analysis.states.num_bytes
    return sums


def _notes(this: Analysis, other: Analysis) -> list[dict[str, Any]]:
    """What passes noted that the two do not have alike; None where there is no such note."""
    mine, theirs = _notes_of(this), _notes_of(other)
    return [
        {"graph": graph, "pass": name, "run": run, **difference}
        for graph, name, run in dict.fromkeys((*mine, *theirs))
        for difference in _differing(
            theirs.get((graph, name, run), {}), mine.get((graph, name, run), {})
        )
    ]


def _notes_of(analysis: Analysis) -> dict[tuple[int, str, int], dict[str, Any]]:
    """By graph, pass, and which run of it: lowering runs once for each side of a cut."""
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for row in analysis.passes:
        run = 0
        while (row.graph, row.name, run) in found:
            run += 1
        found[row.graph, row.name, run] = {**row.notes, "nodes after": row.nodes_after}
    return found


def _buckets(this: Analysis, other: Analysis) -> list[dict[str, Any]]:
    mine = {(row.graph, row.bucket): row for row in this.transfers}
    theirs = {(row.graph, row.bucket): row for row in other.transfers}
    return [
        {
            "graph": graph,
            "bucket": bucket,
            "other": _bucket(theirs.get((graph, bucket))),
            "this": _bucket(mine.get((graph, bucket))),
        }
        for graph, bucket in dict.fromkeys((*theirs, *mine))
        if _bucket(theirs.get((graph, bucket))) != _bucket(mine.get((graph, bucket)))
    ]


def _bucket(row: TransferRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "operator": row.operator,
        "params": len(row.params),
        "num_bytes": row.num_bytes,
        "runs": row.runs,
    }


def _differing(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Names whose values differ, None where one side has none."""
    return [
        {"name": name, "other": theirs.get(name), "this": mine.get(name)}
        for name in dict.fromkeys((*theirs, *mine))
        if theirs.get(name) != mine.get(name) and name != "keep_text"
    ]
