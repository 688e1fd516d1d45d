"""`examples/tour.py` as a page: its comments as text, its code, and what each part prints."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
from collections.abc import Iterator

from tests.docs.outputs import ROOT, masked

TOUR = ROOT / "examples" / "tour.py"

_HEAD = """\
# A tour: ZeRO-3 pass by pass

This page is `examples/tour.py`, run from top to bottom.

"""


def page() -> str:
    """The whole page."""
    source = TOUR.read_text(encoding="utf-8")
    tree = ast.parse(source)
    title, _, rest = (ast.get_docstring(tree) or "").partition("\n\n")
    assert title, "the tour says what it is"
    lines = source.splitlines()
    first = tree.body[1].lineno - 1  # behind the docstring
    parts = [*_HEAD.replace("This page", f"{rest}\n\nThis page").splitlines()]
    names: dict[str, object] = {"__name__": "__main__", "__file__": str(TOUR)}
    for is_text, numbers in itertools.groupby(
        range(first, len(lines)), key=lambda n: lines[n].startswith("#")
    ):
        chosen = list(numbers)
        if is_text:
            parts += [lines[n].removeprefix("#").removeprefix(" ") for n in chosen]
        else:
            parts += _code(lines, chosen, names)
    return "\n".join(parts).strip("\n") + "\n"


def _code(lines: list[str], numbers: list[int], names: dict[str, object]) -> Iterator[str]:
    """Some lines of code, run in the namespace of those before, and what they print."""
    shown = "\n".join(lines[n] for n in numbers).strip("\n")
    if not shown:
        yield ""
        return
    code = "\n" * numbers[0] + "\n".join(lines[n] for n in numbers)  # errors name its lines
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(TOUR), "exec", dont_inherit=True), names)
    yield from ("", "```python", *shown.splitlines(), "```", "")
    if text := masked(printed.getvalue()).strip("\n"):
        yield from ("```text", *text.splitlines(), "```", "")
