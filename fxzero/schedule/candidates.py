"""A short list of what to repeat, by what backward holds and by time.

    level 4, 0 bytes to spare      4.6 MB held   1.98 ms
    level 4, 1 MB to spare         5.1 MB held   1.70 ms
    level 0, 1.6 MB to spare       8.0 MB held   0.94 ms

Levels (`fxzero.schedule.repetition_levels`) go by what is kept, and what they leave can be spent
(`fxzero.schedule.spare`). A step's peak has more in it, what is repeated at once, and its time what
keeping takes. Both are found for every level and a few amounts to spare; what is fastest for what
it holds is a candidate. Candidates do not depend on a budget: if all of them are tried, then the
fastest that fits in less is never faster than the fastest that fits in more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fxzero.schedule.repetition import Closure, Value

if TYPE_CHECKING:
    from fxzero.schedule.repetition_levels import Levels

MOST = 16
"""Most candidates by one measure, beside the levels."""
AMOUNTS = 16
"""How many amounts to spare are looked at for a level."""
LOOKED_AT = 48
"""Most levels that are looked at."""


@dataclass(frozen=True)
class Read:
    """When backward reads a value."""

    first: int = -1
    """The place in the graph's order of the first node that reads it; -1 if none does."""
    last: int = -1


@dataclass(frozen=True)
class Candidate:
    """A level, and what may be kept again of what it repeats."""

    level: int
    spare_bytes: int
    held_bytes: int = field(default=0, compare=False)
    """The most that backward holds at once of what forward computes."""
    kept_bytes: int = field(default=0, compare=False)
    """What it holds when backward begins."""
    us: float = field(default=0.0, compare=False)
    """What repeating and keeping take."""


def candidates(levels: Levels, reads: Sequence[Read]) -> tuple[Candidate, ...]:
    """All levels as they are, and the fastest choice for each of `MOST` equal ranges of what
    backward holds, and of what is kept when it begins; the fastest first.

    Args:
        reads: by value, when backward reads it.
    """
    found: dict[tuple[object, object], Candidate] = {}
    for level, spare_bytes, closure in _choices(levels):
        key = closure.repeated, closure.in_parts
        if key not in found:
            held = bytes_in_backward(levels.values, reads, closure)
            us = closure.us + closure.keep_us
            found[key] = Candidate(level, spare_bytes, held, closure.kept_bytes, us)
    every = list(found.values())
    chosen = {
        *(candidate for candidate in every if not candidate.spare_bytes),
        *_fastest(every, lambda candidate: candidate.held_bytes),
        *_fastest(every, lambda candidate: candidate.kept_bytes),
    }
    return tuple(
        sorted(chosen, key=lambda candidate: (candidate.us, candidate.level, candidate.spare_bytes))
    )


def _fastest(every: Sequence[Candidate], size: Callable[[Candidate], int]) -> Iterator[Candidate]:
    """The fastest of each of `MOST` equal ranges of a size."""
    sizes = [size(candidate) for candidate in every]
    least, most = min(sizes), max(sizes)
    fastest: dict[int, Candidate] = {}
    for candidate, num_bytes in zip(every, sizes, strict=True):
        number = MOST * (num_bytes - least) // (most - least + 1)
        before = fastest.get(number)
        if before is None or (candidate.us, num_bytes) < (before.us, size(before)):
            fastest[number] = candidate
    yield from fastest.values()


def _choices(levels: Levels) -> Iterator[tuple[int, int, Closure]]:
    """Levels, some bytes to spare, and what follows from that. More than what a level does not
    keep may be spared: what is cheap is repeated at every level."""
    apart = -(-len(levels) // LOOKED_AT)
    by_hand = range(levels.by_hand, len(levels))  # first, so that they keep their names
    for level in (*by_hand, *range(0, levels.by_hand, apart)):
        less_bytes = levels.kept_bytes(0) - levels.kept_bytes(level)
        grain = max((less_bytes if less_bytes > 0 else levels.kept_bytes(0)) // AMOUNTS, 1)
        for number in range(AMOUNTS + 2):
            yield level, number * grain, levels.closure_at(level, number * grain)


def bytes_in_backward(values: Sequence[Value], reads: Sequence[Read], choice: Closure) -> int:
    """The most bytes that backward holds at once of what forward computes.

    What is kept is there from the beginning until it was read last; what is repeated from its first
    use, or that of what is repeated from it, on. What is fused into its readers holds nothing.
    """
    first = [read.first if read.first >= 0 else math.inf for read in reads]
    last = [float(read.last) for read in reads]
    for i in reversed(choice.repeated):
        looks = not values[i].may_keep and not values[i].num_bytes
        for source in values[i].sources:
            first[source] = min(first[source], first[i])
            last[source] = max(last[source], last[i] if looks else first[i])
    changes: list[tuple[float, int]] = []
    for i in choice.kept:
        num_bytes = values[i].part_bytes if i in choice.in_parts else values[i].num_bytes
        changes += [(-1, num_bytes), (last[i] + 0.5, -num_bytes)]
    for i in (*choice.repeated, *choice.in_parts):
        num_bytes = values[i].repeat_bytes
        if num_bytes and last[i] >= 0:
            changes += [(first[i], num_bytes), (last[i] + 0.5, -num_bytes)]
    now = most = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        most = max(most, now)
    return most
