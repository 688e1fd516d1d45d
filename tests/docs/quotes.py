"""Messages that pages quote without making them: they must stand in the code as they are quoted.

    <!-- says: fxzero/ranks/watch.py -->
    ```text
    rank … has stopped: nothing was heard of it for … s
    ```

An error that takes several processes, or a broken disk, is not made for a page. ``…`` is what the
code fills in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.docs.outputs import ROOT

_QUOTE = re.compile(r"^<!-- says: (?P<file>\S+) -->\n```text\n(?P<text>.*?)^```$", re.M | re.S)


def quotes(page: str) -> Iterator[tuple[str, str]]:
    """The file and each line of what a page quotes."""
    for found in _QUOTE.finditer(page):
        for line in found["text"].splitlines():
            yield found["file"], line


def is_said(file: str, line: str) -> bool:
    """Whether a text in a file has the pieces of a line, one behind the other."""
    pieces = [re.escape(piece) for piece in re.split(r"\s*…\s*", line.strip()) if piece]
    wanted = re.compile(".*?".join(pieces), re.S)
    return any(wanted.search(text) for text in _texts((ROOT / file).read_text(encoding="utf-8")))


def _texts(source: str) -> Iterator[str]:
    """Every string in a file; what an f-string fills in is ``…``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield "".join(map(str, parts))
