"""Keep a value for backward, or compute it again: the least time for each number of kept bytes.

    forward   a ─ b ─ c ─ d        kept: a, d       repeated: b = f(a), c = g(b)
                  └───────► backward reads b, c and d

Forward is split into segments where little crosses: what crosses is kept whatever else is decided,
so that backward repeats one segment at a time and never holds more than that beside what is kept.
Inside a segment a minimum cut finds what to keep at a price per byte (the project selection
problem, Picard 1976); all prices together give the segment's Pareto points of bytes and time.
Equal segments are solved once. Over segments the cheapest bytes go first, which is the greedy
order of a knapsack on convex fronts, and of equal ones those whose backward comes last; the last
segment, whose backward comes at once, is the last to be repeated. Each step of that order is a
level, from everything kept to the least that can be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import networkx as nx

TRIES = 64
"""Most branches of `fastest_within`."""
POINTS = 16
"""Most Pareto points of a segment."""
FINEST = 1 / 64
"""How far apart a segment's choices may lie, of everything that forward makes."""
MOST_BETWEEN = 8
"""Most choices between two points of a convex front."""
SMALLEST_SHARE = 1 / 512
"""Segments are tried down to this share of everything that forward makes."""


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
    """Whether it owns memory. Of a view the base is kept, of a list of tensors its parts."""


@dataclass(frozen=True)
class Closure:
    """What follows from a choice of what may be repeated."""

    repeated: tuple[int, ...]
    """Positions, ascending."""
    kept: tuple[int, ...]
    kept_bytes: int
    us: float


def closure(values: Sequence[Value], chosen: Collection[int]) -> Closure:
    """What is repeated and what is kept if these may be repeated.

    A chosen value is repeated only where backward, or something that is repeated, reads it.
    """
    chosen = set(chosen)
    needed = [value.is_needed for value in values]
    repeated: list[int] = []
    kept: list[int] = []
    for i in reversed(range(len(values))):
        if not needed[i]:
            continue
        value = values[i]
        if value.may_repeat and (i in chosen or not value.may_keep):
            repeated.append(i)
            for source in value.sources:
                needed[source] = True
        else:
            kept.append(i)
    return Closure(
        tuple(reversed(repeated)),
        tuple(reversed(kept)),
        sum(values[i].num_bytes for i in kept),
        math.fsum(values[i].us for i in repeated),
    )


def cheapest(values: Sequence[Value], us_per_byte: tuple[int, int]) -> Closure:
    """What is best at a price for kept bytes: the least sum of time and price.

    Args:
        us_per_byte: the price, as a fraction of two whole numbers: thousandths of microseconds by
            bytes.
    """
    price, per = us_per_byte
    network = nx.DiGraph()
    for i, value in enumerate(values):
        if value.may_keep:
            network.add_edge((i, 0), (i, 1), capacity=price * value.num_bytes)
        else:
            network.add_edge((i, 0), (i, 1))  # no capacity is an infinite one
        if value.may_repeat:
            network.add_edge("there", (i, 0), capacity=per * round(value.us * 1000))
        else:
            network.add_edge("there", (i, 0))
        for source in value.sources:
            network.add_edge((source, 1), (i, 0))
        if value.is_needed:
            network.add_edge((i, 1), "backward")
    if "backward" not in network or "there" not in network:
        return closure(values, ())
    try:
        _, (_, late) = nx.minimum_cut(
            network, "there", "backward", flow_func=nx.algorithms.flow.boykov_kolmogorov
        )
    except nx.NetworkXUnbounded:  # a part that can be neither kept nor repeated: by its parts
        return closure(values, ())
    return closure(values, [i for i in range(len(values)) if (i, 0) in late])


def pareto(values: Sequence[Value], start: Closure | None = None) -> list[Closure]:
    """The convex front of kept bytes and time, most bytes first.

    Args:
        start: the first point; the others keep less. By default everything is kept.
    """
    first = start or closure(values, ())
    most = 1 + sum(round(value.us * 1000) for value in values)
    last = cheapest(values, (most, 1))
    if last.kept_bytes >= first.kept_bytes:
        return [first]
    found = [first, last]

    def between(left: Closure, right: Closure) -> None:
        if len(found) >= POINTS:
            return
        fewer = left.kept_bytes - right.kept_bytes
        slower = round(right.us * 1000) - round(left.us * 1000)
        if fewer <= 0 or slower <= 0:
            return
        middle = cheapest(values, (slower, fewer))
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
    what to branch on. Exact unless it ends by `tries`, when it is the best that was found.
    """
    best: Closure | None = None
    left = tries
    stack = [tuple(values)]
    while stack and left:
        left -= 1
        node = stack.pop()
        more, less, bound = _dual(node, most_bytes)
        if less is None or (best is not None and bound >= best.us * (1 - 1e-9)):
            continue
        if best is None or less.us < best.us:
            best = less
        if more is None:
            continue
        differing = set(more.kept) - set(less.kept)
        if not differing:
            continue
        widest = max(differing, key=lambda i: (values[i].num_bytes, -i))
        value = node[widest]
        for other in (replace(value, may_keep=False), replace(value, may_repeat=False)):
            stack.append((*node[:widest], other, *node[widest + 1 :]))
    return best


def _dual(values: Sequence[Value], most_bytes: int) -> tuple[Closure | None, Closure | None, float]:
    """Two choices on either side of a bound that are best at one price, and what that price says.

    Returns:
        The choice that keeps more, None if the other is the best there is; the one within the
        bound, None if there is none; the least time that any choice within the bound can take.
    """
    more = closure(values, ())
    if more.kept_bytes <= most_bytes:
        return None, more, more.us
    less = cheapest(values, (1 + sum(round(v.us * 1000) for v in values), 1))
    if less.kept_bytes > most_bytes or any(not values[i].may_keep for i in less.kept):
        return None, None, math.inf
    while True:
        fewer = more.kept_bytes - less.kept_bytes
        slower = round(less.us * 1000) - round(more.us * 1000)
        if slower <= 0:
            return None, less, less.us
        middle = cheapest(values, (slower, fewer))
        if _cost(middle, slower, fewer) >= _cost(less, slower, fewer):
            return more, less, less.us - (most_bytes - less.kept_bytes) * slower / fewer / 1000
        if middle.kept_bytes <= most_bytes:
            less = middle
        else:
            more = middle


def _cost(point: Closure, price: int, per: int) -> int:
    return price * point.kept_bytes + per * round(point.us * 1000)


def _convex(points: Iterable[Closure]) -> list[Closure]:
    """The lower convex hull, from most bytes to least."""
    hull: list[Closure] = []
    for point in sorted(points, key=lambda p: (-p.kept_bytes, p.us)):
        if hull and point.kept_bytes == hull[-1].kept_bytes:
            continue
        while len(hull) >= 2 and _rate(hull[-2], hull[-1]) >= _rate(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _rate(more: Closure, less: Closure) -> float:
    """Microseconds for each byte that is not kept."""
    return (less.us - more.us) / (more.kept_bytes - less.kept_bytes)


@dataclass(frozen=True)
class Step:
    """One segment goes from one of its points to the next."""

    segment: int
    point: int
    """The number of the point that it goes to."""
    rate: float


@dataclass
class Levels:
    """What to repeat, from everything kept to the least that can be."""

    values: Sequence[Value]
    base: frozenset[int]
    """What is repeated at level 0."""
    fences: tuple[int, ...]
    """Where segments begin, but for the first."""
    chosen: list[list[frozenset[int]]] = field(default_factory=list)
    """By segment and point, the positions that may be repeated."""
    steps: list[Step] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps) + 1

    @property
    def main(self) -> int:
        """The last level at which nothing more of the last segment is repeated."""
        return sum(step.segment < len(self.fences) for step in self.steps)

    def at(self, level: int) -> frozenset[int]:
        """The positions that may be repeated at a level."""
        points = [0] * len(self.chosen)
        for step in self.steps[:level]:
            points[step.segment] = step.point
        every = (self.chosen[s][point] for s, point in enumerate(points))
        return frozenset().union(*every)

    @cached_property
    def kept_bytes(self) -> list[int]:
        """By level."""
        return [closure(self.values, self.at(level)).kept_bytes for level in range(len(self))]


def levels(values: Sequence[Value], base: Collection[int] = ()) -> Levels:
    """All levels of a forward, cheapest steps first.

    Args:
        base: what is repeated at level 0: it costs next to nothing.
    """
    fences = best_fences(values)
    found = Levels(values, frozenset(base), fences)
    crossing = crossers(values, fences)
    known: dict[tuple[object, ...], list[tuple[frozenset[int], float]]] = {}
    apart_bytes = max(FINEST * sum(value.num_bytes for value in values), 1)
    for number, (begin, end) in enumerate(_between(len(values), fences)):
        own = _segment(values, begin, end, crossing)
        cheap = frozenset(i - begin for i in base if begin <= i < end)
        key = (cheap, *own)
        if key not in known:
            known[key] = list(_points(own, cheap, apart_bytes))
        points = known[key]
        found.chosen.append([frozenset(i + begin for i in point) for point, _ in points])
        found.steps += [Step(number, i, rate) for i, (_, rate) in enumerate(points) if i]
    last = len(fences)
    # The last segment's backward comes at once, when all that is kept is there: to repeat it then
    # seldom lowers the peak.
    found.steps.sort(key=lambda step: (step.segment == last, step.rate, step.segment, step.point))
    return found


def _points(
    values: Sequence[Value], base: frozenset[int], apart_bytes: float
) -> Iterator[tuple[frozenset[int], float]]:
    """A segment's choices, the most bytes first, and the price at which each is taken.

    The convex front, and where its points lie far apart the best choices between them.
    """
    front = pareto(values, closure(values, base))
    yield base, 0.0
    for more, less in pairwise(front):
        rate = _rate(more, less)
        fewer = more.kept_bytes - less.kept_bytes
        count = min(int(fewer // apart_bytes) + 1, MOST_BETWEEN)
        last = more
        for i in range(1, count):
            middle = fastest_within(values, more.kept_bytes - fewer * i // count)
            if (
                middle is not None
                and last.kept_bytes > middle.kept_bytes > less.kept_bytes
                and last.us < middle.us < less.us
            ):
                last = middle
                yield frozenset(middle.repeated), rate
        yield frozenset(less.repeated), rate


def _segment(
    values: Sequence[Value], begin: int, end: int, crossing: Collection[int]
) -> list[Value]:
    """A segment's values by themselves: what comes from before it is there."""
    return [
        Value(
            "",
            value.num_bytes,
            round(value.us, 3),
            tuple(s - begin for s in value.sources if s >= begin),
            value.is_needed,
            value.may_repeat and i not in crossing,
            value.may_keep,
        )
        for i, value in enumerate(values[begin:end], begin)
    ]


def _between(count: int, fences: Sequence[int]) -> list[tuple[int, int]]:
    places = [0, *fences, count]
    return list(pairwise(places))


def owners(values: Sequence[Value]) -> list[int]:
    """By value, the position of the one whose memory it is in."""
    found: list[int] = []
    for i, value in enumerate(values):
        looks = not value.may_keep and not value.num_bytes and value.sources
        found.append(found[value.sources[0]] if looks else i)
    return found


def last_reads(values: Sequence[Value]) -> list[int]:
    """By value, the position of the last one that reads its memory."""
    owner = owners(values)
    found = list(range(len(values)))
    for i, value in enumerate(values):
        for source in value.sources:
            found[owner[source]] = i
    return found


def crossers(values: Sequence[Value], fences: Sequence[int]) -> frozenset[int]:
    """The values that are made before a fence and read behind it."""
    last = last_reads(values)
    found = set()
    places = iter([*fences, len(values) + 1])
    fence = next(places)
    for i, value in enumerate(values):
        while i >= fence:
            fence = next(places)
        if last[i] >= fence and value.may_keep:
            found.add(i)
    return frozenset(found)


def fences_for(values: Sequence[Value], most_bytes: float) -> tuple[int, ...]:
    """Split forward into segments that make at most so many bytes, where the least crosses."""
    last = last_reads(values)
    alive = [0] * (len(values) + 1)
    """By position, the bytes that were made before it and are read from it on."""
    for i, value in enumerate(values):
        if last[i] > i and value.num_bytes:
            alive[i + 1] += value.num_bytes
            alive[last[i] + 1] -= value.num_bytes
    for i in range(len(values)):
        alive[i + 1] += alive[i]
    found: list[int] = []
    begin = 0
    while True:
        made, best = 0, None
        for place in range(begin + 1, len(values)):
            made += values[place - 1].num_bytes
            if made > most_bytes and best is not None:
                break
            if made >= most_bytes / 2 and (best is None or alive[place] <= alive[best]):
                best = place
        else:
            return tuple(found)
        assert best is not None
        found.append(best)
        begin = best


def best_fences(values: Sequence[Value]) -> tuple[int, ...]:
    """The segments with which the least is held when everything that can be is repeated: what
    crosses, and the largest segment while it is repeated."""
    total = sum(value.num_bytes for value in values)
    best: tuple[float, tuple[int, ...]] | None = None
    seen: set[tuple[int, ...]] = set()
    share = 1.0
    while share >= SMALLEST_SHARE:
        fences = fences_for(values, total * share)
        share /= 2**0.5
        if fences in seen:
            continue
        seen.add(fences)
        crossing = crossers(values, fences)
        kept = sum(values[i].num_bytes for i in crossing)
        largest = max(
            sum(v.num_bytes for i, v in enumerate(values[a:b], a) if i not in crossing)
            for a, b in _between(len(values), fences)
        )
        if best is None or kept + largest < best[0]:
            best = (kept + largest, fences)
    return best[1] if best is not None else ()
