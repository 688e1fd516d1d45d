"""The simulator against closed forms, and traces that a viewer can read."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from fxzero.cli.app import app
from fxzero.compiler.run import run_passes
from fxzero.cost import FixedCosts
from fxzero.graph import Lane
from fxzero.inspect import Analysis, capture
from fxzero.inspect.trace import trace_of, write_trace
from fxzero.passes import Bucket, Context, Prefetch
from fxzero.schedule.engine import Task, TaskGraph
from fxzero.schedule.simulate import Program, simulate, simulate_memory
from tests.stepping import EAGER, chain_of, compiled_step, step_graph
from tests.tiers import in_two_tiers
from tests.tracing import BY_LAYER, chain, of, trace, up_to
from tests.work import calls, growth


def task(name: str, us: float = 0.0, *after: int) -> Task:
    """Compute, or with no time a wait for what comes before it."""
    return Task(name, Lane.COMPUTE, us, after=after)


def gather(name: str, us: float, host_us: float = 0.0) -> Task:
    return Task(name, Lane.GATHER, us, host_us)


def program(*tasks: Task, ahead: dict[int, int] | None = None) -> Program:
    return Program(TaskGraph(tasks), ahead=ahead)


def test_one_gather_behind_one_layer() -> None:
    """Seven of ten microseconds are hidden."""
    found = program(gather("g", 10, 1), task("a", 6), task("w", 0, 0), task("b", 4)).run()
    assert found.makespan_us == 10 + 4
    assert found.exposed_us == found.exposed_by["gather"] == 10 - 1 - 6
    assert found.busy_us == {"gather": 10, "compute": 10}
    assert [(s.name, s.start_us) for s in found.spans] == [("g", 0), ("a", 1), ("b", 10)]


def test_transfers_queue_on_the_link() -> None:
    """The second starts when the first is done."""
    assert program(gather("g", 10), gather("h", 10), task("w", 0, 1)).run().makespan_us == 20


def test_transfers_on_resources_of_their_own_run_side_by_side() -> None:
    """Gathers with a process group of their own, say."""
    other = replace(gather("h", 10), resource="link of gathers")
    assert program(gather("g", 10), other, task("w", 0, 1)).run().makespan_us == 10


def test_what_the_step_before_has_started_is_in_flight() -> None:
    """A gather that starts before the last update is late by what is left of it."""
    tasks = (gather("g", 10), task("w", 0, 0), task("a", 5), gather("next", 10), task("update", 7))
    found = program(*tasks, ahead={0: 3}).run()
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


def test_ten_times_the_tasks_take_ten_times_as_long() -> None:
    """Costs are asked for once; a replay only adds and compares, a few calls a task."""
    layer = (gather("g", 10, 1), task("a", 6), task("b", 4))
    few, many = program(*layer * 500), program(*layer * 5000)
    assert calls(many.run) < 11 * calls(few.run)
    assert calls(many.run) < 60 * len(many.graph)
    assert growth(few.run, many.run) < 25


BUDGETS = [None, 150_000, 60_000]
"""Four layers of 16 KiB: all of them at once, or three, or a little more than is needed."""

biased = of(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), 8, 64)
"""A bucket holds a weight and a bias."""


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_the_budget_bounds_is_what_is_simulated(
    zero: int, fuses: bool, budget: int | None
) -> None:
    """To the byte: a schedule is made by the storages that a simulation finds in it."""
    graph = trace(biased, zero=zero)
    prefetch = Prefetch(budget_bytes=budget)
    passes = up_to("prefetch", Bucket(min_bytes=0), prefetch)
    notes = run_passes(passes, graph, Context(fuses=fuses))[-1].notes
    memory = simulate_memory(graph, fuses=fuses)
    assert memory.transfers_bytes == notes["held_bytes"] > 0
    assert budget is None or memory.transfers_bytes <= budget


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_a_gradient_is_held_until_its_reduce_is_joined(in_flight: int) -> None:
    """Those in flight, and the one that is made meanwhile: a sum that can be done by hand."""
    graph = trace(chain(4, width=64, batch=8), zero=0)
    prefetch = Prefetch(distance=0, reduce_distance=in_flight)
    notes = run_passes(up_to("prefetch", Bucket(min_bytes=0), prefetch), graph, Context())[-1].notes
    gradient = 64 * 64 * 4
    assert notes["held_bytes"] == (in_flight + 1) * gradient
    assert simulate_memory(graph, fuses=True).transfers_bytes == (in_flight + 1) * gradient


@pytest.mark.parametrize(
    ("budget", "micro_batches", "zero"),
    in_two_tiers([*product(BUDGETS, [1, 2], [0, 1, 2, 3])]),
)
def test_in_a_whole_step_too(budget: int | None, micro_batches: int, zero: int) -> None:
    """Gradients of several micro-batches are held from the first one on at stages 0 and 1."""
    held = 4 * 64 * 64 * 4 if zero < 2 and micro_batches > 1 else 0
    options = {**EAGER, "prefetch": {"budget_bytes": budget and budget + held}}
    build = chain_of(4, width=64, rows=8)
    compilation = compiled_step(build, zero=zero, micro_batches=micro_batches, options=options)
    (notes,) = [r.notes for r in compilation.records if r.name == "prefetch"]
    assert compilation.joint is not None
    memory = simulate_memory(compilation.joint, fuses=False)
    assert memory.transfers_bytes == notes["held_bytes"] > 0


def test_a_trace_has_a_row_for_each_lane(tmp_path: Path) -> None:
    """Complete events with times and durations, names for rows, and a counter of bytes."""
    captured = capture(chain_of(3), zero=3, world_size=8, options=BY_LAYER)
    analysis = Analysis.of(captured, detail=True)
    events = trace_of({0: analysis})
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {"compute", "gather", "reduce", "waits"}
    spans = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) >= analysis.schedules[0].makespan_us - 1e-3
    assert all(e["dur"] > 0 for e in spans)
    waits = sum(e["dur"] for e in spans if e["cat"] == "waits")
    assert waits == pytest.approx(analysis.schedules[0].exposed_us, abs=0.01)
    held = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(held) == analysis.schedules[0].peak_bytes
    write_trace(tmp_path / "trace.json", events)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == events


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
