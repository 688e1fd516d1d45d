"""Data, styles and scripts as one HTML file that needs nothing else, and may ask for nothing else.

Names and texts come from whoever wrote the model. In the file they are base64 of compressed JSON,
in which no character means anything to HTML; the page's title is escaped; on the page all are put
as text. Should one ever be taken for markup, the page's own policy lets no other script run and
nothing be loaded: scripts and styles are known by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "dom",
    "units",
    "data",
    "table",
    "window",
    "timeline",
    "memory",
    "node",
    "overview",
    "traffic",
    "blocks",
    "diffs",
    "measured",
    "compare",
    "main",
)
"""In the order in which they build on each other; together they are one function's body."""
DATA = re.compile(r'<script type="application/json" id="data">"([A-Za-z0-9+/=]*)"</script>')


def page(data: dict[str, Any]) -> str:
    """The page, with what `fxzero.inspect.report.report_data` chose."""
    style = _asset("style.css")
    script = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();\n'
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), default=str).encode(), mtime=0)
    parts = {
        "title": html.escape(f"{data['title']} · fxzero report"),
        "policy": html.escape(
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "data": base64.b64encode(packed).decode(),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def data_of(text: str) -> Any:
    """What is in a page, read back."""
    found = DATA.search(text)
    assert found is not None, "no page of ours"
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


@cache
def _asset(name: str) -> str:
    return (files("fxzero.inspect.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
