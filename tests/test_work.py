"""The measures of `tests.work` tell work that grows faster from work that does not."""

from __future__ import annotations

from tests.work import calls, growth


def test_calls_are_counted() -> None:
    """Those of Python and of C, and those inside of them."""

    def inner() -> int:
        return len([])

    assert calls(lambda: None) == 1
    assert (
        calls(lambda: [inner() for _ in range(10)]) - calls(lambda: [None for _ in range(10)]) == 20
    )


def test_growth_tells_squares_from_lines() -> None:
    """Ten times the size."""

    def line(count: int) -> int:
        return sum(i % 7 for i in range(100 * count))

    def square(count: int) -> int:
        return sum(sum(range(count)) for _ in range(count))

    assert growth(lambda: line(100), lambda: line(1000)) < 25
    assert growth(lambda: square(100), lambda: square(1000)) > 25
