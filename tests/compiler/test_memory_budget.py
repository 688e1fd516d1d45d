"""Sizes that somebody may write."""

from __future__ import annotations

from typing import Any

import pytest

from fxzero import Config
from fxzero.compiler.memory_budget import MemoryBudget, size_text
from fxzero.cost import resources
from fxzero.cost.settings import CostSettings
from fxzero.errors import ConfigError
from fxzero.inspect.capture import fake_ranks


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


def test_sizes_are_shown_in_units_that_tell_something() -> None:
    assert size_text(13_721) == "13.4 KiB"
    assert size_text(3 << 30) == "3,072.0 MiB"


def test_no_budget() -> None:
    """Is the default."""
    assert Config().budget is None
    assert MemoryBudget.parse("None") is None


@pytest.mark.parametrize(
    "text",
    ["", "lots", "-1", "0", "0.3", "8 parsecs", "0%", "101%", "1e99GiB", "GiB", "8GiB 2", "٨GiB"],
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
    alone = resources.host_bytes()
    assert alone > 1 << 28
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert CostSettings().device_bytes("cpu") == alone // 4
