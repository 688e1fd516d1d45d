"""A page for each pass, of its docstring, its fields and what it does to a small net."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum

from fxzero.cli.options import field_documents
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import LOWERING, SCHEDULING
from fxzero.passes import Door, Fact, Pass
from fxzero.passes.decision import DecidingPass
from tests.docs.examples import IN_STAGES, PASSES, STAGED

KINDS = (*SCHEDULING, *LOWERING)
"""In the order in which they run."""

_DOORS = {Door.LOOP: "`torch.compile`", Door.STEP: "`compile_step`"}

_INDEX = """\
# Passes

A pass decides one thing about a step graph, and rewrites it. They run in this order; each page
shows a graph before and after.

| pass | what it does | runs in |
|---|---|---|
{rows}

What a pass requires must have been provided by one before it. That is checked before anything runs.
These are the facts:

| fact | means |
|---|---|
{facts}
"""


def index() -> str:
    """All passes, in order."""
    rows = [
        f"| [`{kind.name}`]({kind.name}.md) | {_summary(kind)} | {_doors(kind)} |" for kind in KINDS
    ]
    facts = [f"| {fact} | {text} |" for fact, text in _facts().items()]
    return _INDEX.format(rows="\n".join(rows), facts="\n".join(facts))


def page(kind: type[Pass]) -> str:
    """One pass; blocks are still to be filled."""
    parts = [f"# `{kind.name}`", _prose(_document(kind)), _contract(kind), *_options(kind)]
    if example := _example(kind.name):
        parts += ["## Before and after", example]
    return "\n\n".join(parts) + "\n"


def _document(kind: type[Pass]) -> str:
    return inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")


def _summary(kind: type[Pass]) -> str:
    """The first sentence of its file."""
    return " ".join(_document(kind).partition("\n\n")[0].split())


def _prose(document: str) -> str:
    """A docstring whose indented graphs are fenced; an arrow may stand in front of them."""
    found: list[str] = []
    for block in document.split("\n\n"):
        lines = block.splitlines()
        if all(re.match(r"    |→ {2,3}", line) for line in lines):
            indented = [re.sub(r"^ {4}", "", line) for line in lines]
            if any(line.startswith("→") for line in lines):
                indented = lines
            found.append("\n".join(["```text", *indented, "```"]))
        else:
            found.append(block)
    return "\n\n".join(found)


def _doors(kind: type[Pass]) -> str:
    return " and ".join(words for door, words in _DOORS.items() if door in kind.doors)


def _contract(kind: type[Pass]) -> str:
    """Where it runs, and what it needs and gives."""
    rows = [("class", f"`fxzero.passes.{kind.__name__}`"), ("runs in", _doors(kind))]
    if kind.for_regions:
        rows.append(("only if", "regions are compiled: `lower_regions.backend` is not `eager`"))
    rows.append(("requires", ", ".join(sorted(kind.requires)) or "nothing"))
    rows.append(("provides", ", ".join(sorted(kind.provides)) or "nothing that others require"))
    if issubclass(kind, DecidingPass):
        rows.append(("decides", "yes: a plan holds what it chose, and replays it"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def _options(kind: type[Pass]) -> Iterator[str]:
    """Its fields, where they can be set."""
    settings = getattr(Config(), kind.name, None)
    if not isinstance(settings, kind) or not fields(kind):
        return
    documents = field_documents(kind)
    rows = []
    for one in fields(kind):
        value = getattr(settings, one.name)
        shown = value.value if isinstance(value, Enum) else value
        text = " ".join(documents.get(one.name, "").split()).replace("|", "\\|")
        rows.append(f"| `{one.name}` | `{shown!r}` | {text} |")
    yield "## Options"
    yield f'Set by `options={{"{kind.name}": {{…}}}}`.'
    yield "\n".join(["| option | default | |", "|---|---|---|", *rows])


def _example(name: str) -> str:
    if name in PASSES:
        shown = PASSES[name]
        note = ""
        if shown.gloo:
            note = (
                "\n\nRanks in name only have no gloo, so that `fxzero inspect` shows nothing for "
                "them; this was run as if they had."
            )
        gloo = " over gloo" if shown.gloo else ""
        return f"{shown.says}{note}\n\n<!-- run{gloo}: {shown.command(name)} -->"
    if name in STAGED:
        return f"{STAGED[name]}\n\n<!-- python -->\n```python\n{IN_STAGES.format(name=name)}```"
    return ""


def _facts() -> dict[str, str]:
    """What each fact means, by the docstring below it."""
    (definition,) = ast.parse(inspect.getsource(Fact)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for one, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(one, ast.Assign) and isinstance(after, ast.Expr):
            assert isinstance(one.value, ast.Constant)
            assert isinstance(after.value, ast.Constant)
            found[str(one.value.value)] = str(after.value.value)
    return found
