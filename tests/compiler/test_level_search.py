"""The search for the fastest level and room within a bound."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from fxzero.compiler.level_search import FAR_OFF, FEW, FEWEST, Search, Trial
from fxzero.passes.base import Room
from fxzero.schedule.candidates import Candidate
from fxzero.schedule.repetition import Closure
from fxzero.schedule.simulate import Alive, Memory
from fxzero.schedule.storage import Kind

EVERY = frozenset(Room)


@dataclass
class Curve:
    """What the search asks levels."""

    kept: list[int]
    longer: int = 0
    """How many levels of longer segments, and by hand, stand at the end."""
    num_by_hand: int = 0
    """How many of those somebody could choose by hand."""
    by_hand_us: float = 0.0
    """What repeating takes there."""
    saves: float = 0.0
    """What a byte to spare saves of that time."""

    values: range = range(0)
    candidates: tuple[Candidate, ...] = ()

    def closure_at(self, level: int, spare_bytes: int = 0) -> Closure:
        """What repeating takes, and nothing to keep."""
        return Closure((), (), frozenset(), self.kept[level], self.us(level, spare_bytes))

    @property
    def by_hand(self) -> int:
        """The first of them."""
        return len(self.kept) - self.num_by_hand

    def kept_bytes(self, level: int) -> int:
        """What is kept at a level."""
        return self.kept[level]

    def us(self, level: int, spare_bytes: int = 0) -> float:
        """What repeating takes, 10 us more for each level."""
        us = self.by_hand_us if level >= self.by_hand else 10.0 * level
        return us - min(self.saves * spare_bytes, 10.0)

    @property
    def last(self) -> int:
        """The one before those."""
        return len(self.kept) - 1 - self.longer

    @property
    def main(self) -> int:
        """The last one but one, where there are several."""
        return max(self.last - 1, 0)

    def __len__(self) -> int:
        return len(self.kept)


EXTRA = {Room.ALL: 40, Room.HALF: 20, Room.USUAL: 0, Room.LEAST: -5}
"""Bytes that a room adds."""
SAVES = {Room.ALL: 80.0, Room.HALF: 40.0, Room.USUAL: 0.0, Room.LEAST: -30.0}
"""And the time that it saves."""


def search(
    peaks: list[int],
    kept: list[int],
    budget: int,
    *,
    exposed_us: float = 0.0,
    rooms: frozenset[Room] = EVERY,
    usual: Room = Room.USUAL,
    longer: int = 0,
    num_by_hand: int = 0,
    by_hand_us: float = 0.0,
    saves: float = 0.0,
    shown: float = 1.0,
    num_values: int = FEW + 1,
) -> tuple[Trial[None] | None, int]:
    """What is found on a curve whose level adds 10 us each, and how many tries that took.

    Args:
        shown: how much of a byte that is kept again is seen in the peak.
        num_values: of the forward; one more than of which a try is cheap.
    """
    curve = Curve(kept, longer, num_by_hand, by_hand_us, saves, range(num_values))

    def attempt(level: int, room: Room, spare_bytes: int) -> Trial[None]:
        alive = (Alive("bucket", Kind.GATHERED, 5),)
        memory = Memory(0, "", 0, (), alive, transfers_bytes=5)
        us = 1000.0 + curve.us(level, spare_bytes) - SAVES[room]
        peak = peaks[level] + EXTRA[room] + int(shown * spare_bytes)
        return Trial(level, room, None, memory, peak, us, exposed_us, 40, spare_bytes)

    found: Search[None] = Search(attempt, budget, rooms, usual)
    trial = found.run(lambda: curve)  # type: ignore[arg-type,return-value]
    return trial, len(found.trials)


def test_the_first_level_that_fits() -> None:
    """On falling curves, whatever their shape, in few tries."""
    rng = random.Random(0)
    for _ in range(300):
        count = rng.randint(1, 200)
        kept = sorted((rng.randint(0, 10_000) for _ in range(count)), reverse=True)
        least = rng.randint(0, 2000)  # something else holds so much
        peaks = [100 + max(k, least) for k in kept]
        budget = rng.randint(peaks[-1], peaks[0] + 10)
        expected = next(i for i, peak in enumerate(peaks) if peak <= budget)
        trial, tries = search(peaks, kept, budget, rooms=frozenset({Room.USUAL}))
        assert trial is not None
        assert trial.level == expected
        assert tries <= 24


def test_a_curve_that_rises_again() -> None:
    """What is repeated at once outweighs what is kept: a level before the last is found."""
    kept = list(range(1000, 0, -10))
    peaks = [max(k, 900 - k) + 50 for k in kept]
    trial, _ = search(peaks, kept, 550, rooms=frozenset({Room.USUAL}))
    assert trial is not None
    assert peaks[trial.level] <= 550


def test_valleys_are_found() -> None:
    """Of any place and depth, where a level fits: also in the middle, and close to an end."""
    rng = random.Random(1)
    for _ in range(300):
        count = rng.randint(20, 900)
        kept = list(range(10 * count, 0, -10))
        lowest = rng.randint(2, count - 3)
        down, up = rng.uniform(1, 20), rng.uniform(1, 20)
        peaks = [10_000 + int(max(down * (lowest - i), up * (i - lowest))) for i in range(count)]
        budget = peaks[lowest] + int(3 * max(down, up))
        trial, _ = search(peaks, kept, budget, rooms=frozenset({Room.USUAL}))
        assert trial is not None
        assert peaks[trial.level] <= budget


def test_a_valley_deeper_than_its_sides_say() -> None:
    """Where tries are cheap it is looked for to the end, so that the least is what is named."""
    kept = list(range(9000, 0, -10))
    peaks = [100_000 + abs(i - 437) - (5_000 if abs(i - 437) < 4 else 0) for i in range(900)]
    rooms = frozenset({Room.USUAL})
    trial, _ = search(peaks, kept, 95_010, num_values=FEW, rooms=rooms)
    assert trial is not None
    assert peaks[trial.level] <= 95_010


def test_what_cannot_fit_is_told_soon() -> None:
    """On a plain far above the budget nobody looks for a valley, nor behind longer segments that
    hold more and more."""
    kept = list(range(9000, 0, -10))
    peaks = [125_000, *(122_000 + i % 3 for i in range(889)), *range(122_100, 123_100, 100)]
    trial, tries = search(peaks, kept, 107_000, longer=10, rooms=frozenset({Room.USUAL}))
    assert trial is None
    assert tries <= 10


def test_longer_segments() -> None:
    """Tried one after another, as long as less is held; what is before is looked at then."""
    kept = [100, 90, 80, 70, 60, 50, 40]
    for peaks, budget, level, most in (
        ([100, 90, 80, 70, 65, 60, 90], 62, 5, 6),
        ([100, 90, 80, 70, 65, 60, 55], 55, 6, 6),
        ([100, 90, 80, 60, 70, 75, 10], 65, 3, 3),
    ):
        trial, tries = search(peaks, kept, budget, rooms=frozenset({Room.USUAL}), longer=2)
        assert trial is not None
        assert trial.level == level
        assert tries <= most


def test_every_level_behind_the_steps_is_tried_before_nothing_fits() -> None:
    """Also behind one that holds more, in the room that holds least; not where something fits."""
    kept = [100, 90, 80, 70, 60, 50, 40, 30]
    peaks = [100, 90, 80, 70, 75, 65, 99, 50]
    trial, _ = search(peaks, kept, 50, longer=4, rooms=frozenset({Room.USUAL}))
    assert trial is not None
    assert trial.level == 7
    trial, _ = search(peaks, kept, 45, longer=4)
    assert trial is not None
    assert (trial.level, trial.room) == (7, Room.LEAST)
    assert search(peaks, kept, 44, longer=4)[0] is None
    _, tries = search(peaks, kept, 70, longer=4)
    assert tries <= 4


def test_by_hand_where_that_is_faster() -> None:
    """Than the first level that fits; not tried where it is thought not to be, or not to fit."""
    kept = [100, 90, 80, 70, 60, 50, 40]
    one: dict[str, Any] = {"longer": 1, "num_by_hand": 1, "rooms": frozenset({Room.USUAL})}
    for budget, us, expected in ((65, 25.0, 6), (65, 35.0, 4), (80, 5.0, 6), (100, 5.0, 0)):
        trial, tries = search(kept, kept, budget, by_hand_us=us, **one)
        assert trial is not None
        assert trial.level == expected
        _, without = search(kept, kept, budget, **one | {"num_by_hand": 0})
        assert tries == without + (expected == 6)
    trial, _ = search(kept, kept, 65, by_hand_us=35.0, num_values=FEW, **one)
    assert trial is not None  # a try is cheap
    assert trial.level == 6
    less = [*kept[:-1], 30]
    trial, _ = search(less, less, 35, by_hand_us=500.0, **one)
    assert trial is not None  # nothing else fits
    assert trial.level == 6


def test_what_a_level_leaves_is_spent() -> None:
    """On keeping again, as much as fits, whatever of it is seen; nothing where it saves nothing."""
    kept = [1000, 400, 300]
    one: dict[str, Any] = {"rooms": frozenset({Room.USUAL})}
    for shown, budget, least in ((1.0, 900, 480), (2.0, 900, 220), (0.5, 600, 280)):
        trial, tries = search(kept, kept, budget, saves=0.01, shown=shown, num_values=FEW, **one)
        assert trial is not None
        assert trial.level == 1
        assert trial.peak_bytes <= budget
        assert trial.spare_bytes >= least
        assert trial.step_us < 1010
        assert tries <= 8
    for saves, num_values in ((0.0, FEW), (0.01, FEW + 1)):  # nothing; too little for a dear try
        trial, _ = search(kept, kept, 900, saves=saves, num_values=num_values, **one)
        assert trial is not None
        assert trial.spare_bytes == 0


KEPT = list(range(100, 50, -10))


def test_transfers_give_way_where_nothing_else_fits() -> None:
    """And then it may be too much."""
    at_usual, _ = search(KEPT, KEPT, 60)
    at_least, _ = search(KEPT, KEPT, 56)
    assert at_usual is not None
    assert at_least is not None
    assert (at_usual.level, at_usual.room) == (4, Room.USUAL)
    assert (at_least.level, at_least.room) == (4, Room.LEAST)
    assert search(KEPT, KEPT, 54)[0] is None


def test_transfers_give_way_where_that_is_faster() -> None:
    """A room of 30 us less than six levels of 10."""
    peaks = [104, 104, 104, 104, 104, 104, 100]
    kept = [100, 99, 98, 97, 96, 95, 90]
    trial, _ = search(peaks, kept, 100)
    assert trial is not None
    assert (trial.level, trial.room) == (0, Room.LEAST)


def test_transfers_keep_their_room_where_that_saves_little() -> None:
    """Of a hundred levels they stand for less than one: the least room is not tried."""
    kept = list(range(1000, 0, -10))
    usual: dict[str, Any] = {"rooms": frozenset({Room.USUAL})}
    trial, tries = search(kept, kept, 505)
    assert trial is not None
    assert trial.level == 50
    assert tries == search(kept, kept, 505, **usual)[1]


def test_more_room_where_compute_waits() -> None:
    """As much as fits; none is tried where nothing waits."""
    for budget, expected in ((200, Room.ALL), (139, Room.ALL), (95, Room.HALF)):
        trial, _ = search(KEPT, KEPT, budget, exposed_us=500.0)
        assert trial is not None
        assert trial.room is expected
        assert trial.peak_bytes <= budget
    trial, tries = search(KEPT, KEPT, 200)
    assert trial is not None
    assert (trial.room, tries) == (Room.USUAL, 1)


def test_only_what_others_have_decided() -> None:
    """One room."""
    trial, _ = search(
        KEPT, KEPT, 90, exposed_us=500.0, rooms=frozenset({Room.LEAST}), usual=Room.LEAST
    )
    assert trial is not None
    assert (trial.level, trial.room) == (1, Room.LEAST)


def search_on_candidates(
    candidates: dict[int, tuple[int, float, float]],
    budget: int,
    top: tuple[int, float],
    num_by_hand: int = 0,
) -> tuple[Trial[None] | None, set[tuple[int, int]]]:
    """What is found among candidates, by level: their peak, and what they take by foretelling and
    by simulation; and what was tried."""
    ladder = tuple(
        sorted(
            (Candidate(k, 0, us=us) for k, (_, us, _) in candidates.items()),
            key=lambda candidate: candidate.us,
        )
    )
    kept = [1000 - k for k in range(len(candidates) + 1)]
    curve = Curve(kept, num_by_hand, num_by_hand, values=range(FEWEST), candidates=ladder)
    tried = set()

    def attempt(level: int, room: Room, spare_bytes: int) -> Trial[None]:
        tried.add((level, spare_bytes))
        peak_bytes, step_us = (candidates[level][0], candidates[level][2]) if level else top
        memory = Memory(0, "", 0, (), (), transfers_bytes=0)
        return Trial(level, room, None, memory, peak_bytes, step_us)

    found: Search[None] = Search(attempt, budget, frozenset({Room.USUAL}))
    return found.run(lambda: curve), tried  # type: ignore[arg-type,return-value]


def test_as_the_budget_falls_the_time_does_not() -> None:
    """Where tries are cheap, whatever candidates hold, and however far off foretelling is."""
    rng = random.Random(3)
    faster_than_the_first = 0
    for _ in range(100):
        candidates = {}
        for level in range(1, rng.randint(4, 40)):
            us = rng.uniform(0, 400)
            candidates[level] = rng.randint(100, 1000), us, 1000 + us + rng.uniform(-20, 20)
        top = 900, 1000 + rng.uniform(-20, 20)
        least = min(peak for peak, *_ in candidates.values())
        before = 0.0
        for budget in range(1100, least - 1, -50):
            trial, _ = search_on_candidates(candidates, budget, top)
            assert trial is not None
            assert trial.peak_bytes <= budget
            assert trial.step_us >= before
            fitting = [time for peak, _, time in candidates.values() if peak <= budget]
            assert trial.step_us == min([*fitting, *([top[1]] if top[0] <= budget else [])])
            before = trial.step_us
            faster_than_the_first += trial.level > 0 and budget > 900
    assert faster_than_the_first


def test_what_takes_longer_by_far_is_not_tried() -> None:
    """Once something fits; but for what somebody could choose by hand."""
    far = FAR_OFF * 1000
    candidates = {
        1: (500, 10.0, 1010.0),
        2: (400, far, 1000 + far),
        3: (300, 3 * far, 1000 + 3 * far),
    }
    trial, tried = search_on_candidates(candidates, 600, (900, 1000.0))
    assert trial is not None
    assert trial.level == 1
    assert tried == {(0, 0), (1, 0), (2, 0)}
    candidates[3] = 300, 3 * far, 1005.0  # faster than anybody thought
    trial, tried = search_on_candidates(candidates, 600, (900, 1000.0), num_by_hand=1)
    assert trial is not None
    assert trial.level == 3
