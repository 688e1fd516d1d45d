"""Where commands print to: names and messages come from models, files and dumps, and what controls
a terminal is shown and not sent to it."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.text import Text

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 but for tabs and ends of lines."""


def visible(text: str) -> str:
    r"""A text with its control characters as Python writes them: ``\x1b``."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


class VisibleConsole(Console):
    """A console that sends no control characters but its own."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Make what is printed of a text: of every cell of a table, too."""
        return super().render_str(visible(text), **settings)


def console() -> Console:
    """Where tables go: a pipe has no width, and what may be searched is not folded."""
    found = VisibleConsole()
    return found if found.is_terminal else VisibleConsole(width=200)


def errors() -> Console:
    """Where sentences about errors go, unfolded."""
    return VisibleConsole(stderr=True, soft_wrap=True)
