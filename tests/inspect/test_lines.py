"""Parts of a step as lines."""

from __future__ import annotations

from typing import Any

import pytest

from fxzero import ConfigError
from fxzero.inspect import Analysis, capture
from fxzero.inspect.explain.view import View
from fxzero.inspect.lines import AROUND, around, check_known, lanes, of_modules
from fxzero.inspect.targets import load

ON: dict[str, Any] = {"cost": {"cluster": "dgx_h100"}}


@pytest.fixture(scope="module")
def view() -> View:
    """A GPT's step."""
    build = load("examples.models:gpt_nano").build
    analysis = Analysis.of(capture(build, zero=3, world_size=8, step=True, options=ON), detail=True)
    return View(analysis, analysis.details[0])


def test_around_a_node(view: View) -> None:
    """Ten before and ten behind, in launch order, the node marked."""
    launch = next(row for row in view.detail.nodes if row.role == "launch" and row.lane == "reduce")
    head, *lines = around(view, launch.name)
    assert "in launch order" in head
    assert len(lines) == 2 * AROUND + 1
    (marked,) = (i for i, line in enumerate(lines) if line.startswith("→"))
    assert marked == AROUND
    assert launch.text in lines[marked]


def test_around_a_node_of_a_piece(view: View) -> None:
    """In the piece's own order."""
    row = next(row for row in view.detail.nodes if row.piece == "blocks_forward" and row.role)
    if row.name not in view.outline:
        assert "in the piece blocks_forward" in around(view, row.name)[0]


def test_equal_layers_are_shown_once(view: View) -> None:
    """With the number of those that are alike, and lines of the user's code."""
    lines = of_modules(view, "blocks.*.mlp")
    heads = [line for line in lines if line.startswith("graph")]
    assert len(heads) == 1
    assert "blocks.0.mlp … blocks.3.mlp (4 alike)" in heads[0]
    assert any("in forward" in line for line in lines)
    assert any("addmm" in line for line in lines)


def test_one_module(view: View) -> None:
    """A layer that shares its piece with others has its own lines."""
    (head,) = (line for line in of_modules(view, "blocks.2.mlp") if line.startswith("graph"))
    assert "blocks.2.mlp:" in head


def test_lanes(view: View) -> None:
    """A row a lane, dark where it is busy, with what it is busy for."""
    head, *rows = lanes(view.detail)
    names = [row.split()[0] for row in rows]
    assert names == ["compute", "gather", "reduce", "waits"]
    busy = {span.lane for span in view.detail.spans}
    assert set(names[:-1]) == busy
    assert "█" in rows[0]
    assert "ms" in head


def test_what_there_is_not(view: View) -> None:
    """The nearest name is said."""
    with pytest.raises(ConfigError, match="--around: no node is called 'root_backwrd'"):
        check_known([view], "root_backwrd", None)
    with pytest.raises(ConfigError, match="--module: no module fits"):
        check_known([view], None, "blocks.*.mpl")
