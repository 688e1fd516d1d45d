"""Sizes that somebody may write, and the search for the first level that fits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from fxzero import Config
from fxzero.compiler.memory_budget import MemoryBudget, Search, Trial
from fxzero.cost import device_memory
from fxzero.cost.settings import CostSettings
from fxzero.errors import ConfigError
from fxzero.inspect.capture import fake_ranks
from fxzero.schedule.simulate import Memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gb", 1_500_000_000),
        ("123", 123),
        ("4e8", 400_000_000),
        ("2TiB", 2 << 40),
        (400, 400),
    ],
)
def test_sizes(text: Any, expected: int) -> None:
    """Numbers are bytes; 1024 where the unit says so."""
    budget = Config.from_options({"memory_budget": text}).budget
    assert budget is not None
    assert budget.bytes_of(lambda: 0) == expected


def test_shares_of_a_device() -> None:
    """A percentage, and what is left of it by itself."""
    for text, expected in (("80%", 800), ("auto", 900), ("100%", 1000)):
        budget = MemoryBudget.parse(text)
        assert budget is not None
        assert budget.bytes_of(lambda: 1000) == expected


def test_no_budget() -> None:
    """Is the default."""
    assert Config().budget is None
    assert MemoryBudget.parse("None") is None


@pytest.mark.parametrize(
    "text", ["", "lots", "-1", "0", "0.3", "8 parsecs", "0%", "101%", "1e99GiB", "GiB", "8GiB 2"]
)
def test_what_is_no_size(text: str) -> None:
    """The message shows what one looks like."""
    with pytest.raises(ConfigError, match=r"is no size.*8GiB.*80%.*auto"):
        Config(memory_budget=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, 1.5, None, ["8GiB"]])
def test_what_is_no_text(value: Any) -> None:
    """Nor a number of bytes."""
    with pytest.raises(ConfigError, match=r"options\.memory_budget=.*must be a size"):
        Config.from_options({"memory_budget": value})


def test_what_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named cluster's figure; else the host's, shared by its ranks."""
    assert CostSettings(cluster="dgx_h100").device_bytes("cuda") == 80_000_000_000
    with fake_ranks(8):
        assert CostSettings().device_bytes("cpu") == 12_000_000_000
    alone = device_memory.host_bytes()
    assert alone > 1 << 28
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert CostSettings().device_bytes("cpu") == alone // 4


@dataclass
class Curve:
    """What the search asks levels."""

    kept_bytes: list[int]

    @property
    def main(self) -> int:
        """The last one but one, where there are several."""
        return max(len(self.kept_bytes) - 2, 0)

    def __len__(self) -> int:
        return len(self.kept_bytes)


def search(peaks: list[int], kept: list[int], budget: int) -> tuple[int | None, int]:
    """The level that is found on a curve, and how many were tried."""

    def attempt(level: int, tight: bool) -> Trial[None]:
        memory = Memory(0, "", 0, (), (), transfers_bytes=5)
        return Trial(level, tight, None, memory, peaks[level] - 5 * tight)

    found: Search[None] = Search(attempt, budget)
    curve = Curve(kept)
    trial = found.run(lambda: curve)  # type: ignore[arg-type,return-value]
    return (None if trial is None else trial.level), len(found.trials)


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
        level, tries = search(peaks, kept, budget)
        assert level == expected
        assert tries <= 24


def test_a_curve_that_rises_again() -> None:
    """What is repeated at once outweighs what is kept: a level before the last is found."""
    kept = list(range(1000, 0, -10))
    peaks = [max(k, 900 - k) + 50 for k in kept]
    level, _ = search(peaks, kept, 550)
    assert level is not None
    assert peaks[level] <= 550


def test_transfers_give_way_last() -> None:
    """Where repeating is not enough they hold less too; and then it may be too much."""
    kept = list(range(100, 50, -10))
    assert search(kept, kept, 60)[0] == 4
    assert search(kept, kept, 56)[0] == 4
    assert search(kept, kept, 54)[0] is None
