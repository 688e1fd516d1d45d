"""All pages: those that are written by hand, whose blocks are filled, and those that are made."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.docs import commands, passes, tour
from tests.docs.blocks import filled
from tests.docs.outputs import ROOT

DOCS = ROOT / "docs"
PAGES = DOCS / "pages"
SETTINGS = DOCS / "mkdocs.yml"

_MADE = re.compile(
    r"(?P<indent> *)# made: (?P<what>\w+)\n.*?(?P<end> *# end: (?P=what)\n)", re.M | re.S
)


def made() -> dict[Path, Callable[[], str]]:
    """The pages that are made of the code, each with what makes it."""
    found: dict[Path, Callable[[], str]] = {
        PAGES / "tour.md": tour.page,
        PAGES / "passes" / "index.md": passes.index,
    }
    for kind in passes.KINDS:
        found[PAGES / "passes" / f"{kind.name}.md"] = lambda kind=kind: filled(passes.page(kind))
    for name, command in commands.commands().items():
        found[PAGES / "commands" / f"{name}.md"] = lambda name=name, command=command: filled(
            commands.page(name, command)
        )
    return found


def written() -> dict[Path, Callable[[], str]]:
    """The pages that somebody has written, each with what fills its blocks."""
    by_hand = sorted(set(PAGES.rglob("*.md")) - set(made()))
    return {
        path: lambda path=path: filled(path.read_text(encoding="utf-8"))
        for path in by_hand
        if path.parent not in (PAGES / "passes", PAGES / "commands")  # what is made has gone
    }


def navigation() -> str:
    """mkdocs.yml, whose lists of passes and commands are made too."""
    rows = {
        "commands": [f"- fxzero {name}: commands/{name}.md" for name in commands.commands()],
        "passes": [f"- {kind.name}: passes/{kind.name}.md" for kind in passes.KINDS],
    }

    def replace(found: re.Match[str]) -> str:
        indent = found["indent"]
        lines = "".join(f"{indent}{row}\n" for row in rows[found["what"]])
        return f"{indent}# made: {found['what']}\n{lines}{found['end']}"

    return _MADE.sub(replace, SETTINGS.read_text(encoding="utf-8"))


def everything() -> dict[Path, Callable[[], str]]:
    """Every file, and what makes it as it should be."""
    return {SETTINGS: navigation, **made(), **written()}


def forgotten() -> list[Path]:
    """Pages of passes and commands that are no more."""
    known = set(made())
    folders = (PAGES / "passes", PAGES / "commands")
    return [path for folder in folders for path in folder.glob("*.md") if path not in known]
