"""Decisions as data, and the table of ZeRO stages by counting."""

from __future__ import annotations

import functools
import json

import pytest
from torch import nn

from fxzero.inspect import Analysis, capture
from tests.tracing import BY_LAYER, chain, of

DEPTH = 3
WIDTH = 16
P = DEPTH * WIDTH * WIDTH


@functools.cache
def plan_of(zero: int, world_size: int) -> Analysis:
    """Backward reads every parameter: bias-free layers, an input that wants a gradient."""
    return Analysis.of(
        capture(chain(DEPTH, WIDTH), zero=zero, world_size=world_size, options=BY_LAYER)
    )


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (2, 2), (3, 3)])
def test_traffic_is_that_of_the_table(zero: int, factor: int, world_size: int) -> None:
    """Elements per rank and step, exactly: 2P for stages 0 to 2, 3P for stage 3."""
    plan = plan_of(zero, world_size)
    assert plan.num_parameters == P
    assert plan.wire_elements() == factor * P


@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (2, 2), (3, 3)])
def test_traffic_on_1024_ranks(zero: int, factor: int) -> None:
    """As many rows as ranks, so that nothing is padded."""
    plan = Analysis.of(capture(chain(2, 1024), zero=zero, world_size=1024, options=BY_LAYER))
    assert plan.wire_elements() == factor * plan.num_parameters == factor * 2 * 1024 * 1024


def test_lanes() -> None:
    """Stage 3 gathers twice what it reduces."""
    assert plan_of(3, 8).elements("gather") == 2 * P
    assert plan_of(3, 8).elements("reduce") == P
    assert plan_of(2, 8).elements("gather") == plan_of(2, 8).elements("reduce") == P
    assert plan_of(0, 8).elements("gather") == 0


def test_what_backward_never_reads_is_not_gathered_again() -> None:
    """Biases: less than 3P."""
    build = of(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), 4, 16)
    plan = Analysis.of(capture(build, zero=3, world_size=8, options=BY_LAYER))
    weights, biases = 3 * 16 * 16, 3 * 16
    assert plan.wire_elements() == 3 * weights + 2 * biases
    again = [r for r in plan.transfers if r.lane == "gather" and r.phase == "backward"]
    assert not [name for row in again for name in row.params if name.endswith("bias")]


def test_without_a_gradient_of_the_input_the_first_layer_is_not_read_again() -> None:
    """Backward needs a weight only for the gradient of its layer's input."""
    build = of(
        lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))), 4, 16, grad=False
    )
    plan = Analysis.of(capture(build, zero=3, world_size=8, options=BY_LAYER))
    assert plan.wire_elements() == 3 * 3 * 256 - 256


def test_rows() -> None:
    """What a row of the table holds."""
    first = plan_of(3, 8).transfers[0]
    assert (first.bucket, first.phase, first.lane) == ("gather.forward.0", "forward", "gather")
    assert first.operator == "all_gather"
    assert first.layer == "layers.0"
    assert first.params == ("layers.0.weight",)
    assert (first.num_elements, first.num_bytes) == (WIDTH * WIDTH, 4 * WIDTH * WIDTH)
    assert [r.phase for r in plan_of(3, 8).transfers] == ["forward"] * 3 + ["backward"] * 6


def test_json() -> None:
    """There and back."""
    plan = plan_of(3, 8)
    data = json.loads(json.dumps(plan.to_json(), default=str))
    assert data["totals"] == {
        "gathered_elements": 2 * P,
        "reduced_elements": P,
        "wire_elements": 3 * P,
        "gathered_bytes": 8 * P,
        "reduced_bytes": 4 * P,
        "sent_bytes": 3 * 4 * P * 7 / 8,
        "uploaded_bytes": 0,
        "downloaded_bytes": 0,
    }
    assert [row["name"] for row in data["passes"]] == [row.name for row in plan.passes]
    assert data["transfers"][0]["params"] == ["layers.0.weight"]
