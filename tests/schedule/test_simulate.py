"""The simulator against closed forms, and traces that a viewer can read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fxzero.cli.app import app
from fxzero.cost import FixedCosts
from fxzero.graph import Lane
from fxzero.inspect import capture
from fxzero.inspect.trace import chrome_trace, write_trace
from fxzero.schedule.memory import simulate_memory
from fxzero.schedule.simulate import Do, Event, Program, simulate
from tests.stepping import EAGER, chain_of, step_graph
from tests.tracing import BY_LAYER


def event(do: Do, name: str, us: float = 0.0, host_us: float = 0.0, transfer: str = "") -> Event:
    lane = Lane.COMPUTE if do is Do.COMPUTE else Lane.GATHER
    return Event(do, name, name, "", lane, us, host_us, transfer)


def test_one_gather_behind_one_layer() -> None:
    """Seven of ten microseconds are hidden."""
    program = Program(
        (
            event(Do.LAUNCH, "g", 10, 1, "g"),
            event(Do.COMPUTE, "a", 6),
            event(Do.WAIT, "w", transfer="g"),
            event(Do.COMPUTE, "b", 4),
        )
    )
    found = program.run()
    assert found.makespan_us == 10 + 4
    assert found.exposed_us == 10 - 1 - 6
    assert found.busy_us == {"gather": 10, "compute": 10}
    assert [(s.name, s.start_us) for s in found.spans] == [("g", 0), ("a", 1), ("b", 10)]


def test_transfers_queue_on_the_link() -> None:
    """The second starts when the first is done."""
    program = Program(
        (
            event(Do.LAUNCH, "g", 10, 0, "g"),
            event(Do.LAUNCH, "h", 10, 0, "h"),
            event(Do.WAIT, "w", transfer="h"),
        )
    )
    assert program.run().makespan_us == 20


def test_what_the_step_before_has_started_is_in_flight() -> None:
    """A gather that starts before the last update is late by what is left of it."""
    program = Program(
        (
            event(Do.LAUNCH, "g", 10, 0, "g"),
            event(Do.WAIT, "w", transfer="g"),
            event(Do.COMPUTE, "a", 5),
            event(Do.AHEAD, "next", 10, 0, "g"),
            event(Do.COMPUTE, "update", 7),
        )
    )
    found = program.run()
    assert found.exposed_us == 10 - 7
    assert found.makespan_us == 3 + 5 + 7


def chain_costs(layer_us: float, wire_us: float) -> FixedCosts:
    """The same for every matrix product and for every transfer."""
    return FixedCosts(
        lambda nodes: layer_us * sum("mm" in str(n.target) for n in nodes), latency_us=wire_us
    )


@pytest.mark.parametrize("depth", [3, 6])
def test_a_chain_of_equal_layers(depth: int) -> None:
    """Gathers one ahead behind longer layers: forward hides all but what no step before started."""
    options = {**EAGER, "gather_ahead": {"enabled": False}}
    graph = step_graph(chain_of(depth), options=options)
    layer_us, wire_us = 100.0, 10.0
    found = simulate(graph, chain_costs(layer_us, wire_us), fuses=False)
    products = depth + 2 * depth - 1  # the first layer's input wants no gradient
    assert found.busy_us["compute"] == products * layer_us
    # Two gathers before the first layer, of which it needs one; the last reduce at the end.
    assert found.exposed_us == pytest.approx(2 * wire_us)
    assert found.makespan_us == pytest.approx(products * layer_us + 2 * wire_us)


def test_twenty_thousand_events_in_milliseconds() -> None:
    """Costs are asked for once; a replay only adds and compares."""
    layer = (
        event(Do.LAUNCH, "g", 10, 1, "g"),
        event(Do.COMPUTE, "a", 6),
        event(Do.WAIT, "w", transfer="g"),
        event(Do.COMPUTE, "b", 4),
    )
    program = Program(layer * 5000)
    start = time.process_time()
    program.run()
    assert time.process_time() - start < 0.5  # about 0.04 on a quiet core


def test_a_trace_has_a_row_for_each_lane(tmp_path: Path) -> None:
    """Complete events with times and durations, names for rows, and a counter of bytes."""
    graph = step_graph(chain_of(3))
    simulation = simulate(graph, chain_costs(100, 10), fuses=False)
    trace = chrome_trace(simulation, simulate_memory(graph, fuses=False))
    events = trace["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {"compute", "gather", "reduce"}
    spans = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) >= simulation.makespan_us
    assert all(e["dur"] > 0 for e in spans)
    assert any(e["ph"] == "C" and e["args"]["bytes"] > 0 for e in events)
    captured = capture(chain_of(2), zero=3, world_size=8, options=BY_LAYER)
    write_trace(tmp_path / "trace.json", captured)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_inspect_for_another_cluster(tmp_path: Path) -> None:
    """The command says what it simulated, and by which figures."""
    target = "examples.models:gpt_nano"
    path = tmp_path / "trace.json"
    arguments = [target, "--cluster", "dgx_h100", "--trace", str(path), "--json", "--step"]
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["schedules"]
    assert row["costs"] == "analytic, dgx_h100"
    assert row["makespan_us"] >= row["exposed_us"] > 0
    assert sum(row["bytes_by_kind"].values()) == row["peak_bytes"]
    assert path.exists()
    missing = [target, "--trace", str(tmp_path / "no" / "trace.json")]
    result = CliRunner().invoke(app, ["inspect", *missing])
    assert result.exit_code == 2
    assert "Name a file in a folder that exists" in result.stderr
