"""Keep a value for backward, or compute it again: the least time for each number of kept bytes.

    forward   a ─ b ─ c ─ d        kept: a, d       repeated: b = f(a), c = g(b)
                  └───────► backward reads b, c and d

A minimum cut finds what to keep at a price per byte (the project selection problem, Picard 1976);
all prices together give the Pareto points of bytes and time. What is kept is kept whole, or where
several ranks have it, as this rank's part of it, which takes less memory and a gather; at a price
per byte the cheaper of the two is what keeping it costs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fxzero.schedule.minimum_cut import SINK, SOURCE, Edge, MinimumCut

TRIES = 64
"""Most branches of `fastest_within`."""
NEAR = 0.01
"""How much less time a choice must promise to be looked at."""
POINTS = 16
"""Most Pareto points of a segment."""


@dataclass(frozen=True)
class Value:
    """Something that forward computes."""

    name: str
    num_bytes: int
    """What keeping it takes; 0 of a view, whose base is kept."""
    us: float
    """What computing it again takes."""
    sources: tuple[int, ...] = ()
    """Positions of the values that it is computed from. What is there anyway is not named."""
    is_needed: bool = False
    """Whether backward reads it."""
    may_repeat: bool = True
    may_keep: bool = True
    """Whether it may be kept whole. Of a view the base is kept, of a list of tensors its parts."""
    part_bytes: int = 0
    """What keeping this rank's part of it takes."""
    part_us: float | None = None
    """What gathering its parts again takes; None if no other rank has it."""
    keep_us: float = 0.0
    """What keeping it takes: writing and reading what would be fused into its readers."""
    repeat_bytes: int = 0
    """What it holds once it is repeated; 0 if it is fused into its readers then."""


@dataclass(frozen=True)
class Closure:
    """What follows from a choice of what may be repeated."""

    repeated: tuple[int, ...]
    """Positions, ascending."""
    kept: tuple[int, ...]
    in_parts: frozenset[int]
    """Of what is kept."""
    kept_bytes: int
    us: float
    """What repeating takes."""
    keep_us: float = 0.0
    """What keeping takes."""

    @property
    def ways(self) -> dict[int, bool]:
        """What is kept, and whether in parts."""
        return {i: i in self.in_parts for i in self.kept}


def closure(
    values: Sequence[Value], chosen: Collection[int], in_parts: Collection[int] = ()
) -> Closure:
    """What is repeated and what is kept if these may be repeated, and those kept in parts.

    A chosen value is repeated only where backward, or something that is repeated, reads it.
    """
    chosen = set(chosen)
    needed = [value.is_needed for value in values]
    repeated: list[int] = []
    kept: list[int] = []
    parts: set[int] = set()
    for i in reversed(range(len(values))):
        if not needed[i]:
            continue
        value = values[i]
        has_parts = value.part_us is not None
        if value.may_repeat and (i in chosen or not (value.may_keep or has_parts)):
            repeated.append(i)
            for source in value.sources:
                needed[source] = True
            continue
        kept.append(i)
        if has_parts and (i in in_parts or not value.may_keep):
            parts.add(i)
    return Closure(
        tuple(reversed(repeated)),
        tuple(reversed(kept)),
        frozenset(parts),
        sum(values[i].part_bytes if i in parts else values[i].num_bytes for i in kept),
        math.fsum([*(values[i].us for i in repeated), *(values[i].part_us or 0 for i in parts)]),
        math.fsum(values[i].keep_us for i in kept if i not in parts),
    )


class Prices:
    """Values, and what is best to do with them at a price for kept bytes."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.values = values
        edges: list[Edge] = []
        uncuttable: list[Edge] = []
        for i, value in enumerate(values):
            made, there = 2 * i + 2, 2 * i + 3
            may_stay = value.may_keep or value.part_us is not None
            (edges if may_stay else uncuttable).append((made, there))
            (edges if value.may_repeat else uncuttable).append((SOURCE, made))
            uncuttable += [(2 * source + 3, made) for source in value.sources]
            if value.is_needed:
                uncuttable.append((there, SINK))
        self._cut = MinimumCut(2 * len(values) + 2, edges, uncuttable)

    def cheapest(self, price: int, per: int) -> Closure:
        """The least sum of time and price.

        Args:
            price: thousandths of microseconds …
            per: … for so many bytes.
        """
        values = self.values
        if not self._cut.is_possible:  # a part that can be neither kept nor repeated: by its parts
            return closure(values, ())
        capacities = []
        in_parts = set()
        for i, value in enumerate(values):
            whole = price * value.num_bytes if value.may_keep else None
            if value.part_us is not None:
                part = price * value.part_bytes + per * _thousandths(value.part_us)
                if whole is None or part < whole:
                    whole = part
                    in_parts.add(i)
            if whole is not None:
                capacities.append(whole)
            if value.may_repeat:
                capacities.append(per * _thousandths(value.us))
        late = self._cut.before_sink(capacities)
        return closure(values, [i for i in range(len(values)) if 2 * i + 2 in late], in_parts)

    def least(self) -> Closure:
        """What keeps the fewest bytes: at a price at which nothing is kept that can be repeated."""
        beyond_any = sum(_thousandths(v.us) + _thousandths(v.part_us or 0) for v in self.values)
        return self.cheapest(1 + beyond_any, 1)


def pareto(values: Sequence[Value], start: Closure | None = None) -> list[Closure]:
    """The convex front of kept bytes and time, most bytes first.

    Args:
        start: the first point; the others keep less. By default everything is kept.
    """
    first = start or closure(values, ())
    prices = Prices(values)
    last = prices.least()
    if last.kept_bytes >= first.kept_bytes:
        return [first]
    found = [first, last]

    def between(left: Closure, right: Closure) -> None:
        if len(found) >= POINTS:
            return
        fewer = left.kept_bytes - right.kept_bytes
        slower = _thousandths(right.us) - _thousandths(left.us)
        if fewer <= 0 or slower <= 0:
            return
        middle = prices.cheapest(slower, fewer)
        if middle.kept_bytes >= left.kept_bytes or middle.kept_bytes <= right.kept_bytes:
            return
        gain = _cost(left, slower, fewer) - _cost(middle, slower, fewer)
        if gain <= 0:
            return
        found.append(middle)
        between(left, middle)
        between(middle, right)

    between(first, last)
    return _convex(found)


def fastest_within(values: Sequence[Value], most_bytes: int, tries: int = TRIES) -> Closure | None:
    """The least time that keeps at most so many bytes; None if that is impossible.

    Branch and bound: a price that is paid for all bytes bounds what any choice can take (the
    Lagrangian dual, Geoffrion 1974), and the two choices that are best at that price differ in
    what to branch on. Within `NEAR` of the optimum, unless it ends by `tries`, when it is the best
    that was found.
    """
    best: Closure | None = None
    left = tries
    stack = [tuple(values)]
    while stack and left:
        left -= 1
        node = stack.pop()
        more, less, bound = _dual(node, most_bytes)
        if less is None or (best is not None and bound >= best.us * (1 - NEAR)):
            continue
        if best is None or less.us < best.us:
            best = less
        if more is None:
            continue
        apart = {i: _ways_apart(node[i]) for i in _differing(more, less)}
        open_ones = [i for i, ways in apart.items() if len(ways) > 1]
        if not open_ones:
            continue
        widest = max(open_ones, key=lambda i: (values[i].num_bytes, -i))
        for other in apart[widest]:
            stack.append((*node[:widest], other, *node[widest + 1 :]))
    return best


def _differing(one: Closure, other: Closure) -> list[int]:
    """What is kept in one choice, and not, or otherwise, in another one."""
    mine, theirs = one.ways, other.ways
    return [i for i in sorted({*mine, *theirs}) if mine.get(i) != theirs.get(i)]


def _ways_apart(value: Value) -> list[Value]:
    """The same value, once for each of its ways: repeated, kept whole, kept in parts."""
    found = []
    if value.may_repeat:
        found.append(replace(value, may_keep=False, part_us=None))
    if value.part_us is not None:
        found.append(replace(value, may_keep=False, may_repeat=False))
    if value.may_keep:
        found.append(replace(value, may_repeat=False, part_us=None))
    return found


def _dual(values: Sequence[Value], most_bytes: int) -> tuple[Closure | None, Closure | None, float]:
    """Two choices on either side of a bound that are best at one price, and what that price says.

    Returns:
        The choice that keeps more, None if the other is the best there is; the one within the
        bound, None if there is none; the least time that any choice within the bound can take.
    """
    more = closure(values, ())
    if more.kept_bytes <= most_bytes:
        return None, more, more.us
    prices = Prices(values)
    less = prices.least()
    if less.kept_bytes > most_bytes or any(
        not values[i].may_keep for i in less.kept if i not in less.in_parts
    ):
        return None, None, math.inf
    while True:
        fewer = more.kept_bytes - less.kept_bytes
        slower = _thousandths(less.us) - _thousandths(more.us)
        if slower <= 0:
            return None, less, less.us
        middle = prices.cheapest(slower, fewer)
        if _cost(middle, slower, fewer) >= _cost(less, slower, fewer):
            return more, less, less.us - (most_bytes - less.kept_bytes) * slower / fewer / 1000
        if middle.kept_bytes <= most_bytes:
            less = middle
        else:
            more = middle


def _cost(point: Closure, price: int, per: int) -> int:
    return price * point.kept_bytes + per * _thousandths(point.us)


def _thousandths(us: float) -> int:
    """Whole numbers, which add up alike in any order."""
    return round(us * 1000)


def _convex(points: Iterable[Closure]) -> list[Closure]:
    """The lower convex hull, from most bytes to least."""
    hull: list[Closure] = []
    for point in sorted(points, key=lambda p: (-p.kept_bytes, p.us)):
        if hull and point.kept_bytes == hull[-1].kept_bytes:
            continue
        while len(hull) >= 2 and rate(hull[-2], hull[-1]) >= rate(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def rate(more: Closure, less: Closure) -> float:
    """Microseconds for each byte that is not kept."""
    return (less.us - more.us) / (more.kept_bytes - less.kept_bytes)
