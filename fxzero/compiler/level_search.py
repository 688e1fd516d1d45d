"""The fastest step within a bound on memory, among levels and rooms.

Passes give up speed for memory in two ways (`fxzero.passes.base.Level`): recompute repeats more,
from level to level, and transfers take less room. For a room the first level that fits is looked
for, from what the last tries came to. The usual room comes first. More of it is tried where
compute waits for transfers, less where something is repeated or nothing fits; of what fits the
fastest is taken, by simulation. Where a try is cheap, a short list of choices that does not depend
on the bound comes first (`fxzero.schedule.candidates`), so that less memory is never faster.
Before it is said that nothing fits, every level behind the steps of the others was tried. What the
level that was found leaves of the bound is spent on keeping some of what it repeats.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fxzero.passes.base import KEPT_SHARE, Room
from fxzero.schedule.candidates import Candidate
from fxzero.schedule.repetition_levels import Levels
from fxzero.schedule.simulate import Memory
from fxzero.schedule.storage import Kind

T = TypeVar("T")

WORTH = 0.01
"""Of a step's time: what another room must be able to save to be tried. Of a bound: what must be
left of it to be spent."""
UNSURE = 0.1
"""Of a step's time: by how much more may be foretold than is simulated."""
FEWEST = 300
"""Values of a forward: as few are scheduled in some tenths of a second; all are tried."""
FAR_OFF = 0.1
"""Of a step's time: how much a candidate may be better than was foretold."""
FEW = 1000
"""Values of a forward: as few are scheduled so fast that more is tried."""
STEEPER = 16
"""How much deeper a valley may be than the slopes beside it say."""
IN_A_ROW = 3
"""Longer and longer segments, each of which holds more than the one before."""
SPENDS = 5
"""Most tries to spend what is left."""
GRAINS = 64
"""In how many parts the bytes are cut that a level can keep again, so that near bounds are spent on
the same."""


@dataclass
class Trial(Generic[T]):
    """A level that was tried."""

    level: int
    room: Room
    step: T
    """What was scheduled."""
    memory: Memory
    peak_bytes: int
    """Of the first rank: all ranks go by it."""
    step_us: float
    """What the step takes, simulated."""
    exposed_us: float = 0.0
    """How long compute stands still for transfers."""
    again_bytes: int = 0
    """Full parameters that are gathered again, and that more room would keep."""
    spare_bytes: int = 0
    """What may be kept again of what the level repeats."""

    @property
    def at_peak_bytes(self) -> int:
        """What transfers hold at most at the peak."""
        kinds = self.memory.by_kind()
        return kinds.get(Kind.GATHERED, 0) + kinds.get(Kind.GRADIENTS, 0)


class Search(Generic[T]):
    """The fastest trial whose peak is within a bound.

    Args:
        attempt: schedules the step at a level, in a room, with some bytes to spare.
        budget_bytes: the bound.
        rooms: what transfers may be given.
        usual: the one of them to begin with.
    """

    def __init__(
        self,
        attempt: Callable[[int, Room, int], Trial[T]],
        budget_bytes: int,
        rooms: frozenset[Room] = frozenset(Room),
        usual: Room = Room.USUAL,
    ) -> None:
        self._attempt = attempt
        self._budget_bytes = budget_bytes
        self._rooms = rooms
        self._usual = usual
        self.trials: list[Trial[T]] = []

    @property
    def least(self) -> Trial[T]:
        """The trial that holds least."""
        return min(self.trials, key=lambda trial: trial.peak_bytes)

    def run(self, levels: Callable[[], Levels | None]) -> Trial[T] | None:
        """Find it; None if nothing fits.

        Args:
            levels: known once a level was tried; None if only the first one is there.
        """
        top = self.take(0, self._usual)
        best = self._first(top, levels())
        rooms = []
        if best is not None and top.exposed_us > WORTH * top.step_us:
            rooms += [room for room in KEPT_SHARE if self._may_keep(room, top, levels())]
        if top.memory.transfers_bytes and (
            best is None or (self._slower(best, top) and self._may_save(best, top, levels()))
        ):
            rooms += [Room.LEAST]
        for room in rooms:
            if room not in self._rooms - {self._usual}:
                continue
            there = self.take(0, room)  # at no other level is it faster
            if best is not None and not (
                self._slower(best, there) and self._may_fit(top, there, levels())
            ):
                continue
            found = self._first(there, levels(), at_once=best is not None)
            best = _faster(best, found)
        known = levels()
        if known is None or (
            best is not None and (best.level == 0 or self._is_candidate(best, known))
        ):
            return best
        fitting = [] if best is None else [best]
        fitting += self._by_hand(best, top, known)
        if not fitting and (last := self._any(known)) is not None:
            fitting = [last]
        return min(
            (self._spend(trial, known) for trial in fitting),
            key=lambda trial: trial.step_us,
            default=None,
        )

    def _by_hand(self, best: Trial[T] | None, top: Trial[T], levels: Levels) -> list[Trial[T]]:
        """What fits of what somebody could choose by hand: that is tried where nothing else was
        found, in the usual room too, and where it promises to take less time."""
        rooms = [self.least.room, self._usual] if best is None else [best.room]
        trials = [
            self.take(number, room)
            for number in range(levels.by_hand, len(levels))
            if best is None or self._promises(number, best, top, levels)
            for room in dict.fromkeys(rooms)
        ]
        return list(filter(self._fits, trials))

    def _promises(self, number: int, best: Trial[T], top: Trial[T], levels: Levels) -> bool:
        """Whether a level may be faster than what was found, once what they leave is spent: if its
        peak is as much less than the first one's as what it keeps is. Where a try is cheap, it need
        not be sure."""
        fewer_bytes = levels.kept_bytes(0) - levels.kept_bytes(number)
        spare_bytes = self._budget_bytes - (top.peak_bytes - fewer_bytes)
        if spare_bytes < 0:
            return False
        left_bytes = self._budget_bytes - best.peak_bytes
        fewer_us = levels.us(best.level, left_bytes) - levels.us(number, spare_bytes)
        least = -UNSURE if len(levels.values) <= FEW else WORTH
        return fewer_us > least * best.step_us

    def _any(self, levels: Levels) -> Trial[T] | None:
        """A level of longer segments that fits, where nothing else does, in the room that holds
        least. None of them says for sure what the next one holds, so that all of them are tried;
        where a try is dear, until some in a row have held more and more."""
        room, worse, before_bytes = self.least.room, 0, 0
        for number in range(levels.last + 1, levels.by_hand):
            trial = self.take(number, room)
            if self._fits(trial):
                return trial
            worse = worse + 1 if trial.peak_bytes > before_bytes else 0
            before_bytes = trial.peak_bytes
            if worse > IN_A_ROW and len(levels.values) > FEW:
                break
        return None

    def _spend(self, best: Trial[T], levels: Levels) -> Trial[T]:
        """The same with more kept, as far as the bound allows, while that is worth a try: what a
        value takes may be more than it adds to the peak, or less."""
        most_bytes = levels.kept_bytes(0) - levels.kept_bytes(best.level)
        grain = max(most_bytes // GRAINS, 1)
        low, high_bytes = best, most_bytes + grain
        worth_us = 0.0 if len(levels.values) <= FEW else WORTH * best.step_us
        for _ in range(SPENDS):
            left_bytes = self._budget_bytes - low.peak_bytes
            spare_bytes = low.spare_bytes + left_bytes
            if spare_bytes >= high_bytes:
                spare_bytes = (low.spare_bytes + high_bytes) // 2
            spare_bytes -= spare_bytes % grain
            if left_bytes <= WORTH * self._budget_bytes or spare_bytes <= low.spare_bytes:
                break
            gain_us = levels.us(low.level, low.spare_bytes) - levels.us(low.level, spare_bytes)
            if gain_us <= 0:
                low = replace(low, spare_bytes=spare_bytes)
                continue
            if gain_us < worth_us:
                break
            trial = self.take(best.level, best.room, spare_bytes)
            if self._fits(trial):
                low = trial
                best = _faster(best, trial) or best
            else:
                high_bytes = spare_bytes
        return best

    def _may_save(self, best: Trial[T], top: Trial[T], levels: Levels | None) -> bool:
        """Whether it is worth so much time to try the least room: where it saves all that transfers
        hold at the peak, a level before the one that was found may fit."""
        if levels is None or best.level > levels.last:
            return True
        usual = [t for t in self.trials if t.room is top.room and not t.spare_bytes]
        tried = [trial for trial in usual if trial.level <= best.level]
        tried.sort(key=lambda trial: trial.level)
        least = [trial.peak_bytes - trial.at_peak_bytes for trial in tried]
        over = [i for i, num_bytes in enumerate(least[:-1]) if num_bytes > self._budget_bytes]
        if not over:
            return True
        i = over[-1]
        above, below = tried[i].level, tried[i + 1].level
        share = (least[i] - self._budget_bytes) / max(least[i] - least[i + 1], 1)
        more, kept = levels.kept_bytes(above), levels.kept_bytes(below)
        level = self._level_of(more - share * (more - kept), above, below, levels)
        return levels.us(best.level) - levels.us(level) > WORTH * best.step_us

    def _slower(self, one: Trial[T], other: Trial[T]) -> bool:
        return one.step_us > (1 + WORTH) * other.step_us

    def _may_keep(self, room: Room, usual: Trial[T], levels: Levels | None) -> bool:
        """Whether a room is worth a try: there is something to keep, and a place for it."""
        kept_bytes = KEPT_SHARE[room] * usual.again_bytes
        return 0 < kept_bytes <= self._budget_bytes - self._least_of(usual, levels)

    def _may_fit(self, usual: Trial[T], other: Trial[T], levels: Levels | None) -> bool:
        """Whether another room leaves as much as has been found to do, if it takes as much more at
        every level as at the first."""
        least = self._least_of(usual, levels)
        return least + other.peak_bytes - usual.peak_bytes <= self._budget_bytes

    def _least_of(self, usual: Trial[T], levels: Levels | None) -> int:
        """What the usual room can come to: what was tried, or where nothing more was tried than
        its first level, what all that may go before longer segments are tried leaves."""
        tried = [trial.peak_bytes for trial in self.trials if trial.room is usual.room]
        if len(tried) == 1 and levels is not None:
            return tried[0] - (levels.kept_bytes(0) - levels.kept_bytes(levels.last))
        return min(tried)

    def _first(
        self, top: Trial[T], levels: Levels | None, *, at_once: bool = False
    ) -> Trial[T] | None:
        """The fastest candidate that fits in a room, or the first level that does.

        Args:
            top: its level 0.
            at_once: whether to give up where a level far down does not fit.
        """
        if levels is not None and len(levels.values) <= FEWEST:
            found = self._on_candidates(top, levels)
            if found is not None:
                return found
        if self._fits(top):
            return top
        if levels is None or len(levels) < 2:
            return None
        if at_once:
            last = self.take(levels.main, top.room)
            end = last if self._fits(last) else None
        else:
            end = self._end(top, levels)
        return None if end is None else self._between(top, end, levels)

    @staticmethod
    def _is_candidate(trial: Trial[T], levels: Levels) -> bool:
        """Whether a trial is the best of all candidates: nothing is left to spend."""
        if len(levels.values) > FEWEST:
            return False
        return Candidate(trial.level, trial.spare_bytes) in levels.candidates

    def _on_candidates(self, top: Trial[T], levels: Levels) -> Trial[T] | None:
        """The fastest of level 0 and all candidates in a room that fits; None if none does. What
        is foretold to take longer by far than something that fits is not tried, unless somebody
        could choose it by hand: blocks that repeat alike may fuse better than anything says."""
        at_top = levels.closure_at(0)
        best, best_us = top if self._fits(top) else None, at_top.us + at_top.keep_us
        for candidate in levels.candidates:
            far = best is not None and candidate.us - best_us > FAR_OFF * best.step_us
            if far and candidate.level < levels.by_hand:
                continue
            trial = self.take(candidate.level, top.room, candidate.spare_bytes)
            if self._fits(trial) and (best is None or trial.step_us < best.step_us):
                best, best_us = trial, candidate.us
        return best

    def _end(self, top: Trial[T], levels: Levels) -> Trial[T] | None:
        """A level that fits, far down: where the least is kept, but for the last segment, or with
        it, or with longer segments; or before, as what is repeated at once may outweigh what is
        not kept."""
        for number in dict.fromkeys((levels.main, levels.last)):
            trial = self.take(number, top.room)
            if self._fits(trial):
                return trial
        for number in range(levels.last + 1, levels.by_hand):
            before, trial = trial, self.take(number, top.room)
            if self._fits(trial):
                return trial
            if trial.peak_bytes > before.peak_bytes:
                break
        return self._lowest(top, self.take(levels.main, top.room), levels)

    def _between(self, low: Trial[T], high: Trial[T], levels: Levels) -> Trial[T]:
        """The first level that fits between one that does not and one that does."""
        while high.level - low.level > 1:
            missing = (low.peak_bytes - self._budget_bytes) / max(
                low.peak_bytes - high.peak_bytes, 1
            )
            kept, least = levels.kept_bytes(low.level), levels.kept_bytes(high.level)
            wanted = kept - missing * (kept - least)
            number = self._level_of(wanted, low.level + 1, high.level - 1, levels)
            trial = self.take(number, high.room)
            if self._fits(trial):
                before = self.take(number - 1, high.room)
                if not self._fits(before):
                    return trial
                high = before
            else:
                behind = self.take(number + 1, high.room)
                if self._fits(behind):
                    return behind
                low = behind
        return high

    @staticmethod
    def _level_of(kept_bytes: float, first: int, last: int, levels: Levels) -> int:
        """The first of some levels that keeps no more; the last one if none does."""
        between = range(first, last)
        return first + bisect_left(between, -kept_bytes, key=lambda k: -levels.kept_bytes(k))

    def _lowest(self, left: Trial[T], right: Trial[T], levels: Levels) -> Trial[T] | None:
        """A level that fits between two, looked for where the least is held; where a try is dear,
        until nothing that fits is to be hoped for."""
        is_dear = len(levels.values) > FEW
        while right.level - left.level > 2:
            third = (right.level - left.level) // 3
            first, second = (
                self.take(number, left.room) for number in (left.level + third, right.level - third)
            )
            for trial in (first, second):
                if self._fits(trial):
                    return trial
            if is_dear and not self._may_be_between(left, first, second, right):
                break
            if first.peak_bytes <= second.peak_bytes:
                right = second
            else:
                left = first
        return None

    def _may_be_between(
        self, left: Trial[T], first: Trial[T], second: Trial[T], right: Trial[T]
    ) -> bool:
        """Whether something between four trials, a third of the way from each to the next, may fit.

        The search for the least looks for one valley. Were it convex, what lies between two of them
        would be above the lines through their neighbours; `STEEPER` times that far down is looked.
        """
        down = max(left.peak_bytes - first.peak_bytes, 0)
        up = max(right.peak_bytes - second.peak_bytes, 0)
        slope = abs(first.peak_bytes - second.peak_bytes)
        drop = max(min(down, up), slope)
        least = min(first.peak_bytes, second.peak_bytes)
        return least - STEEPER * drop <= self._budget_bytes

    def _fits(self, trial: Trial[T]) -> bool:
        return trial.peak_bytes <= self._budget_bytes

    def take(self, level: int, room: Room, spare_bytes: int = 0) -> Trial[T]:
        """A level's trial, made if it was not."""
        for trial in self.trials:
            if (trial.level, trial.room, trial.spare_bytes) == (level, room, spare_bytes):
                return trial
        trial = self._attempt(level, room, spare_bytes)
        self.trials.append(trial)
        return trial


def _faster(one: Trial[T] | None, other: Trial[T] | None) -> Trial[T] | None:
    """The faster of what there is; of two that are alike the first."""
    if one is None or other is None:
        return one or other
    return other if other.step_us < one.step_us else one
