"""Marked blocks of a page: what stands in them is made by running what the mark says.

    <!-- run: fxzero options | head -n 5 -->       a console: the command, and what it prints
    <!-- run, exit 2: fxzero inspect nothing -->   one that fails
    <!-- run over gloo: fxzero inspect … -->       as if ranks in name only had gloo
    <!-- python -->                                the Python below, and behind it what it prints

The mark stays in the page and is invisible there. What a block held before does not matter.
"""

from __future__ import annotations

import re

from tests.docs import outputs

_FENCED = r"(?:\n```{kind}\n(?:.*?\n)??```)?"
_RUN = re.compile(
    r"^<!-- run(?P<gloo> over gloo)?(?:, exit (?P<code>\d))?: (?P<line>[^\n]+) -->$"
    + _FENCED.format(kind="(?:console|diff|python|yaml)"),
    re.M | re.S,
)
_PYTHON = re.compile(
    r"^<!-- python -->\n```python\n(?P<code>.*?\n)```(?:\n+```text\n(?:.*?\n)??```)?", re.M | re.S
)


def filled(page: str) -> str:
    """A page with every marked block made anew."""
    return _PYTHON.sub(_python, _RUN.sub(_console, page))


def _console(found: re.Match[str]) -> str:
    mark = found[0].partition("\n")[0]
    printed = outputs.run(
        found["line"], exit_code=int(found["code"] or 0), over_gloo=bool(found["gloo"])
    )
    return f"{mark}\n```console\n$ {found['line']}\n{printed}\n```"


def _python(found: re.Match[str]) -> str:
    printed = outputs.execute(found["code"])
    assert printed, f"Python of a page prints nothing:\n{found['code']}"
    return f"<!-- python -->\n```python\n{found['code']}```\n\n```text\n{printed}\n```"
