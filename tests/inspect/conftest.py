"""Fixtures of the tests that open a report in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fxzero.inspect import Analysis
from fxzero.inspect.report import page, report_data
from tests.inspect.reports import Open

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One for all tests of a worker."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install 'fxzero[browser]'"
    )
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"needs a browser: {', '.join(NAMES)}")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
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
