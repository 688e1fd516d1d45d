"""What each pass changed in a graph's text, as far as a page can show it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from fxzero.inspect.analysis import PassRow
from fxzero.inspect.detail import PassText

LONGEST_DIFF = 4000
"""Lines of a diff that a page holds: more is for `fxzero inspect TARGET --diff PASS`."""
LONGEST_LINE = 600
"""Characters of a line: a bucket of a thousand tensors would fill pages."""
CONTEXT = 2
"""Lines either side of a change, as `PassRecord.diff` has them."""
STARTS = ("capture", "cut")
"""Texts that no pass has left: where a row of passes begins."""


@dataclass(frozen=True)
class PassDiff:
    """What one pass did to one graph's text."""

    row: int
    """Which of the graph's passes it is."""
    side: str
    """``forward`` or ``backward`` of a pass that works on one side of a graph that was cut."""
    lines: tuple[str, ...]
    """A unified diff without its header; empty of a pass that changed nothing."""
    added: int
    removed: int
    left_out: int
    """Lines of the diff that are too many for a page."""


def pass_diffs(rows: Sequence[PassRow], texts: Sequence[PassText]) -> list[PassDiff]:
    """Compare the texts before and after every pass of one graph.

    Args:
        rows: the graph's passes, in the order in which they ran.
        texts: as `GraphDetail` has them; none where nobody asked for texts.
    """
    found: list[PassDiff] = []
    cuts = [text.name for text in texts].count("cut")
    sides = iter(("forward", "backward") if cuts > 1 else ("",) * cuts)
    side = ""
    for before, after in pairwise(texts):
        if after.name in STARTS:
            side = next(sides, "")
        elif len(found) < len(rows) and rows[len(found)].name == after.name:
            found.append(_diff(len(found), side, before.text, after.text))
    return found


def _diff(row: int, side: str, before: str, after: str) -> PassDiff:
    if before == after:
        return PassDiff(row, side, (), 0, 0, 0)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=CONTEXT)
    every = [_short(line) for line in islice(lines, 2, None)]  # behind the two lines of header
    return PassDiff(
        row=row,
        side=side,
        lines=tuple(every[:LONGEST_DIFF]),
        added=sum(line.startswith("+") for line in every),
        removed=sum(line.startswith("-") for line in every),
        left_out=max(0, len(every) - LONGEST_DIFF),
    )


def _short(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    return f"{line[:half]} … {line[-half:]}"
