"""The documentation says what is so: its outputs are printed now, its quotes stand in the code, and
the site builds without a warning.

A stale page is written anew by ``python -m tests.docs --write``.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fxzero.compiler.pipelines import LOWERING, SCHEDULING
from tests.docs import blocks, commands, examples, outputs, pages, passes, quotes
from tests.docs.outputs import ROOT, UnexpectedEndError
from tests.tiers import exhaustive
from tests.tracing import texts

EVERYTHING = pages.everything()
LONG = ("commands/inspect", "concepts/pipeline", "concepts/memory", "concepts/schedules")
"""Pages of many compilations: `python -m tests.docs` and an exhaustive run look at them too."""


def name_of(path: Path) -> str:
    """As one writes it."""
    return str(path.relative_to(ROOT))


@texts
@pytest.mark.parametrize(
    "path",
    [exhaustive(p)[0] if str(p.with_suffix("")).endswith(LONG) else p for p in EVERYTHING],
    ids=name_of,
)
def test_a_page_is_what_the_code_prints_now(path: Path) -> None:
    """Every command, every piece of Python, every table of options."""
    told = f"{name_of(path)} is stale: run python -m tests.docs --write, and look at what changes"
    assert path.exists(), told
    assert path.read_text(encoding="utf-8").splitlines() == EVERYTHING[path]().splitlines(), told


def test_no_page_is_of_something_that_has_gone() -> None:
    """A command or a pass."""
    assert pages.forgotten() == []


def test_every_pass_is_shown() -> None:
    """A new one is a line in `tests/docs/examples.py`; one that has gone is none."""
    assert {*examples.PASSES, *examples.STAGED} == {kind.name for kind in SCHEDULING + LOWERING}
    for kind in passes.KINDS:
        page = (pages.PAGES / "passes" / f"{kind.name}.md").read_text(encoding="utf-8")
        assert "\n--- before " in page, kind.name


def test_examples_are_of_commands_that_there_are() -> None:
    """And those whose examples are still to be written have a page."""
    assert set(examples.COMMANDS) <= set(commands.commands())


WRITTEN = sorted(pages.PAGES.rglob("*.md"))
QUOTES = [quote for path in WRITTEN for quote in quotes.quotes(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("file", "line"), QUOTES, ids=lambda value: str(value)[:40])
def test_a_quoted_message_is_in_the_code(file: str, line: str) -> None:
    """Word by word, but for what the code fills in."""
    assert quotes.is_said(file, line)


def test_a_message_that_nobody_raises_is_found() -> None:
    """A comparison that finds everything would be none."""
    assert QUOTES
    assert quotes.is_said("fxzero/errors.py", "did you mean … ?")
    assert not quotes.is_said("fxzero/errors.py", "did you mean … or else")


def test_python_that_is_not_run_parses() -> None:
    """Excerpts, such as the first page's."""
    for path in WRITTEN:
        for code in re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.M | re.S):
            ast.parse(code)


def test_a_stale_block_is_made_anew() -> None:
    """Whatever stood there; the mark, and what is around it, stay."""
    mark = "<!-- run: fxzero options | grep strict -->"
    new = blocks.filled(f"before\n\n{mark}\n```console\nold\n```\n\nafter\n")
    assert "old" not in new
    assert new.startswith(f"before\n\n{mark}\n```console\n$ fxzero options | grep strict\nstrict: ")
    assert new.endswith("\n```\n\nafter\n")
    assert blocks.filled(new) == new
    python = "<!-- python -->\n```python\nprint(1 + 1)\n```\n"
    assert blocks.filled(python) == python + "\n```text\n2\n```\n"
    assert blocks.filled(blocks.filled(python)) == blocks.filled(python)


def test_a_command_that_ends_otherwise_is_an_error() -> None:
    """A page never shows a failure that it does not announce."""
    with pytest.raises(UnexpectedEndError, match="ended with 2"):
        outputs.run("fxzero inspect nothing.at_all:here")
    assert outputs.run("fxzero inspect nothing.at_all:here", exit_code=2).startswith("ConfigError")


def test_what_differs_from_run_to_run_is_masked() -> None:
    """Times of passes and numbers of models; nothing else."""
    table = "┏━━━━━┳━━━━━━┓\n┃ a   ┃   ms ┃\n┡━━━━━╇━━━━━━┩\n│ {} │ {} │\n└─────┴──────┘"
    slow, fast = table.format("1.5", "14.0"), table.format("1.5", " 9.5")
    assert (
        outputs.masked(slow)
        == outputs.masked(fast)
        == ("┏━━━━━┳━━━━┓\n┃ a   ┃ ms ┃\n┡━━━━━╇━━━━┩\n│ 1.5 │  … │\n└─────┴────┘\n")
    )
    other = table.replace("ms", "MB").format("1.5", "14.0")
    assert outputs.masked(other) == other + "\n"
    assert outputs.masked("unshard(x, 12/up.weight)") == "unshard(x, 0/up.weight)\n"
    assert outputs.masked("3/4 of tokens/s in 1/docs") == "3/4 of tokens/s in 1/docs\n"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links lead somewhere, docstrings name parameters that there are, and a reader's browser is
    sent nowhere else for fonts or scripts."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="the site needs pip install 'fxzero[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", pages.SETTINGS, "-d", tmp_path],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # the theme's advertisement, no warning
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    found = list(tmp_path.rglob("index.html"))
    assert len(found) == len(WRITTEN)
    for page in found:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//", html)
        assert loaded == [], page
