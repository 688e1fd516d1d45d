"""A graph in detail: rows that agree with the graph and with its simulation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fxzero import ConfigError
from fxzero.inspect import Analysis, Capture, capture
from fxzero.inspect.targets import load
from fxzero.schedule.simulate import simulate, simulate_memory
from tests.tiers import exhaustive

SETTINGS: list[Any] = [
    {},
    {"step": True},
    *exhaustive({"step": True, "micro_batches": 8}),
    {"step": True, "options": {"memory": "all_host"}},
]


@pytest.fixture(scope="module", params=SETTINGS, ids=["loop", "step", "steady", "all_host"])
def captured(request: pytest.FixtureRequest) -> Capture:
    """A GPT, and the graph's text behind every pass."""
    options = {"cost": {"cluster": "dgx_h100"}, "keep_text": True}
    settings = {**request.param, "options": {**options, **request.param.get("options", {})}}
    return capture(load("examples.models:gpt_nano").build, zero=3, world_size=8, **settings)


def test_it_agrees_with_the_simulation(captured: Capture) -> None:
    """The same spans, the same waits, and kinds of memory whose sum is the curve."""
    (compilation,) = captured.compilations
    assert compilation.joint is not None
    (detail,) = Analysis.of(captured, detail=True).details
    simulation = simulate(compilation.joint, compilation.context.costs, fuses=True)
    assert [span.node for span in detail.spans] == [span.node for span in simulation.spans]
    waited = sum(stall.us for stall in detail.stalls)
    assert waited == pytest.approx(simulation.exposed_us, abs=0.01 * len(detail.stalls) + 0.01)
    memory = simulate_memory(compilation.joint, fuses=True)
    assert [(row.node, sum(row.num_bytes)) for row in detail.held] == list(memory.curve)
    assert sum(row.num_bytes for row in detail.alive) == memory.peak_bytes


def test_a_row_for_each_node(captured: Capture) -> None:
    """Of the graph before runs of compute became regions, and of each piece once."""
    (compilation,) = captured.compilations
    (detail,) = Analysis.of(captured, detail=True).details
    graph = compilation.scheduled or compilation.joint
    assert graph is not None
    regions = [row for row in detail.nodes if row.role == "region"]
    assert bool(regions) is (compilation.scheduled is not None)
    outline = [row.name for row in detail.nodes if not row.piece and row not in regions]
    assert outline == [node.name for node in graph.graph.nodes]
    names = set(outline)
    for row in detail.nodes:
        if not row.piece and row not in regions:
            assert set(row.inputs) <= names
    texts = [text for text in detail.texts if text.name != "cut"]
    assert texts[0].name == "capture"
    assert [text.name for text in texts[1:]] == [record.name for record in compilation.records]
    for number, record in enumerate(compilation.records):
        place = detail.texts.index(texts[number + 1])
        assert detail.texts[place].text == record.after
        assert detail.texts[place - 1].text == record.before


def test_there_and_back(captured: Capture) -> None:
    """JSON holds all of it."""
    analysis = Analysis.of(captured, memory=True, detail=True)
    text = json.dumps(analysis.to_json(), allow_nan=False)
    assert Analysis.from_json(json.loads(text), "it") == analysis


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"zero": "three"}, "it.zero='three' must be a whole number"),
        ({"passes": [{"graph": 0}]}, r"it.passes\[0\] lacks"),
        ({"settings": 3}, "it.settings=3 must be a mapping"),
    ],
)
def test_what_is_no_analysis(data: dict[str, Any], message: str) -> None:
    """What is wrong, and where."""
    with pytest.raises(ConfigError, match=message):
        Analysis.from_json(data, "it")
