"""One number for memory: what somebody may write, and what is said where nothing fits.

8GiB  512MiB  400e6  80%  auto  none
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fxzero.errors import ConfigError
from fxzero.schedule.simulate import Memory
from fxzero.settings import UNITS, Size

NO_BUDGET = Size("none")
LEAST = "least"
"""For the host: all that can be is on disk."""
_LEAST = "'least' for all on disk, "
MARGIN = 0.1
"""Of a device's memory, what ``auto`` leaves to allocators, libraries and code."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*|%)", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryBudget:
    """What somebody asked for."""

    text: str
    num_bytes: int | None = None
    share: float | None = None
    """Of what the device has."""

    @staticmethod
    def parse(text: str, setting: str = "memory_budget") -> MemoryBudget | None:
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
            if unit in UNITS and 1 <= number * UNITS[unit] < 1 << 62:
                return MemoryBudget(text, num_bytes=int(number * UNITS[unit]))
        of, least = ("host", _LEAST) if setting == "host_budget" else ("device", "")
        raise ConfigError(
            f"{setting}={text!r} is no size. Say how much a rank may take: '8GiB', '512MiB', "
            f"a number of bytes, '80%' of the {of}, 'auto', {least}or 'none'."
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


class TooSmallError(ConfigError):
    """A budget that nothing fits into."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        """The least that was found."""


def too_small(
    budget: MemoryBudget,
    budget_bytes: int,
    least_bytes: int,
    least: Memory,
    standing_bytes: int,
    *,
    whole: bool,
    given: str = "",
) -> TooSmallError:
    """What is said where nothing fits.

    Args:
        least_bytes: the least that was found.
        least: what it is made of.
        standing_bytes: gradients that may be there already.
        whole: whether it is a whole step; else one graph of a forward that may have several.
        given: what leaves less to decide; empty if nothing does.
    """
    what = "step" if whole else "graph"
    others = "" if whole else " Each graph of a forward that breaks has a least of its own."
    rather = f", or do without what is given: {given}" if given else ""
    parts = sorted(least.by_kind().items(), key=lambda item: -item[1])
    parts += [("gradients of an earlier backward", standing_bytes)]
    made_of = ", ".join(f"{kind.replace('_', ' ')} {size_text(b)}" for kind, b in parts if b)
    return TooSmallError(
        f"memory_budget={budget.text!r} ({size_text(budget_bytes)}) is less than this {what} can "
        f"do with: {size_text(least_bytes)} ({least_bytes} bytes) is the least that was "
        f"found, at {least.peak_node}: {made_of}. Allow that much, or take smaller batches, "
        f"more micro_batches or a higher ZeRO stage{rather}.{others}",
        least_bytes,
    )


def size_text(count: int) -> str:
    """A number of bytes for a person."""
    if count < 1 << 20:
        return f"{count / (1 << 10):,.1f} KiB"
    return f"{count / (1 << 20):,.1f} MiB"
