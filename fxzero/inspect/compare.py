"""Two steps side by side: which decisions differ, and what that does to time and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxzero.compiler.pipelines import DECIDING
from fxzero.compiler.plan import Plan
from fxzero.inspect.analysis import Analysis
from fxzero.settings import plain

NAMES = ("name", "value", "place", "bucket", "key")
"""Fields by one of which the items of a decision's list are told apart."""


@dataclass(frozen=True)
class Figure:
    """One number of both; its unit is the end of its name."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Difference:
    """Something that is not the same."""

    where: str
    """``settings``, or the pass that decided."""
    what: str
    """Which of its fields, and which item of a list."""
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """Two steps."""

    figures: tuple[Figure, ...]
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as what `json` can write."""
        found: dict[str, Any] = plain(self)
        return found


@dataclass(frozen=True)
class Decided:
    """One side: what was decided, and what it comes to."""

    settings: Mapping[str, Any]
    decisions: tuple[Mapping[str, Any], ...]
    """By graph, by pass."""
    figures: Mapping[str, float]
    is_plan: bool = False
    """Whether it knows no more than a plan: stages and ranks are not in it."""

    @staticmethod
    def of(analysis: Analysis) -> Decided:
        """An analysis' side; with details."""
        rows = analysis.schedules
        figures = {
            "step_us": sum(row.makespan_us for row in rows),
            "exposed_us": sum(row.exposed_us for row in rows),
            "peak_bytes": max((row.peak_bytes for row in rows), default=0),
            "host_bytes": max((row.host_bytes for row in rows), default=0),
            "disk_bytes": max((row.disk_bytes for row in rows), default=0),
            "sent_bytes": analysis.sent_bytes(),
            "gathered_bytes": analysis.num_bytes("gather"),
            "reduced_bytes": analysis.num_bytes("reduce"),
            "nodes": sum(1 for detail in analysis.details for row in detail.nodes),
        }
        settings = _compared(analysis.settings)
        settings |= {"zero": analysis.zero, "world_size": analysis.world_size}
        return Decided(settings, tuple(detail.decisions for detail in analysis.details), figures)

    @staticmethod
    def of_plan(path: Path) -> Decided:
        """A plan file's side: its figures are those that its schedule was chosen by.

        Raises:
            ConfigError: it is no plan.
        """
        found = Plan.read(str(path), DECIDING)
        decisions = tuple(found.graphs.values())
        orders = [one.get("prefetch", {}) for one in decisions]
        figures = {
            name: sum(order.get(name) or 0.0 for order in orders)
            for name in ("step_us", "exposed_us", "held_bytes")
        }
        return Decided(_compared(found.settings), decisions, figures, is_plan=True)


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that decide nothing."""
    return {name: v for name, v in settings.items() if name not in ("dump", "keep_text", "plan")}


def compare(before: Decided, after: Decided) -> Comparison:
    """What is not the same; figures that only one has are left out."""
    figures = tuple(
        Figure(name, before.figures[name], after.figures[name])
        for name in before.figures
        if name in after.figures and (before.figures[name] or after.figures[name])
    )
    mine, theirs = before.settings, after.settings
    if before.is_plan or after.is_plan:
        mine = {name: value for name, value in mine.items() if name in theirs}
        theirs = {name: value for name, value in theirs.items() if name in mine}
    found = list(_differences("settings", "", mine, theirs))
    several = len(before.decisions) > 1 or len(after.decisions) > 1
    if len(before.decisions) != len(after.decisions):
        counts = str(len(before.decisions)), str(len(after.decisions))
        found.append(Difference("graphs", "number", *counts))
    for number, (one, other) in enumerate(zip(before.decisions, after.decisions, strict=False)):
        for name in dict.fromkeys((*one, *other)):
            where = f"graph {number} {name}" if several else name
            found += _differences(where, "", one.get(name), other.get(name))
    return Comparison(figures, tuple(found))


def _differences(where: str, what: str, before: Any, after: Any) -> Iterator[Difference]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            inner = f"{what}.{key}" if what else str(key)
            yield from _differences(where, inner, before.get(key), after.get(key))
    elif _is_list(before) and _is_list(after):
        yield from _of_lists(where, what, before, after)
    else:
        yield Difference(where, what, _shown(before), _shown(after))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _of_lists(
    where: str, what: str, before: Sequence[Any], after: Sequence[Any]
) -> Iterator[Difference]:
    """Items by name where they have one; of texts, what only one has, or the first that moved."""
    name = next((n for n in NAMES if _all_have(before, n) and _all_have(after, n)), None)
    if name is not None and (before or after):
        one, other = ({str(item[name]): item for item in side} for side in (before, after))
        for key in dict.fromkeys((*one, *other)):
            yield from _differences(where, f"{what}[{key}]", one.get(key), other.get(key))
        return
    mine, theirs = ([_shown(item) for item in side] for side in (before, after))
    gone = [item for item in mine if item not in set(theirs)]
    new = [item for item in theirs if item not in set(mine)]
    if gone or new:
        yield Difference(where, what, ", ".join(gone) or "—", ", ".join(new) or "—")
        return
    place = next(
        (i for i, pair in enumerate(zip(mine, theirs, strict=False)) if len({*pair}) > 1), 0
    )
    yield Difference(
        where,
        f"{what}, from place {place} on",
        " → ".join(mine[place : place + 4]),
        " → ".join(theirs[place : place + 4]),
    )


def _all_have(items: Sequence[Any], name: str) -> bool:
    return all(isinstance(item, Mapping) and name in item for item in items)


LONGEST = 160
"""Of a value that is shown."""


def _shown(value: Any) -> str:
    if value is None:
        return "—"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
