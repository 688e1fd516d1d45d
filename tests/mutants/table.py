"""docs/mutants.md: the table fault → catcher, made of `tests.mutants.faults`."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutants.fault import ROOT, Fault

DOCS = ROOT / "docs" / "mutants.md"

_TITLE = """\
# Deliberate faults, and what catches them

{count} faults in passes and runtime that would train something else in silence, hang, or read
freed memory. `verify` catches {verified} of them when the graph is compiled, before anything runs
(the graphs are in `tests/mutants/graphs.py`, tried by `pytest tests/mutants`); for each of the
others a test fails. `python -m tests.mutants` gives every fault to the imported modules and runs
its catcher; `--write` writes this file anew from `tests/mutants/faults/`.

| fault | in | caught by |
|---|---|---|
"""


def document(faults: Sequence[Fault]) -> str:
    """The whole file."""
    verified = sum(fault.graph is not None for fault in faults)
    rows = [f"| {f.name} | `{f.file}` | {_catcher(f)} |" for f in faults]
    return _TITLE.format(count=len(faults), verified=verified) + "\n".join(rows) + "\n"


def _catcher(fault: Fault) -> str:
    if fault.graph is not None:
        return f"`verify`: {fault.graph}"
    return f"`{fault.caught_by.removeprefix('tests/')}`"
