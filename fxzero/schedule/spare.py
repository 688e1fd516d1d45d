"""Keep again what a choice repeats, as far as there is memory to spare.

    repeated: a (10 us, 4 KiB), b = f(a) (50 us, 8 KiB)     8 KiB to spare
    kept after all: b, and a is not needed any more         60 us less

Levels take the cheapest bytes first, and the last one may be large: what it leaves is spent on what
takes the most time for its bytes, one value after the other (the greedy order of a knapsack). An
operator that returns a list is worth keeping with all parts that are read, or not at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fxzero.schedule.repetition import Closure, Value


def keep_again(values: Sequence[Value], at: Closure, spare_bytes: int) -> frozenset[int]:
    """The positions of what is kept after all, with at most so many more bytes.

    Args:
        at: what is repeated and kept so far.
    """
    readers = _Readers(values, at)
    queue = [(-gain.rate, group) for group in _groups(values, at) if (gain := readers.gain(group))]
    heapq.heapify(queue)
    found: set[int] = set()
    while queue:
        before, group = heapq.heappop(queue)
        gain = readers.gain(group)
        if gain is None or gain.num_bytes > spare_bytes:
            continue
        if -gain.rate > before:  # it was worth more when more was repeated
            heapq.heappush(queue, (-gain.rate, group))
            continue
        spare_bytes -= gain.num_bytes
        readers.keep(group, gain)
        found.update(group)
    return frozenset(found)


def _groups(values: Sequence[Value], at: Closure) -> list[tuple[int, ...]]:
    """What may be kept of what is repeated, as far as it takes time: alone, or the parts of a
    list together."""
    repeated = set(at.repeated)
    parts: dict[int, list[int]] = {}
    for i in at.repeated:
        for source in values[i].sources:
            if values[i].may_keep and not values[source].may_keep and values[source].us:
                parts.setdefault(source, []).append(i)
    found = [(i,) for i in at.repeated if values[i].may_keep and values[i].num_bytes]
    return [*found, *(tuple(own) for i, own in parts.items() if i in repeated and len(own) > 1)]


@dataclass(frozen=True)
class _Gain:
    """What comes of it if some values are kept."""

    us: float
    num_bytes: int
    """What they take, less what was kept for them alone."""
    unread: tuple[int, ...]
    """What was repeated for them alone."""

    @property
    def rate(self) -> float:
        """Microseconds for each byte."""
        return self.us / max(self.num_bytes, 1)


class _Readers:
    """How many read each value: backward, and what is repeated."""

    def __init__(self, values: Sequence[Value], at: Closure) -> None:
        self.values = values
        self.in_parts = at.in_parts
        self.repeated = set(at.repeated)
        self.count = [int(value.is_needed) for value in values]
        for i in at.repeated:
            for source in set(values[i].sources):
                self.count[source] += 1

    def gain(self, group: Collection[int]) -> _Gain | None:
        """What is gained if these are kept; None if nothing is, or they are kept already."""
        own = [i for i in group if i in self.repeated]
        us = sum(self.values[i].us for i in own)
        num_bytes = sum(self.values[i].num_bytes for i in own)
        unread = []
        left: dict[int, int] = {}
        stack = list(own)
        while stack:
            for source in set(self.values[stack.pop()].sources):
                left[source] = left.get(source, self.count[source]) - 1
                if left[source]:
                    continue
                value = self.values[source]
                if source in self.repeated:
                    us += value.us
                    unread.append(source)
                    stack.append(source)
                elif source in self.in_parts:
                    us += value.part_us or 0.0
                    num_bytes -= value.part_bytes
                else:
                    num_bytes -= value.num_bytes
        return _Gain(us, num_bytes, tuple(unread)) if us > 0 else None

    def keep(self, group: Collection[int], gain: _Gain) -> None:
        """Let values be kept."""
        gone = self.repeated.intersection((*group, *gain.unread))
        self.repeated -= gone
        for one in gone:
            for source in set(self.values[one].sources):
                self.count[source] -= 1
