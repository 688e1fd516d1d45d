"""One number for memory: the fastest step whose simulated peak is within it.

    8GiB  512MiB  400e6  80%  auto  none

Passes give up speed for memory in levels (`fxzero.passes.base.Level`): first recompute repeats
more, then transfers hold as little as they can. A level is tried by scheduling the whole step and
simulating its memory, so that everything counts that the engine knows of; the search goes from
what the last tries came to, and ends at the first level that fits. Where none does, the error
names the least peak that was found and what it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fxzero.errors import ConfigError
from fxzero.schedule.repetition import Levels
from fxzero.schedule.simulate import Memory
from fxzero.settings import Size

T = TypeVar("T")

NO_BUDGET = Size("none")
MARGIN = 0.1
"""Of a device's memory, what ``auto`` leaves to allocators, libraries and code."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*|%)", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryBudget:
    """What somebody asked for."""

    text: str
    num_bytes: int | None = None
    share: float | None = None
    """Of what the device has."""

    @staticmethod
    def parse(text: str) -> MemoryBudget | None:
        """Read a setting; None if there is no bound.

        Raises:
            ConfigError: it is no size.
        """
        word = text.strip().lower()
        if word == "none":
            return None
        if word == "auto":
            return MemoryBudget(text, share=1 - MARGIN)
        match = _SIZE.fullmatch(word)
        if match is not None:
            number, unit = float(match[1]), match[2]
            if unit == "%" and 0 < number <= 100:
                return MemoryBudget(text, share=number / 100)
            if unit in _UNITS and 1 <= number * _UNITS[unit] < 1 << 62:
                return MemoryBudget(text, num_bytes=int(number * _UNITS[unit]))
        raise ConfigError(
            f"memory_budget={text!r} is no size. Say how much a rank may take: '8GiB', '512MiB', "
            "a number of bytes, '80%' of the device, 'auto', or 'none'."
        )

    def bytes_of(self, device_bytes: Callable[[], int]) -> int:
        """The bound in bytes.

        Args:
            device_bytes: what the device has for this rank.
        """
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None
        return int(self.share * device_bytes())


@dataclass
class Trial(Generic[T]):
    """A level that was tried."""

    level: int
    tight: bool
    step: T
    """What was scheduled."""
    memory: Memory
    peak_bytes: int
    """Of the first rank: all ranks go by it."""


class Search(Generic[T]):
    """The first level whose peak is within a bound.

    Args:
        attempt: schedules the step at a level.
        budget_bytes: the bound.
    """

    def __init__(self, attempt: Callable[[int, bool], Trial[T]], budget_bytes: int) -> None:
        self._attempt = attempt
        self._budget_bytes = budget_bytes
        self.trials: list[Trial[T]] = []

    @property
    def least(self) -> Trial[T]:
        """The trial that holds least."""
        return min(self.trials, key=lambda trial: trial.peak_bytes)

    def run(self, levels: Callable[[], Levels | None]) -> Trial[T] | None:
        """Find it; None if no level fits.

        Args:
            levels: known once a level was tried; None if only the first one is there.
        """
        first = self.take(0, tight=False)
        known = levels()
        for tight in (False, True)[: 1 + bool(first.memory.transfers_bytes)]:
            top = self.take(0, tight=tight)
            if self._fits(top):
                return top
            if known is not None and len(known) > 1:
                end = self._end(top, known)
                if end is not None:
                    return self._between(top, end, known.kept_bytes)
        return None

    def _end(self, top: Trial[T], levels: Levels) -> Trial[T] | None:
        """A level that fits, far down: where the least is kept, but for the last segment, or with
        it; or before, as what is repeated at once may outweigh what is not kept."""
        for number in dict.fromkeys((levels.main, len(levels) - 1)):
            trial = self.take(number, tight=top.tight)
            if self._fits(trial):
                return trial
        return self._lowest(top.level, levels.main, tight=top.tight)

    def _between(self, low: Trial[T], high: Trial[T], kept: list[int]) -> Trial[T]:
        """The first level that fits between one that does not and one that does."""
        while high.level - low.level > 1:
            missing = (low.peak_bytes - self._budget_bytes) / max(
                low.peak_bytes - high.peak_bytes, 1
            )
            wanted = kept[low.level] - missing * (kept[low.level] - kept[high.level])
            number = next((k for k, left in enumerate(kept) if left <= wanted), high.level)
            number = min(max(number, low.level + 1), high.level - 1)
            trial = self.take(number, tight=high.tight)
            if self._fits(trial):
                before = self.take(number - 1, tight=high.tight)
                if not self._fits(before):
                    return trial
                high = before
            else:
                behind = self.take(number + 1, tight=high.tight)
                if self._fits(behind):
                    return behind
                low = behind
        return high

    def _lowest(self, left: int, right: int, *, tight: bool) -> Trial[T] | None:
        """A level that fits among some, looked for where the least is held."""
        while right - left > 2:
            a, b = left + (right - left) // 3, right - (right - left) // 3
            first, second = (self.take(number, tight=tight) for number in (a, b))
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

    def take(self, level: int, tight: bool) -> Trial[T]:
        """A level's trial, made if it was not."""
        for trial in self.trials:
            if (trial.level, trial.tight) == (level, tight):
                return trial
        trial = self._attempt(level, tight)
        self.trials.append(trial)
        return trial


def too_small(
    budget: MemoryBudget,
    budget_bytes: int,
    least: Trial[T],
    standing_bytes: int,
    given: str = "",
) -> ConfigError:
    """What is said where nothing fits.

    Args:
        least: the step that holds least.
        standing_bytes: gradients that may be there already.
        given: what leaves less to decide; empty if nothing does.
    """
    rather = f", or do without what is given: {given}" if given else ""
    parts = sorted(least.memory.by_kind().items(), key=lambda item: -item[1])
    parts += [("gradients of an earlier backward", standing_bytes)]
    made_of = ", ".join(f"{kind.replace('_', ' ')} {mebibytes(b)}" for kind, b in parts if b)
    return ConfigError(
        f"memory_budget={budget.text!r} ({mebibytes(budget_bytes)}) is less than this step can do "
        f"with: {mebibytes(least.peak_bytes)} ({least.peak_bytes} bytes) is the least that was "
        f"found, at {least.memory.peak_node}: {made_of}. Allow that much, or take smaller batches, "
        f"more micro_batches or a higher ZeRO stage{rather}."
    )


def mebibytes(count: int) -> str:
    """A number of bytes for a person."""
    return f"{count / (1 << 20):,.1f} MiB"
