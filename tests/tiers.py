"""Two tiers: what every run tries, and what is tried besides before a release.

Where many cases ask for one property, each of them tells little more than the first few. A run then
takes some in which every value of every parameter occurs; ``pytest -m exhaustive`` takes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.pairwise import Case


def exhaustive(*cases: Any) -> list[Any]:
    """``pytest.param`` of each case, for ``parametrize``: only an exhaustive run takes them."""
    return [pytest.param(*_tuple(case), marks=pytest.mark.exhaustive) for case in cases]


def in_two_tiers(
    cases: Sequence[Any],
    *,
    always: Iterable[Any] = (),
    cost: Callable[[Case], float] = lambda case: 1.0,
) -> list[Any]:
    """Cases for ``parametrize``, all but a few of which are `exhaustive`.

    Greedy: the next case of every run is the one with most values that are new for its cost, the
    first of them as they stand, until every value of every dimension has occurred.

    Args:
        cases: tuples of as many values; or values, each a case.
        always: those of every run anyway, because somebody names them.
        cost: about how long a case takes, compared with others.
    """
    given = list(map(_tuple, cases))
    new = [{(i, repr(value)) for i, value in enumerate(case)} for case in given]
    left = set().union(*new)
    chosen = [given.index(_tuple(case)) for case in always]
    for i in chosen:
        left -= new[i]
    while left:
        best = max(range(len(given)), key=lambda i: len(new[i] & left) / cost(given[i]))
        chosen.append(best)
        left -= new[best]
    every_run = set(chosen)
    return [
        pytest.param(*case) if i in every_run else exhaustive(case)[0]
        for i, case in enumerate(given)
    ]


def _tuple(case: Any) -> Case:
    return case if isinstance(case, tuple) else (case,)
