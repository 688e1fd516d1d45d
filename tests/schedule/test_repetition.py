"""What to keep and what to repeat, against an integer programme that knows the optimum."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from fxzero.schedule.repetition import (
    Value,
    closure,
    crossers,
    fastest_within,
    fences_for,
    levels,
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
            )
        )
    return found


def optimum(values: list[Value], most_bytes: int) -> float | None:
    """The least time within a bound, by an integer programme; None if nothing fits."""
    count = len(values)
    keep, repeat, need = (np.arange(count) + k * count for k in range(3))
    rows, least = [], []

    def at_least(bound: float, **terms: float) -> None:
        row = np.zeros(3 * count)
        for position, factor in terms.items():
            row[int(position[1:])] = factor
        rows.append(row)
        least.append(bound)

    for i, value in enumerate(values):
        at_least(0, **{f"_{keep[i]}": 1, f"_{repeat[i]}": 1, f"_{need[i]}": -1})
        for source in value.sources:
            at_least(0, **{f"_{need[source]}": 1, f"_{repeat[i]}": -1})
    at_least(-most_bytes, **{f"_{keep[i]}": -v.num_bytes for i, v in enumerate(values)})
    lower, upper = np.zeros(3 * count), np.ones(3 * count)
    for i, value in enumerate(values):
        lower[need[i]] = value.is_needed
        upper[repeat[i]] = value.may_repeat
        upper[keep[i]] = value.may_keep
    cost = np.zeros(3 * count)
    cost[repeat] = [value.us for value in values]
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), least, np.inf),
        integrality=np.ones(3 * count),
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


def chain_of_layers(depth: int) -> list[Value]:
    """Layers of a residual stream (1), a wide product (8), what a cheap operator makes of it (8),
    and a narrow product (1); backward reads all but the last."""
    values = [Value("x", 10, 1.0, (), is_needed=True)]
    for layer in range(depth):
        x = len(values) - 1
        values += [
            Value(f"{layer}.up", 80, 100.0, (x,), is_needed=True),
            Value(f"{layer}.gelu", 80, 5.0, (x + 1,), is_needed=True),
            Value(f"{layer}.down", 10, 100.0, (x + 2,)),
            Value(f"{layer}.add", 10, 1.0, (x, x + 3), is_needed=True),
        ]
    return values


def test_levels_of_equal_layers() -> None:
    """Cheap values go first, those of the first layer before the others'; the end keeps what
    crosses from layer to layer."""
    values = chain_of_layers(6)
    found = levels(values)
    kept = found.kept_bytes
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(found)
    assert kept[0] == closure(values, ()).kept_bytes
    first = closure(values, found.at(1))
    assert [values[i].name for i in first.repeated] == ["0.gelu"]
    segments = len(found.fences)
    assert [values[i].name for i in closure(values, found.at(segments)).repeated] == [
        f"{layer}.gelu" for layer in range(segments)
    ]
    assert all(
        i < found.fences[-1] for i in found.at(found.main)
    )  # the last backward comes at once
    last = closure(values, found.at(len(found) - 1))
    assert last.kept_bytes < 6 * 20
    times = [closure(values, found.at(level)).us for level in range(len(found))]
    assert times == sorted(times)


def test_levels_keep_what_crosses_a_fence() -> None:
    """So that backward never repeats more than a segment at once."""
    values = chain_of_layers(12)
    found = levels(values)
    crossing = crossers(values, found.fences)
    assert crossing
    assert crossing.isdisjoint(found.at(len(found) - 1))


def test_fences_stand_where_little_crosses() -> None:
    """Behind a layer, not within."""
    values = chain_of_layers(8)
    for fence in fences_for(values, 2 * 180):
        crossing = crossers(values, [fence])
        assert sum(values[i].num_bytes for i in crossing) <= 20


def test_equal_layers_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred cost what four do."""
    import fxzero.schedule.repetition as module

    solved = []
    original = module.pareto

    def count(*arguments: object) -> object:
        solved.append(1)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "pareto", count)
    levels(chain_of_layers(96))
    assert len(solved) <= 4


def test_what_is_cheap_is_repeated_at_every_level() -> None:
    """The base of all levels stays."""
    values = chain_of_layers(3)
    base = {i for i, value in enumerate(values) if value.name.endswith("gelu")}
    found = levels(values, base)
    assert base == set(found.at(0))
    repeated = set(closure(values, found.at(len(found) - 1)).repeated)
    assert base <= repeated
