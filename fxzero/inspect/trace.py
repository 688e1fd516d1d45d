"""A step, simulated or measured, as a file for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fxzero.errors import ConfigError
from fxzero.graph import Lane
from fxzero.inspect.analysis import Analysis
from fxzero.inspect.detail import GraphDetail
from fxzero.pipeline.replay import PipelineReplay


def graph_trace(detail: GraphDetail, *, process: int, title: str = "") -> list[dict[str, Any]]:
    """A process of a trace: a row for each lane, where compute waits, and counters of what is held.

    The format is Google's "Trace Event Format"; times are in microseconds.

    Args:
        process: its number.
        title: what stands before the graph's number.
    """
    lanes = [lane.value for lane in Lane if any(s.lane == lane.value for s in detail.spans)]
    rows = [*lanes, WAITS]
    name = f"{title}graph {detail.graph}"
    events: list[dict[str, Any]] = [_named("process_name", name, process)]
    events += [_named("thread_name", row, process, i) for i, row in enumerate(rows)]
    events += [
        {
            "ph": "X",
            "pid": process,
            "tid": rows.index(span.lane),
            "name": span.name,
            "cat": span.lane,
            "ts": span.start_us,
            "dur": span.us,
            "args": {"layer": span.layer, **({"runs": span.runs} if span.runs > 1 else {})},
        }
        for span in detail.spans
    ]
    events += [
        {
            "ph": "X",
            "pid": process,
            "tid": rows.index(WAITS),
            "name": stall.node,
            "cat": WAITS,
            "ts": stall.start_us,
            "dur": stall.us,
            "args": {"for": stall.lane},
        }
        for stall in detail.stalls
    ]
    events += [
        {
            "ph": "C",
            "pid": process,
            "name": "held",
            "ts": row.start_us,
            "args": dict(zip(detail.kinds, row.num_bytes, strict=True)),
        }
        for row in detail.held
    ]
    return events


WAITS = "waits"
"""The row that shows where compute stands still."""


def _named(what: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def measured_trace(detail: GraphDetail, *, process: int, title: str = "") -> list[dict[str, Any]]:
    """Processes of a trace, one for each callable that was watched: its nodes, a row a lane."""
    events: list[dict[str, Any]] = []
    for number, measured in enumerate(detail.measured):
        lanes = [lane.value for lane in Lane if any(s.lane == lane.value for s in measured.spans)]
        name = f"{title}graph {detail.graph} {measured.part}, measured"
        events.append(_named("process_name", name, process + number))
        events += [_named("thread_name", x, process + number, i) for i, x in enumerate(lanes)]
        events += [
            {
                "ph": "X",
                "pid": process + number,
                "tid": lanes.index(span.lane),
                "name": span.name,
                "cat": span.lane,
                "ts": span.start_us,
                "dur": span.us,
                "args": {"layer": span.layer},
            }
            for span in measured.spans
        ]
    return events


def pipeline_trace(replayed: PipelineReplay, *, number: int) -> list[dict[str, Any]]:
    """A process of a trace: a row for each rank along the pipeline, and on it what it does.

    Args:
        number: of the process.
    """
    name = f"pipeline, {replayed.table.name}"
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    ]
    for rank, row in enumerate(replayed.table.ranks):
        title = {"name": f"rank {rank}"}
        events.append({"ph": "M", "pid": number, "tid": rank, "name": "thread_name", "args": title})
        events += [
            {
                "ph": "X",
                "pid": number,
                "tid": rank,
                "name": str(action),
                "cat": action.work.name.lower(),
                "ts": replayed.start_us[action],
                "dur": replayed.end_us[action] - replayed.start_us[action],
                "args": {"stage": action.stage, "micro_step": action.micro_step},
            }
            for action in row
        ]
    return events


def trace_of(
    analyses: Mapping[int, Analysis], pipeline: PipelineReplay | None = None
) -> list[dict[str, Any]]:
    """Ranks side by side: of each graph the simulated step, and what was measured of it.

    Args:
        analyses: by rank, with details.
        pipeline: another process, of all ranks of a pipeline.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for rank, analysis in analyses.items():
        title = f"rank {rank}, " if len(analyses) > 1 else ""
        for detail in analysis.details:
            events += graph_trace(detail, process=process, title=title)
            events += measured_trace(detail, process=process + 1, title=title)
            process += 1 + len(detail.measured)
    if pipeline is not None:
        events += pipeline_trace(pipeline, number=process)
    return events


def profile_of(profiles: Iterable[tuple[str, Path]]) -> list[dict[str, Any]]:
    """Profiles of several callables as one trace, each in processes of its own.

    Args:
        profiles: titles and files, as `torch.profiler` writes them.

    Raises:
        ConfigError: a file is no profile.
    """
    events: list[dict[str, Any]] = []
    processes: dict[tuple[str, Any], int] = {}
    for title, path in profiles:
        try:
            with gzip.open(path, "rt") as file:
                found = json.load(file)["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise ConfigError(f"{path} is no profile, or was cut short: {error}") from None
        begin = min((e["ts"] for e in found if e.get("ph") == "X"), default=0.0)
        for event in found:
            old = event.get("pid")
            new = processes.setdefault((title, old), len(processes))
            event["pid"] = new
            if "ts" in event:
                event["ts"] -= begin
            if event.get("name") == "process_name":
                event["args"] = {"name": f"{title}, {event['args'].get('name', old)}"}
            events.append(event)
    return events


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Write a trace.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    try:
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Name a file in a folder that exists."
        ) from None
