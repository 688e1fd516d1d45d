"""Two steps side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxzero import Config
from fxzero.inspect import Analysis, Capture, capture
from fxzero.inspect.compare import Decided, compare
from tests.tracing import BY_LAYER, chain

ON: dict[str, Any] = {"cost": {"cluster": "dgx_h100"}}


def captured(zero: int = 3, **options: Any) -> Capture:
    """A chain of layers on eight ranks."""
    return capture(chain(4, 64), zero=zero, world_size=8, options={**ON, **options})


def decided(zero: int = 3, **options: Any) -> Decided:
    """The same, as one side."""
    return Decided.of(Analysis.of(captured(zero, **options), detail=True))


def test_equal_steps_do_not_differ() -> None:
    """Two captures of one model."""
    found = compare(decided(), decided())
    assert found.differences == ()
    assert all(figure.before == figure.after for figure in found.figures)


def test_options_that_change_decisions() -> None:
    """The setting, what was decided differently, and what it does to time and bytes."""
    found = compare(decided(), decided(**BY_LAYER))
    where = {(row.where, row.what.partition("[")[0]) for row in found.differences}
    assert ("settings", "bucket.min_bytes") in where
    assert ("settings", "prefetch.distance") in where
    assert ("bucket", "buckets") in where
    figures = {figure.name: figure for figure in found.figures}
    assert figures["step_us"].before != figures["step_us"].after


def test_another_stage_sends_other_bytes() -> None:
    """ZeRO-2 gathers once, ZeRO-3 twice, where nothing is kept."""
    found = compare(
        decided(2, **BY_LAYER),
        decided(3, prefetch={"keep": False, "distance": 1}, bucket={"min_bytes": 0}),
    )
    figures = {figure.name: figure for figure in found.figures}
    assert figures["gathered_bytes"].after == 2 * figures["gathered_bytes"].before
    assert ("settings", "zero", "2", "3") in [
        (row.where, row.what, row.before, row.after) for row in found.differences
    ]


def test_an_order_says_where_it_changes() -> None:
    """The same tasks in another order: the first place."""
    one = Decided({}, ({"prefetch": {"order": ["a", "b", "c", "d"]}},), {})
    other = Decided({}, ({"prefetch": {"order": ["a", "c", "b", "d"]}},), {})
    (row,) = compare(one, other).differences
    assert (row.what, row.before, row.after) == ("order, from place 1 on", "b → c → d", "c → b → d")


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        ({"kept": ["a", "b"]}, {"kept": ["b", "c"]}, [("kept", "a", "c")]),
        ({"by": "list"}, {"by": "search"}, [("by", "list", "search")]),
        ({"by": "list"}, {}, [("by", "list", "—")]),
        (
            {"values": [{"value": "x", "us": 1.0}]},
            {"values": [{"value": "x", "us": 2.0}]},
            [("values[x].us", "1.0", "2.0")],
        ),
        ({"values": [{"value": "x"}]}, {"values": []}, [("values[x]", '{"value": "x"}', "—")]),
    ],
)
def test_differences(before: Any, after: Any, rows: list[tuple[str, str, str]]) -> None:
    """Items by name, texts as sets, the rest as it is."""
    found = compare(Decided({}, ({"p": before},), {}), Decided({}, ({"p": after},), {}))
    assert [(row.what, row.before, row.after) for row in found.differences] == rows


def test_a_plan_is_a_side(tmp_path: Path) -> None:
    """With the figures that its schedule was chosen by."""
    step = captured()
    step.plan(Config.from_options(ON)).write(tmp_path / "plan.json")
    found = compare(Decided.of_plan(tmp_path / "plan.json"), decided())
    assert [row for row in found.differences if row.where not in ("settings",)] == []
    figures = {figure.name: figure for figure in found.figures}
    assert figures["step_us"].before == pytest.approx(figures["step_us"].after, rel=0.02)
