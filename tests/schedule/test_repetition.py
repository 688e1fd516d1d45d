"""What to keep and what to repeat, against an integer programme that knows the optimum."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from fxzero.schedule.repetition import (
    Value,
    closure,
    fastest_within,
    pareto,
)


def random_values(seed: int) -> list[Value]:
    """A forward of up to 14 values of all kinds."""
    rng = random.Random(seed)
    found = []
    for i in range(rng.randint(4, 14)):
        count = min(i, rng.choice([0, 1, 1, 1, 2, 2, 3]))
        found.append(
            Value(
                str(i),
                num_bytes=rng.choice([0, 1, 2, 3, 4, 8, 16, 20]) * 10 + rng.randint(0, 9),
                us=rng.choice([0, 1, 2, 5, 10, 30, 60]) + rng.random(),
                sources=tuple(sorted(rng.sample(range(i), count))),
                is_needed=rng.random() < 0.6,
                may_repeat=rng.random() < 0.9,
                part_bytes=rng.randint(1, 30),
                part_us=rng.choice([None, None, 0.5, 4.0, 20.0]),
            )
        )
    return found


def optimum(values: list[Value], most_bytes: int) -> float | None:
    """The least time within a bound, by an integer programme; None if nothing fits."""
    count = len(values)
    keep, part, repeat, need = (np.arange(count) + k * count for k in range(4))
    rows, least = [], []

    def at_least(bound: float, **terms: float) -> None:
        row = np.zeros(4 * count)
        for position, factor in terms.items():
            row[int(position[1:])] = factor
        rows.append(row)
        least.append(bound)

    for i, value in enumerate(values):
        ways = (keep[i], part[i], repeat[i])
        at_least(0, **{f"_{way}": 1 for way in ways}, **{f"_{need[i]}": -1})
        for source in value.sources:
            at_least(0, **{f"_{need[source]}": 1, f"_{repeat[i]}": -1})
    whole = {f"_{keep[i]}": -v.num_bytes for i, v in enumerate(values)}
    parts = {f"_{part[i]}": -v.part_bytes for i, v in enumerate(values)}
    at_least(-most_bytes, **whole, **parts)
    lower, upper = np.zeros(4 * count), np.ones(4 * count)
    for i, value in enumerate(values):
        lower[need[i]] = value.is_needed
        upper[repeat[i]] = value.may_repeat
        upper[keep[i]] = value.may_keep
        upper[part[i]] = value.part_us is not None
    cost = np.zeros(4 * count)
    cost[repeat] = [value.us for value in values]
    cost[part] = [value.part_us or 0 for value in values]
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), least, np.inf),
        integrality=np.ones(4 * count),
        bounds=Bounds(lower, upper),
    )
    return float(result.fun) if result.success else None


def test_the_solver_against_an_exact_one() -> None:
    """200 random graphs, each within a random bound: at most 1.05 of the optimum's time."""
    for seed in range(200):
        values = random_values(seed)
        most, least = closure(values, ()).kept_bytes, pareto(values)[-1].kept_bytes
        bound = int(least + (most - least) * random.Random(seed).random())
        best, found = optimum(values, bound), fastest_within(values, bound)
        assert found is not None
        assert best is not None
        assert found.kept_bytes <= bound
        assert found.us <= 1.05 * best + 1e-6, seed


def test_what_cannot_be_kept_within_a_bound() -> None:
    """Something random takes its bytes, whatever is allowed."""
    values = [Value("mask", 100, 1.0, (), is_needed=True, may_repeat=False)]
    assert fastest_within(values, 99) is None
    found = fastest_within(values, 100)
    assert found is not None
    assert found.kept == (0,)


def test_a_choice_follows_through() -> None:
    """Of a chain the last value is needed: it is repeated from what is kept, through a view."""
    chain = [
        Value("a", 10, 1.0),
        Value("b", 10, 2.0, (0,)),
        Value("view", 0, 0.0, (1,), may_keep=False),
        Value("c", 10, 4.0, (2,), is_needed=True),
    ]
    assert closure(chain, ()).kept == (3,)
    found = closure(chain, {3})
    assert (found.repeated, found.kept, found.us) == ((2, 3), (1,), 4.0)
    found = closure(chain, {1, 3})
    assert (found.repeated, found.kept, found.kept_bytes) == ((1, 2, 3), (0,), 10)


def test_points_are_convex() -> None:
    """Fewer bytes always take more time, at a price that rises."""
    for seed in range(30):
        points = pareto(random_values(seed))
        prices = [(b.us - a.us) / (a.kept_bytes - b.kept_bytes) for a, b in pairwise(points)]
        assert all(a.kept_bytes > b.kept_bytes for a, b in pairwise(points))
        assert prices == sorted(prices)


def test_a_part_instead_of_the_whole() -> None:
    """Where repeating takes longer than a gather, and only as far as it must be."""
    values = [
        Value("a", 80, 100.0, (), is_needed=True, part_bytes=10, part_us=6.0),
        Value("b", 80, 2.0, (0,), is_needed=True, part_bytes=10, part_us=6.0),
    ]
    found = [fastest_within(values, bound) for bound in (160, 159, 79, 9)]
    assert [f and (f.kept, set(f.in_parts), f.us) for f in found] == [
        ((0, 1), set(), 0.0),
        ((0,), set(), 2.0),
        ((0,), {0}, 8.0),
        ((), set(), 102.0),
    ]


def test_only_a_part() -> None:
    """What others have decided on: it is kept so whatever it costs."""
    value = Value("a", 80, 1.0, (), True, may_repeat=False, may_keep=False, part_us=50.0)
    assert closure([value], {0}).in_parts == {0}
    assert pareto([value])[0].us == 50.0
