"""Parts of a step as lines of text: around a node, of a module, and lane by lane.

Twenty thousand nodes are no reading: what is asked for is shown, and layers that are alike once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby

from fxzero.errors import ConfigError, nearest
from fxzero.graph import Lane
from fxzero.inspect.detail import GraphDetail, NodeRow
from fxzero.inspect.explain.view import View
from fxzero.inspect.units import duration

AROUND = 10
"""Nodes before, and behind."""
COLUMNS = 96
"""Of a lane's picture."""


def around(view: View, name: str) -> list[str]:
    """A node, with what stands before and behind it in launch order; for each piece that has one of
    that name where the step has none."""
    rows = [row for row in view.detail.nodes if row.name == name]
    rows = [row for row in rows if not row.piece] or rows
    return [line for row in rows for line in _around(view, row)]


def _around(view: View, row: NodeRow) -> Iterator[str]:
    body = [other for other in view.detail.nodes if other.piece == row.piece]
    place = body.index(row)
    where = f"in the piece {row.piece}" if row.piece else "in launch order"
    yield f"graph {view.graph}, {where}, nodes {max(place - AROUND, 0)} to {place + AROUND}"
    for other in body[max(place - AROUND, 0) : place + AROUND + 1]:
        mark = "→" if other is row else " "
        when = "" if other.start_us is None else duration(other.start_us)
        yield f"{mark} {when:>10}  {other.text}"


def of_modules(view: View, pattern: str) -> list[str]:
    """The nodes of modules, layers that follow each other and are alike once.

    Args:
        pattern: of names, ``blocks.*.mlp``; what is inside of one that fits is shown too.
    """
    by_module: dict[str, list[NodeRow]] = {}
    for row in view.inside(""):
        name = _fitting(row.module or row.layer, pattern)
        if name:
            by_module.setdefault(name, []).append(row)
    lines = []
    for _, group in groupby(by_module.items(), key=lambda item: tuple(map(_kind, item[1]))):
        members = list(group)
        first, rows = members[0]
        alike = f" … {members[-1][0]} ({len(members)} alike)" if len(members) > 1 else ""
        lines.append(f"graph {view.graph}, {first}{alike}: {len(rows)} nodes")
        for row in rows:
            lines.append(f"  {row.phase:<9} {duration(row.us):>10}  {row.text}")
            if row.source:
                lines.append(f"  {'':<9} {'':>10}  ↳ {row.source}")
    return lines


def _fitting(name: str, pattern: str) -> str:
    """The module around one, itself included, whose name fits a pattern; the outermost."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    depth = pattern.count(".") + 1
    fits = (p for p in prefixes if p.count(".") + 1 == depth)
    return next((p for p in fits if p == pattern or fnmatchcase(p, pattern)), "")


def _kind(row: NodeRow) -> tuple[str, str, str, int]:
    """What is equal of nodes that do the same for two layers."""
    return row.operator, row.phase, row.role, row.num_bytes


def lanes(detail: GraphDetail) -> list[str]:
    """The simulated step as a picture: a row a lane, where it is busy; and where compute waits."""
    end_us = max((span.start_us + span.us for span in detail.spans), default=0.0)
    if not end_us:
        return [f"graph {detail.graph}: nothing takes time"]
    names = [lane.value for lane in Lane if any(s.lane == lane.value for s in detail.spans)]
    width = max(map(len, [*names, "waits"]))
    lines = [f"graph {detail.graph}, {duration(end_us)}, {duration(end_us / COLUMNS)} a column"]
    for name in names:
        spans = [(s.start_us, s.us) for s in detail.spans if s.lane == name]
        busy_us = sum(s.us * s.runs for s in detail.spans if s.lane == name)
        lines.append(f"{name:>{width}} {_picture(spans, end_us)} {duration(busy_us)}")
    stalls = [(stall.start_us, stall.us) for stall in detail.stalls]
    waits_us = sum(us for _, us in stalls)
    lines.append(f"{'waits':>{width}} {_picture(stalls, end_us)} {duration(waits_us)}")
    return lines


_SHADES = " ░▒▓█"


def _picture(spans: list[tuple[float, float]], end_us: float) -> str:
    """Darker where more of a column's time is taken."""
    taken = [0.0] * COLUMNS
    column_us = end_us / COLUMNS
    for start_us, us in spans:
        until = start_us + us
        column = min(int(start_us / column_us), COLUMNS - 1)
        while column < COLUMNS and column * column_us < until:
            begin, end = column * column_us, (column + 1) * column_us
            taken[column] += min(until, end) - max(start_us, begin)
            column += 1
    shares = (min(us / column_us, 1.0) for us in taken)
    return "".join(_SHADES[math.ceil(share * (len(_SHADES) - 1))] for share in shares)


def check_known(views: list[View], around_node: str | None, pattern: str | None) -> None:
    """See that a node is there, and that a module fits.

    Raises:
        ConfigError: there is none.
    """
    rows = [row for view in views for row in view.detail.nodes]
    if around_node is not None and not any(row.name == around_node for row in rows):
        close = nearest(around_node, {row.name for row in rows})
        raise ConfigError(f"--around: no node is called {around_node!r}: {close}")
    if pattern is not None and not any(of_modules(view, pattern) for view in views):
        known = sorted({row.module or row.layer for row in rows} - {""})
        close = nearest(pattern, known)
        raise ConfigError(f"--module: no module fits {pattern!r}: {close}")
