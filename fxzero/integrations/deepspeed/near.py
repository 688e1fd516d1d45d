"""A hint for a misspelt name, in a line of its own that stays one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

FEW = 12
"""Names that are listed where none is near."""


def near(word: str, known: Iterable[str]) -> str:
    """``did you mean 'stage'?``; where nothing is near what there is, or where that is listed."""
    names = sorted(known)
    same = [name for name in names if name.lower() == word.lower()]
    close = same or difflib.get_close_matches(word, names, n=2, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if len(names) <= FEW:
        return f"there are {', '.join(names)}."
    return f"none of its {len(names)} names is near it."
