"""The fastest step within a bound on memory, among levels and rooms.

Passes give up speed for memory in two ways (`fxzero.passes.base.Level`): recompute repeats more,
from level to level, and transfers take less room. For a room the first level that fits is looked
for, from what the last tries came to. The usual room comes first. More of it is tried where
compute waits for transfers, less where something is repeated or nothing fits; of what fits the
fastest is taken, by simulation. Before it is said that nothing fits, every level behind the steps
of the others was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fxzero.passes.base import KEPT_SHARE, Room
from fxzero.schedule.repetition_levels import Levels
from fxzero.schedule.simulate import Memory

T = TypeVar("T")

WORTH = 0.01
"""Of a step's time: what another room must be able to save to be tried."""


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
    """Full parameters that backward gathers again, and that more room would keep."""


class Search(Generic[T]):
    """The fastest trial whose peak is within a bound.

    Args:
        attempt: schedules the step at a level.
        budget_bytes: the bound.
        rooms: what transfers may be given.
        usual: the one of them to begin with.
    """

    def __init__(
        self,
        attempt: Callable[[int, Room], Trial[T]],
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
        if top.memory.transfers_bytes and (best is None or self._slower(best, top)):
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
            if found is not None and (best is None or found.step_us < best.step_us):
                best = found
        return best if best is not None else self._any(levels())

    def _any(self, levels: Levels | None) -> Trial[T] | None:
        """A level behind all steps that fits, where nothing else does: all of them are tried, in
        the room that holds least, as none of them says what the next one holds."""
        room = self.least.room
        behind = range(levels.last + 1, len(levels)) if levels is not None else ()
        trials = (self.take(number, room) for number in behind)
        return next((trial for trial in trials if self._fits(trial)), None)

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
            return tried[0] - (levels.kept_bytes[0] - levels.kept_bytes[levels.last])
        return min(tried)

    def _first(
        self, top: Trial[T], levels: Levels | None, *, at_once: bool = False
    ) -> Trial[T] | None:
        """The first level that fits in a room.

        Args:
            top: its level 0.
            at_once: whether to give up where a level far down does not fit.
        """
        if self._fits(top):
            return top
        if levels is None or len(levels) < 2:
            return None
        if at_once:
            last = self.take(levels.main, top.room)
            end = last if self._fits(last) else None
        else:
            end = self._end(top, levels)
        return None if end is None else self._between(top, end, levels.kept_bytes)

    def _end(self, top: Trial[T], levels: Levels) -> Trial[T] | None:
        """A level that fits, far down: where the least is kept, but for the last segment, or with
        it, or with longer segments; or before, as what is repeated at once may outweigh what is
        not kept."""
        for number in dict.fromkeys((levels.main, levels.last)):
            trial = self.take(number, top.room)
            if self._fits(trial):
                return trial
        for number in range(levels.last + 1, len(levels)):
            before, trial = trial, self.take(number, top.room)
            if self._fits(trial):
                return trial
            if trial.peak_bytes > before.peak_bytes:
                break
        return self._lowest(top.level, levels.main, top.room)

    def _between(self, low: Trial[T], high: Trial[T], kept: list[int]) -> Trial[T]:
        """The first level that fits between one that does not and one that does."""
        while high.level - low.level > 1:
            missing = (low.peak_bytes - self._budget_bytes) / max(
                low.peak_bytes - high.peak_bytes, 1
            )
            wanted = kept[low.level] - missing * (kept[low.level] - kept[high.level])
            number = next((k for k, left in enumerate(kept) if left <= wanted), high.level)
            number = min(max(number, low.level + 1), high.level - 1)
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

    def _lowest(self, left: int, right: int, room: Room) -> Trial[T] | None:
        """A level that fits among some, looked for where the least is held."""
        while right - left > 2:
            a, b = left + (right - left) // 3, right - (right - left) // 3
            first, second = (self.take(number, room) for number in (a, b))
            for trial in (first, second):
                if self._fits(trial):
                    return trial
            if first.peak_bytes <= second.peak_bytes:
                right = b
            else:
                left = a
        return None

    def _fits(self, trial: Trial[T]) -> bool:
        return trial.peak_bytes <= self._budget_bytes

    def take(self, level: int, room: Room) -> Trial[T]:
        """A level's trial, made if it was not."""
        for trial in self.trials:
            if (trial.level, trial.room) == (level, room):
                return trial
        trial = self._attempt(level, room)
        self.trials.append(trial)
        return trial
