"""What is left of a bound, spent."""

from __future__ import annotations

from dataclasses import replace

from fxzero.schedule.repetition import Value, closure, fastest_within, pareto
from fxzero.schedule.spare import keep_again
from tests.schedule.test_repetition import random_values

CHAIN = [
    Value("x", 1, 1.0, (), is_needed=True, may_repeat=False),
    Value("a", 4, 10.0, (0,)),
    Value("b", 8, 50.0, (1,), is_needed=True),
    Value("c", 8, 20.0, (0,), is_needed=True),
]


def test_what_takes_most_time_for_its_bytes_is_kept() -> None:
    """With what was repeated for it alone; a smaller one where a larger one has no place."""
    at = closure(CHAIN, {1, 2, 3})
    assert [keep_again(CHAIN, at, spare) for spare in (3, 4, 8, 15, 16)] == [
        frozenset(),
        {1},
        {2},
        {2},
        {2, 3},
    ]


def test_what_is_kept_for_it_alone_makes_room() -> None:
    """Its source, or a part of it that is gathered, goes."""
    chain = [Value("x", 6, 1.0, (), may_repeat=False), Value("y", 8, 50.0, (0,), is_needed=True)]
    at = closure(chain, {1})
    assert at.kept == (0,)
    assert keep_again(chain, at, 1) == frozenset()
    assert keep_again(chain, at, 2) == {1}
    chain[0] = replace(chain[0], part_bytes=3, part_us=2.0)
    in_parts = closure(chain, {1}, {0})
    assert [keep_again(chain, in_parts, spare) for spare in (4, 5)] == [frozenset(), {1}]


def test_parts_of_a_list_are_kept_together() -> None:
    """One of them alone saves nothing."""
    values = [
        Value("x", 1, 1.0, (), is_needed=True, may_repeat=False),
        Value("list", 0, 30.0, (0,), may_keep=False),
        Value("first", 8, 0.0, (1,), is_needed=True),
        Value("second", 2, 0.0, (1,), is_needed=True),
    ]
    at = closure(values, {1, 2, 3})
    assert keep_again(values, at, 9) == frozenset()
    assert keep_again(values, at, 10) == {2, 3}


def test_bounds_on_random_graphs() -> None:
    """From the least that can be kept to everything: never more than there is, seldom slower for
    more, and most often little slower than the best choice."""
    slower, ratios = 0, []
    for seed in range(200):
        values = [replace(v, part_us=None) for v in random_values(seed)]
        least, most = pareto(values)[-1], closure(values, ())
        before = least.us
        for part in range(5):
            spare = (most.kept_bytes - least.kept_bytes) * part // 4
            kept = keep_again(values, least, spare)
            found = closure(values, set(least.repeated) - kept)
            assert found.kept_bytes <= least.kept_bytes + spare
            assert found.us <= least.us
            slower += found.us > before
            before = found.us
            best = fastest_within(values, least.kept_bytes + spare)
            assert best is not None
            ratios.append((found.us + 10) / (best.us + 10))
    assert slower <= 20
    assert sorted(ratios)[len(ratios) * 9 // 10] < 1.3
