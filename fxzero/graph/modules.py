"""Which module a node was traced in."""

from __future__ import annotations

import re

from torch import fx

_ROOT = re.compile(r"^(L\['args'\]\[\d+\]|[LG]\['[^']*'\])\.?")
"""What a path begins with: a decorated forward has the root module among its ``*args``."""
_INDEXED = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def module_path(node: fx.Node) -> str | None:
    """The innermost module that a node was traced in, as a path from the root module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = next(reversed(stack.values()))
    path = path[0] if isinstance(path, tuple) else path
    path = _INDEXED.sub(r".\1", _ROOT.sub("", str(path)))
    return path.replace("_orig_mod.", "").removeprefix("_orig_mod").strip(".")
