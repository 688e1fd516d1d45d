"""Text that every machine has: what Python's standard library says of itself."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "argparse bisect calendar configparser csv datetime difflib fractions heapq inspect logging "
    "pathlib random shutil statistics string tempfile textwrap threading tokenize typing zipfile"
).split()


def docstrings() -> Iterator[tuple[str, str]]:
    """Signatures of functions, and the first line of what they say of themselves."""
    folder = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        path = folder / f"{module}.py"
        path = path if path.is_file() else folder / module / "__init__.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                said = (ast.get_docstring(node) or "").partition("\n")[0]
                if said:
                    yield f"{node.name}({', '.join(a.arg for a in node.args.args)})", said
