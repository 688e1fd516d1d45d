"""A report's page in a browser: it says nothing on the console, and does what a hand asks for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.models import gpt_nano
from fxzero.inspect import Analysis
from fxzero.inspect.report import page, report_data
from tests.inspect.reports import (
    HOSTILE,
    deep,
    hostile,
    measured,
    of_model,
    small,
    small_step,
)

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install 'fxzero[browser]'"
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"needs a browser: {', '.join(NAMES)}")

TABS = ("overview", "timeline", "memory", "traffic", "graph", "passes", "measured", "compare")
MOST_SECONDS = 3.0
MOST_BYTES = 5 << 20

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests of the file."""
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Writes a page and opens it from its file; nothing may be logged, fail or be asked for."""
    wrong: list[str] = []
    contexts = []

    def open_page(
        analysis: Analysis,
        against: tuple[Analysis, str] | None = None,
        title: str = "model",
        **settings: Any,
    ) -> Any:
        path = tmp_path / "report.html"
        path.write_text(page(report_data(analysis, title, against)), encoding="utf-8")
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
        contexts.append(context)
        shown = context.new_page()
        shown.set_default_timeout(10_000)
        shown.on("console", lambda message: wrong.append(message.text))
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        addresses: list[str] = []
        shown.on("request", lambda request: addresses.append(request.url))
        shown.goto(path.as_uri())
        shown.wait_for_selector("html[data-ready]")
        wrong.extend(url for url in addresses if url != path.as_uri() and url != "data:,")
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def full() -> dict[str, Any]:
    """A page with every tab."""
    return {"analysis": measured(small()), "against": (small(2), "two.json")}


def where(shown: Any, tab: str) -> str:
    """Which stretch of time a tab looks at."""
    return str(shown.locator(f"#panel-{tab} .where").first.inner_text())


def drawn(shown: Any, tab: str) -> str:
    """What its first canvas shows."""
    shown.wait_for_timeout(80)  # drawn in the next frame
    return str(
        shown.eval_on_selector(f"#panel-{tab} canvas", "canvas => canvas.toDataURL().slice()")
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_opens(opened: Open, scheme: str) -> None:
    """One panel at a time, with something in it, and no wider than the window."""
    shown = opened(**full(), color_scheme=scheme)
    assert tuple(tab.get_attribute("id")[4:] for tab in shown.locator("[role=tab]").all()) == TABS
    for tab in TABS:
        shown.click(f"#tab-{tab}")
        assert shown.locator("[role=tabpanel]:visible").count() == 1
        assert len(shown.inner_text(f"#panel-{tab}")) > 100
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown.set_viewport_size({"width": 560, "height": 800})
    for tab in TABS:
        shown.click(f"#tab-{tab}")
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab


def test_tabs_by_keys(opened: Open) -> None:
    """Arrows, Home and End, with the focus where it is seen."""
    shown = opened(**full())
    shown.focus("#tab-overview")
    for key, tab in (
        ("ArrowRight", "timeline"),
        ("ArrowRight", "memory"),
        ("End", "compare"),
        ("ArrowRight", "overview"),
        ("ArrowLeft", "compare"),
        ("Home", "overview"),
    ):
        shown.keyboard.press(key)
        assert shown.evaluate("document.activeElement.id") == f"tab-{tab}"
        assert shown.get_attribute(f"#tab-{tab}", "aria-selected") == "true"
        assert shown.locator("[aria-selected=true]").count() == 1
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert shown.evaluate(style) == "solid"


def test_figures_of_the_overview(opened: Open) -> None:
    """As a person reads them."""
    shown = opened(small())
    text = shown.inner_text("#panel-overview")
    (schedule,) = small().schedules
    assert f"at {schedule.peak_node}" in text
    assert schedule.costs in text
    assert shown.inner_text("#chips").split("\n") == ["ZeRO-3", "8 ranks", "13,696 parameters"]
    assert "bucket.min_bytes" in text


def test_the_timeline_zooms(opened: Open) -> None:
    """By keys, wheel, buttons and hand; memory looks at the same stretch."""
    shown = opened(small())
    shown.click("#tab-timeline")
    canvas = shown.locator("#panel-timeline canvas")
    whole, first = where(shown, "timeline"), drawn(shown, "timeline")
    canvas.focus()
    shown.keyboard.press("+")
    closer = where(shown, "timeline")
    assert closer != whole
    assert drawn(shown, "timeline") != first
    shown.keyboard.press("ArrowRight")
    later = where(shown, "timeline")
    assert later not in (closer, whole)
    box = canvas.bounding_box()
    shown.mouse.move(box["x"] + 600, box["y"] + 60)
    shown.mouse.wheel(0, -240)
    shown.wait_for_timeout(50)
    wheeled = where(shown, "timeline")
    assert wheeled != later
    shown.mouse.down()
    shown.mouse.move(box["x"] + 500, box["y"] + 60)
    shown.mouse.up()
    dragged = where(shown, "timeline")
    assert dragged != wheeled
    shown.click("#panel-timeline [aria-label='Zoom out']")
    assert where(shown, "timeline") != dragged
    shown.click("#tab-memory")
    assert where(shown, "memory") == where(shown, "timeline")
    shown.click("#panel-memory >> text=Whole step")
    assert where(shown, "memory") == whole
    assert where(shown, "timeline") == whole


def test_a_node_of_the_timeline(opened: Open) -> None:
    """Chosen by keys, with its source line; from there to the graph, and back."""
    shown = opened(small())
    shown.click("#tab-timeline")
    shown.locator("#panel-timeline canvas").focus()
    for key in (".", ".", "ArrowDown", "Enter"):
        shown.keyboard.press(key)
    name = shown.inner_text("#panel-timeline .node h3")
    assert name.startswith("gather_")
    assert "all_gather" in shown.inner_text("#panel-timeline .node pre")
    shown.click("#panel-timeline >> text=Show in the graph")
    assert shown.get_attribute("#tab-graph", "aria-selected") == "true"
    assert shown.input_value("#search") == name
    assert shown.inner_text("#panel-graph [aria-expanded=true] .node h3") == name
    shown.click("#panel-graph >> text=Show on the timeline")
    assert shown.get_attribute("#tab-timeline", "aria-selected") == "true"


def test_equal_layers_open(opened: Open) -> None:
    """A block of three to its layers, a layer to its nodes, a call to its piece's."""
    shown = opened(small())
    shown.click("#tab-graph")
    folded = shown.locator(
        "[role=treeitem]", has=shown.locator(":scope > .row", has_text="3 alike")
    )
    assert folded.first.get_attribute("aria-expanded") == "false"
    assert shown.locator(".row >> text=/^blocks.1$/").count() == 0
    shown.locator(".row", has_text="3 alike").first.click()
    assert shown.locator(".row >> text=/^blocks.1$/").count() == 1
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        shown.keyboard.press(key)
    focused = "document.activeElement.querySelector('.row').innerText"
    assert shown.evaluate(focused).startswith("blocks.1")
    call = shown.locator(".row", has_text="blocks_forward").first
    call.click()
    inside = shown.evaluate("document.activeElement.innerText")
    assert "aten.addmm" in inside or "addmm.default" in inside
    assert "reports.py:" in inside
    shown.keyboard.press("ArrowLeft")
    assert shown.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    shown.click("text=Fold all")
    assert shown.locator(".row >> text=/^blocks.1$/").count() == 0


def test_search(opened: Open) -> None:
    """By operator, parameter and line; several words at once; nothing is an answer too."""
    shown = opened(small())
    shown.click("#tab-graph")
    nodes = small().details[0].nodes
    shown.fill("#search", "blocks.1.up.weight")
    count = sum("blocks.1.up.weight" in node.params for node in nodes)
    assert shown.inner_text("#panel-graph .where").startswith(f"{count} of {len(nodes)} nodes")
    assert shown.locator("#panel-graph [role=tree] > li").count() == count
    shown.fill("#search", "GATHER blocks.1.up.weight")
    assert 0 < shown.locator("#panel-graph [role=tree] > li").count() < count
    shown.fill("#search", "no such thing")
    assert shown.inner_text("#panel-graph .where").startswith("0 of ")
    shown.fill("#search", "")
    assert shown.locator(".row", has_text="3 alike").count() == 2


def test_tables_sort(opened: Open) -> None:
    """By a click and by Enter; numbers from the largest, and as numbers."""
    shown = opened(small())
    shown.click("#tab-memory")
    table = shown.locator("#panel-memory table").first

    def sizes() -> list[str]:
        return [cell.inner_text() for cell in table.locator("tbody tr td:nth-child(4)").all()]

    head = table.locator("thead th:nth-child(4)")
    assert head.get_attribute("aria-sort") == "descending"
    largest = sizes()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert sizes() == largest[::-1]
    assert sizes() != largest
    table.locator("thead th:nth-child(1) button").focus()
    shown.keyboard.press("Enter")
    names = [cell.inner_text() for cell in table.locator("tbody tr th").all()]
    assert table.locator("thead th:nth-child(1)").get_attribute("aria-sort") == "ascending"
    assert names[0].startswith("add")
    assert shown.evaluate("document.activeElement.closest('th').cellIndex") == 0


def test_roles_of_memory_hide(opened: Open) -> None:
    """A click on the legend, and another one."""
    shown = opened(small())
    shown.click("#tab-memory")
    first = drawn(shown, "memory")
    toggle = shown.locator("#panel-memory .toggle", has_text="activations")
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == "false"
    assert drawn(shown, "memory") != first
    toggle.click()
    assert toggle.get_attribute("aria-pressed") == "true"
    assert drawn(shown, "memory") == first


def test_traffic_by_module(opened: Open) -> None:
    """Layers as one row, or each by itself."""
    shown = opened(small())
    shown.click("#tab-traffic")
    assert "blocks.*.up" in shown.inner_text("#panel-traffic")
    shown.check("#apart")
    text = shown.inner_text("#panel-traffic")
    assert "blocks.2.up" in text
    assert "blocks.*" not in text


def test_diffs(opened: Open) -> None:
    """The one that is chosen, by a click and by keys."""
    shown = opened(small())
    shown.click("#tab-overview")
    shown.click("#panel-overview >> text=prefetch")
    assert shown.get_attribute("#tab-passes", "aria-selected") == "true"
    assert shown.get_attribute("[data-pass=prefetch]", "aria-checked") == "true"
    shown.click("[data-pass=shard_params]")
    text = shown.inner_text(".shownpass .diff")
    assert "-unshard" in text
    assert "+gather_" in text
    shown.keyboard.press("ArrowDown")
    assert shown.get_attribute("[data-pass=shard_grads]", "aria-checked") == "true"
    assert "shard_grads" in shown.inner_text(".shownpass h3")
    assert shown.locator(".shownpass .diff .plus").count() > 0
    shown.click("[data-pass=draw_masks]")
    assert "left the graph as it was" in shown.inner_text(".shownpass")


def test_a_bucket_s_decision(opened: Open) -> None:
    """With the numbers that decided."""
    shown = opened(small())
    shown.click("#tab-passes")
    shown.click("[data-pass=bucket]")
    shown.click("text=What it decided")
    assert "gather.forward.0" in shown.inner_text(".shownpass details")


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
