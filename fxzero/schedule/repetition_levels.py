"""What to repeat, from everything kept to the least that can be: level by level.

Forward is split into segments where little crosses: what crosses is never repeated, so that
backward repeats one segment at a time and holds no more than that beside what is kept. A segment's
Pareto points come from minimum cuts (`fxzero.schedule.repetition`); equal segments are solved
once. Over segments the cheapest bytes go first, which is the greedy order of a knapsack on convex
fronts, and of equal ones those whose backward comes last; the last segment, whose backward comes
at once, is the last to be repeated. Each step of that order is a level.

Behind them come levels of fewer, longer segments, everything in them repeated: less is kept, more
is repeated at once. Which of the two holds more, only a simulation of the whole step tells. Last
come choices that somebody could make by hand, as they would come without a budget: no budget that
one of them keeps is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fxzero.schedule.candidates import Candidate, Read, candidates
from fxzero.schedule.repetition import Closure, Value, closure, fastest_within, pareto, rate
from fxzero.schedule.spare import keep_again

FINEST = 1 / 64
"""How far apart a segment's choices may lie, of everything that forward makes."""
MOST_BETWEEN = 8
"""Most choices between two points of a convex front."""
SMALLEST_SHARE = 1 / 512
"""Segments are tried down to this share of everything that forward makes."""


@dataclass(frozen=True)
class Chosen:
    """Positions of values by what becomes of them."""

    repeated: frozenset[int] = frozenset()
    """What may be repeated, where it is needed."""
    in_parts: frozenset[int] = frozenset()
    """Of what is kept."""

    def behind(self, begin: int) -> Chosen:
        """The same of values that stand so much later."""
        return Chosen(
            frozenset(i + begin for i in self.repeated),
            frozenset(i + begin for i in self.in_parts),
        )


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
    """What is repeated at every level where it does not cross a fence: it costs next to nothing."""
    fences: tuple[int, ...]
    """Where segments begin, but for the first."""
    chosen: list[list[Chosen]] = field(default_factory=list)
    """By segment and point."""
    steps: list[Step] = field(default_factory=list)
    longer: list[Chosen] = field(default_factory=list)
    """The levels behind all steps: first those of longer segments, the shortest first."""
    always: frozenset[int] = frozenset()
    """What is repeated at every level but those by hand, whatever it crosses."""
    num_by_hand: int = 0
    """How many levels at the end are choices by hand."""
    reads: Sequence[Read] = ()
    """By value, when backward reads it; nothing if that is not known."""
    _closures: dict[tuple[int, int], Closure] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps) + 1 + len(self.longer)

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """A short list of levels and of what may be kept again there, the fastest first; nothing
        if it is not known when backward reads."""
        return candidates(self, self.reads) if self.reads else ()

    @property
    def main(self) -> int:
        """The last level at which nothing more of the last segment is repeated."""
        return sum(step.segment < len(self.fences) for step in self.steps)

    @property
    def last(self) -> int:
        """The level after all steps."""
        return len(self.steps)

    @property
    def by_hand(self) -> int:
        """The first of the levels that somebody could choose by hand; as many as there are levels
        if there is none."""
        return len(self) - self.num_by_hand

    def at(self, level: int, spare_bytes: int = 0) -> Chosen:
        """What becomes of all values at a level.

        Args:
            spare_bytes: what may be kept again of what the level repeats.
        """
        chosen = self._at(level)
        if not spare_bytes:
            return chosen
        kept = keep_again(self.values, self.closure_at(level), spare_bytes)
        return Chosen(chosen.repeated - kept, chosen.in_parts - kept)

    def _at(self, level: int) -> Chosen:
        if level > self.last:
            return self.longer[level - self.last - 1]
        points = [0] * len(self.chosen)
        for step in self.steps[:level]:
            points[step.segment] = step.point
        every = [self.chosen[s][point] for s, point in enumerate(points)]
        return Chosen(
            self.always.union(*(chosen.repeated for chosen in every)),
            frozenset().union(*(chosen.in_parts for chosen in every)),
        )

    def closure_at(self, level: int, spare_bytes: int = 0) -> Closure:
        """What is repeated and kept at a level: see `at`."""
        key = (level, spare_bytes)
        if key not in self._closures:
            at = self.at(level, spare_bytes)
            self._closures[key] = closure(self.values, at.repeated, at.in_parts)
        return self._closures[key]

    def kept_bytes(self, level: int) -> int:
        """What is kept at a level."""
        return self.closure_at(level).kept_bytes

    def us(self, level: int, spare_bytes: int = 0) -> float:
        """What repeating takes at a level."""
        return self.closure_at(level, spare_bytes).us


def levels(
    values: Sequence[Value],
    base: Collection[int] = (),
    by_hand: Iterable[Collection[int]] = (),
    *,
    crosses: bool = False,
    reads: Sequence[Read] = (),
) -> Levels:
    """All levels of a forward, cheapest steps first.

    Args:
        base: what is repeated at level 0 where it does not cross a fence: it costs next to nothing.
        by_hand: what is repeated at the last levels, one for each.
        crosses: whether the base is repeated where it crosses a fence too, but for choices by hand.
        reads: by value, when backward reads it, for `Levels.candidates`.
    """
    splits = splits_of(values)
    best = min(splits, key=lambda split: split.held_bytes)
    fences, crossing = best.fences, best.crossing
    found = Levels(
        values, frozenset(base), fences, always=frozenset(base if crosses else ()), reads=reads
    )
    apart_bytes = max(FINEST * sum(value.num_bytes for value in values), 1)
    for number, (begin, end) in enumerate(_between(len(values), fences)):
        own = _segment(values, begin, end, crossing)
        cheap = frozenset(i - begin for i in base if begin <= i < end and i not in crossing)
        points = _points(tuple(own), cheap, apart_bytes)
        found.chosen.append([point.behind(begin) for point, _ in points])
        found.steps += [Step(number, i, price) for i, (_, price) in enumerate(points) if i]
    last = len(fences)
    # The last segment's backward comes at once, when all that is kept is there: to repeat it then
    # seldom lowers the peak.
    found.steps.sort(key=lambda step: (step.segment == last, step.rate, step.segment, step.point))
    kept_bytes = best.kept_bytes
    for split in reversed(splits):
        if split.kept_bytes < kept_bytes:
            kept_bytes = split.kept_bytes
            inside = frozenset(i for i in range(len(values)) if i not in split.crossing)
            found.longer.append(Chosen(inside | found.always, split.crossing))
    for repeated in by_hand:
        kept = frozenset(range(len(values))).difference(repeated)
        chosen = Chosen(frozenset(repeated), kept)
        if chosen not in found.longer:
            found.longer.append(chosen)
            found.num_by_hand += 1
    return found


@functools.lru_cache(maxsize=256)
def _points(
    values: tuple[Value, ...], base: frozenset[int], apart_bytes: float
) -> tuple[tuple[Chosen, float], ...]:
    """A segment's choices, the most bytes first, and the price at which each is taken.

    The convex front, and where its points lie far apart the best choices between them. Kept for
    the process: the same segments come again with another budget.
    """
    return tuple(_each_point(values, base, apart_bytes))


def _each_point(
    values: Sequence[Value], base: frozenset[int], apart_bytes: float
) -> Iterator[tuple[Chosen, float]]:
    front = pareto(values, closure(values, base))
    yield Chosen(base, front[0].in_parts), 0.0
    for more, less in pairwise(front):
        price = rate(more, less)
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
                yield Chosen(frozenset(middle.repeated), middle.in_parts), price
        yield Chosen(frozenset(less.repeated), less.in_parts), price


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
            value.part_bytes,
            None if value.part_us is None else round(value.part_us, 3),
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


@dataclass(frozen=True)
class Split:
    """Forward in segments, of which everything is repeated but what crosses."""

    fences: tuple[int, ...]
    crossing: frozenset[int]
    kept_bytes: int
    """What crosses."""
    largest_bytes: int
    """What is made in the largest segment, but for what crosses."""

    @property
    def held_bytes(self) -> int:
        """What crosses, and the largest segment while it is repeated."""
        return self.kept_bytes + self.largest_bytes


def splits_of(values: Sequence[Value]) -> list[Split]:
    """Ways to split a forward, the longest segments first."""
    total = sum(value.num_bytes for value in values)
    found: dict[tuple[int, ...], Split] = {}
    share = 1.0
    while share >= SMALLEST_SHARE:
        fences = fences_for(values, total * share)
        share /= 2**0.5
        if fences in found:
            continue
        crossing = crossers(values, fences)
        kept = sum(values[i].num_bytes for i in crossing)
        largest = max(
            sum(v.num_bytes for i, v in enumerate(values[a:b], a) if i not in crossing)
            for a, b in _between(len(values), fences)
        )
        found[fences] = Split(fences, crossing, kept, largest)
    return list(found.values())
