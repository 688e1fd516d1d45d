"""A report's page in a browser: tabs, timeline, graph, tables and diffs, by mouse and by keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.inspect.reports import Open, drawn, measured, small

TABS = ("overview", "timeline", "memory", "traffic", "graph", "passes", "measured", "compare")


def full() -> dict[str, Any]:
    """A page with every tab."""
    return {"analysis": measured(small()), "against": (small(2), "two.json")}


def where(shown: Any, tab: str) -> str:
    """Which stretch of time a tab looks at."""
    return str(shown.locator(f"#panel-{tab} .where").first.inner_text())


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
