"""Rows as columns, and every string once: a page of fifty thousand rows stays small and quick.

[Span("mm", "h.0", 2.0), Span("mm", "h.1", 3.5)]
→   {"name": [0, 0], "layer": [1, 2], "us": [2.0, 3.5]}    with strings ["mm", "h.0", "h.1"]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

DIGITS = 3
"""Of microseconds: what a page shows is never finer than a nanosecond."""


class Strings:
    """Numbers for strings, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """The string's number."""
        return self._numbers.setdefault(text, len(self._numbers))

    def every(self) -> list[str]:
        """All of them, by number."""
        return list(self._numbers)


def columns(
    strings: Strings, rows: Iterable[Any], kind: type[Any], leave_out: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """Dataclasses of one kind as a list for each field.

    Args:
        leave_out: fields that a page has no use for.
    """
    names = [f.name for f in dataclasses.fields(kind) if f.name not in leave_out]
    found: dict[str, list[Any]] = {name: [] for name in names}
    for row in rows:
        for name in names:
            found[name].append(_cell(strings, getattr(row, name)))
    return found


def _cell(strings: Strings, value: Any) -> Any:
    if isinstance(value, str):
        return strings(value)
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, tuple):
        return [_cell(strings, part) for part in value]
    return value
