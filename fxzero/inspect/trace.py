"""A simulated step as a file for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxzero.errors import ConfigError
from fxzero.graph import Lane
from fxzero.inspect.capture import Capture
from fxzero.passes.lower_regions import RegionBackend
from fxzero.pipeline.replay import PipelineReplay
from fxzero.schedule.simulate import Memory, Simulation, simulate, simulate_memory


def chrome_trace(
    simulation: Simulation, memory: Memory | None = None, *, number: int = 0
) -> dict[str, Any]:
    """A process of a trace: a row for each lane, and a counter of held bytes.

    The format is Google's "Trace Event Format"; times are in microseconds.

    Args:
        number: the graph's.
    """
    lanes = [lane for lane in Lane if any(span.lane is lane for span in simulation.spans)]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": number, "name": "process_name", "args": {"name": f"graph {number}"}}
    ]
    events += [
        {"ph": "M", "pid": number, "tid": i, "name": "thread_name", "args": {"name": lane.value}}
        for i, lane in enumerate(lanes)
    ]
    events += [
        {
            "ph": "X",
            "pid": number,
            "tid": lanes.index(span.lane),
            "name": span.name,
            "cat": span.lane.value,
            "ts": span.start_us,
            "dur": span.us,
            "args": {"layer": span.layer, **({"runs": span.runs} if span.runs > 1 else {})},
        }
        for span in simulation.spans
    ]
    if memory is not None:
        begins = {span.node: span.start_us for span in simulation.spans}
        events += [
            {"ph": "C", "pid": number, "name": "held", "ts": begins[node], "args": {"bytes": held}}
            for node, held in memory.curve
            if node in begins
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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


def write_trace(path: Path, captured: Capture, pipeline: PipelineReplay | None = None) -> None:
    """Simulate what was captured, a process of the trace for each graph, and write it.

    Args:
        pipeline: another process, of all ranks of a pipeline.

    Raises:
        ConfigError: the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    for number, compilation in enumerate(captured.compilations):
        graph = compilation.joint
        if graph is None:
            continue
        fuses = compilation.config.lower_regions.backend is RegionBackend.INDUCTOR
        simulation = simulate(graph, compilation.context.costs, fuses=fuses)
        memory = simulate_memory(graph, fuses=fuses)
        events += chrome_trace(simulation, memory, number=number)["traceEvents"]
    if pipeline is not None:
        events += pipeline_trace(pipeline, number=len(captured.compilations))
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(
            f"--trace {path}: {error.strerror}. Name a file in a folder that exists."
        ) from None
