"""Which module a node was traced in."""

from __future__ import annotations

import re

from torch import fx

_ROOT = re.compile(r"^(L\['args'\]\[\d+\]|[LG]\['[^']*'\])")
"""What a path begins with: a decorated forward has the root module among its ``*args``."""
_QUOTED = re.compile(r"(?:\._modules)?\[(['\"])(.*?)\1\](?=[.\[]|$)")
"""A name that is an index, as Dynamo writes one that is no identifier: brackets may be in it."""
_NUMBERED = re.compile(r"\[(\d+)\]")


def module_path(node: fx.Node) -> str | None:
    """The innermost module that a node was traced in, as a path from the root module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = next(reversed(stack.values()))
    path = path[0] if isinstance(path, tuple) else path
    path = _ROOT.sub("", str(path))
    parts = _QUOTED.split(path)  # text, quote, name, text, …
    named = zip(parts[3::3], parts[2::3], strict=True)
    path = _numbered(parts[0]) + "".join(f".{name}{_numbered(text)}" for text, name in named)
    return path.replace("_orig_mod.", "").strip(".").removeprefix("_orig_mod")


def _numbered(text: str) -> str:
    return _NUMBERED.sub(r".\1", text)
