"""A report's page in a browser: themes, two analyses, hostile names, many layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.models import gpt_nano
from tests.inspect.reports import (
    HOSTILE,
    Open,
    deep,
    drawn,
    hostile,
    measured,
    of_model,
    small,
    small_step,
)

MOST_SECONDS = 3.0
MOST_BYTES = 5 << 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(opened: Open, scheme: str) -> None:
    """The system's, until somebody chooses; canvases follow; text is to be read in both."""
    shown = opened(small(), color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    before, canvas = shown.evaluate(background), drawn(shown, "overview")
    assert contrasts(shown) == dict.fromkeys(contrasts(shown), True)
    shown.click("#theme")
    assert shown.evaluate(background) != before
    assert drawn(shown, "overview") != canvas
    assert contrasts(shown) == dict.fromkeys(contrasts(shown), True)
    shown.click("#theme")
    assert shown.evaluate(background) == before
    assert drawn(shown, "overview") == canvas


def contrasts(shown: Any) -> dict[str, bool]:
    """Whether each colour of text stands out from what is behind it: 4.5 to 1 (WCAG 2.1, AA)."""
    pairs = ["text/card", "text/page", "muted/card", "muted/page", "accent/card"]
    pairs += ["accent/accentSoft", "plus/plusSoft", "minus/minusSoft", "text/lane", "text/stripB"]
    script = """pairs => Object.fromEntries(pairs.map((pair) => {
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
            const code = style.getPropertyValue(`--${name}`).trim();
            const parts = [1, 3, 5].map((i) => parseInt(code.slice(i, i + 2), 16) / 255)
                .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
        };
        const [a, b] = pair.split("/").map(light);
        return [pair, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) >= 4.5];
    }))"""
    found: dict[str, bool] = shown.evaluate(script, pairs)
    assert len(found) == len(pairs)
    return found


def test_two_are_compared(opened: Open) -> None:
    """Figures, notes, buckets; both steps on one clock."""
    shown = opened(small(), (small(2), "two.json"))
    shown.click("#tab-compare")
    text = shown.inner_text("#panel-compare")
    assert "two.json ZeRO-2, 8 ranks" in text
    assert "moved: all-gather" in text
    assert "No difference in settings." in text
    row = shown.locator("#panel-compare tr", has_text="sent to other ranks")
    assert "+" in row.locator("td").last.inner_text()
    assert shown.locator("#panel-compare canvas").count() == 4


def test_predicted_and_measured(opened: Open) -> None:
    """Where a run was dumped."""
    shown = opened(measured(small()))
    shown.click("#tab-measured")
    text = shown.inner_text("#panel-measured")
    assert "2.00 \u00d7" in text
    assert "12.0 MiB" in text
    shown.locator("#panel-measured table").last.locator("tbody button").first.click()
    assert shown.locator("#panel-measured .node").count() == 1


def test_names_are_shown_as_text(opened: Open) -> None:
    """A parameter whose name is markup, and a title that is."""
    shown = opened(hostile(), (hostile(), HOSTILE), title=HOSTILE)
    assert shown.inner_text("#title") == HOSTILE
    assert HOSTILE in shown.title()
    for tab in ("overview", "timeline", "memory", "traffic", "graph", "passes", "compare"):
        shown.click(f"#tab-{tab}")
    assert HOSTILE in shown.inner_text("#panel-compare")
    shown.click("#tab-graph")
    shown.fill("#search", "onerror")
    shown.locator("#panel-graph .row").first.click()
    assert HOSTILE in shown.inner_text("#panel-graph .node")
    shown.click("#tab-traffic")
    for summary in shown.locator("#panel-traffic summary").all():
        summary.click()
    assert HOSTILE in shown.inner_text("#panel-traffic")
    assert shown.locator("img").count() == 0


def test_what_is_not_counted_is_said(opened: Open) -> None:
    found = small()
    shown = opened(found)
    assert "Not counted" not in shown.inner_text("#panel-overview")
    rows = tuple(replace(row, left_out=("Shampoo_step",)) for row in found.schedules)
    shown = opened(replace(found, schedules=rows))
    assert "Not counted: what Shampoo_step holds." in shown.inner_text("#panel-overview")


def test_a_whole_step_says_what_is_drawn_once(opened: Open) -> None:
    """Micro-steps by number in the graph; the optimizer behind them."""
    shown = opened(small_step())
    for tab in ("timeline", "memory", "traffic", "graph", "passes"):
        shown.click(f"#tab-{tab}")
    shown.click("#tab-graph")
    rows = [row.inner_text() for row in shown.locator("[role=tree] > li > .row .phase").all()]
    assert rows[0] == "inputs and outputs"
    assert rows[1:3] == ["forward, micro-step 0", "backward, micro-step 0"]
    assert "optimizer" in rows


class Breaking(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) to a loss."""
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x).sum()


def test_a_page_of_two_graphs(opened: Open) -> None:
    """One is chosen, in every tab."""
    shown = opened(of_model(lambda: (Breaking(), (torch.ones(4, 16),))))
    shown.click("#tab-traffic")
    assert "first" in shown.inner_text("#panel-traffic")
    shown.select_option("#graphs", index=1)
    assert shown.get_attribute("#tab-traffic", "aria-selected") == "true"
    assert "second" in shown.inner_text("#panel-traffic")
    assert "first" not in shown.inner_text("#panel-traffic")
    for tab in ("overview", "timeline", "memory", "graph", "passes"):
        shown.click(f"#tab-{tab}")


def test_without_details_the_rest_is_there(opened: Open) -> None:
    """Of `fxzero inspect --json`."""
    shown = opened(replace(small(), details=(), memory=()))
    for tab in ("timeline", "memory", "graph"):
        shown.click(f"#tab-{tab}")
        assert "no details" in shown.inner_text(f"#panel-{tab}")
    for tab in ("overview", "traffic", "passes"):
        shown.click(f"#tab-{tab}")
        assert len(shown.inner_text(f"#panel-{tab}")) > 100


def ready_s(shown: Any) -> float:
    """How long it took from its address to the overview on the screen, in seconds."""
    return int(shown.get_attribute("html", "data-ready")) / 1e3


def test_ninety_six_layers_open_soon(opened: Open) -> None:
    """The overview is painted in under three seconds."""
    shown = opened(deep(small(), 96))
    assert ready_s(shown) < MOST_SECONDS
    shown.click("#tab-graph")
    shown.locator(".row", has_text="93 alike").first.click()
    assert shown.locator(".row >> text=/^blocks.95$/").count() == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_gpt_of_ninety_six_layers_opens_soon(opened: Open, tmp_path: Path) -> None:
    """As it is captured, and small."""
    shown = opened(of_model(lambda: gpt_nano(num_layers=96)))
    assert ready_s(shown) < MOST_SECONDS
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
