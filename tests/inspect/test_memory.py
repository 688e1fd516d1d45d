"""What is kept, repeated and gathered, by layer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.models import gpt_nano
from fxzero.cli.app import app
from fxzero.graph import StepGraph
from fxzero.inspect import Analysis, MemoryReport, capture
from fxzero.regions.region import Region
from fxzero.schedule import simulate

DEPTH = 8


@pytest.fixture(autouse=True)
def _verified_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each pass it would be done again at each of the levels that are tried."""
    monkeypatch.setenv("FXZERO_VERIFY", "ends")


def report(
    budget: str = "none", zero: int = 3, depth: int = DEPTH, **settings: Any
) -> MemoryReport:
    """Of a GPT, of eight layers if not said."""
    captured = capture(
        lambda: gpt_nano(num_layers=depth),
        zero=zero,
        world_size=4,
        step=True,
        options={"memory_budget": budget, **settings},
    )
    (found,) = Analysis.of(captured, memory=True).memory
    return found


def test_equal_layers_are_one_row() -> None:
    """And none is left out, though passes have seen five of them."""
    found = report(zero=0)
    names = [name for row in found.rows for name in row.layers]
    assert {f"blocks.{i}" for i in range(DEPTH)} <= {*names}
    assert len(names) == len({*names})
    (middle,) = [row for row in found.rows if "blocks.4" in row.layers]
    assert len(middle.layers) >= 4
    assert middle.kept_bytes > 0
    assert middle.repeated > 0
    assert not middle.gathered_bytes
    assert found.level is None
    assert len(found.curve_text()) == len(found.curve)
    assert "█" in found.curve_text()


def test_what_a_budget_does() -> None:
    """Less is kept, more is repeated, and of early layers first."""
    free = report(depth=3)
    least = report(f"{int(max(free.curve) * 0.8)}", depth=3)
    assert least.level
    assert sum(row.gathered_bytes for row in least.rows) > 0
    assert least.num_levels is not None
    assert 0 < least.level < least.num_levels
    assert max(least.curve) <= max(free.curve) * 0.8

    def kept(found: MemoryReport) -> int:
        return sum(row.kept_bytes * len(row.layers) for row in found.rows)

    assert kept(least) < kept(free)
    by_layer = {name: row.kept_bytes for row in least.rows for name in row.layers}
    assert by_layer["blocks.0"] <= by_layer["blocks.2"]


def test_the_command() -> None:
    """As a table and as data."""
    arguments = ["inspect", "examples.models:gpt_nano", "--step", "--memory", "--world-size", "2"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0
    assert "repeating takes" in text.output
    assert "memory_budget=none" in text.output
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    (memory,) = data["memory"]
    assert {row["layers"][0] for row in memory["rows"]} >= {"blocks.0"}
    without = json.loads(CliRunner().invoke(app, [*arguments[:3], "--json"]).output)
    assert without["memory"] == []


def test_a_budget_that_nothing_fits() -> None:
    """One sentence with the least, and what it is made of."""
    options = json.dumps({"memory_budget": 1})
    result = CliRunner().invoke(
        app, ["inspect", "tests.targets:dict_batches", "--step", "--options", options]
    )
    assert result.exit_code == 2
    assert "is the least that was found" in result.output
    assert "optimizer state" in result.output


def test_a_step_that_grew_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lowering adds counts too."""
    from fxzero.compiler import compilation
    from fxzero.errors import VerificationError

    original = simulate.simulate_memory

    def grown(graph: StepGraph, *, fuses: bool) -> simulate.Memory:
        memory = original(graph, fuses=fuses)
        is_lowered = any(isinstance(node.target, Region) for node in graph.nodes())
        extra = (1 << 40) * is_lowered
        return simulate.Memory(**{**vars(memory), "peak_bytes": memory.peak_bytes + extra})

    monkeypatch.setattr(compilation, "simulate_memory", grown)
    with pytest.raises(Exception, match=r"Allow as much more") as caught:
        report("1TiB")
    assert "VerificationError" in str(caught.value) or isinstance(caught.value, VerificationError)
