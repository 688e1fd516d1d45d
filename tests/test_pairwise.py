"""`tests.pairwise` drops cases, and no pair of values."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairwise import Case, pairwise


def pairs_of(cases: list[Case]) -> set[tuple[int, object, int, object]]:
    """Which values of which dimensions meet."""
    return {
        (i, case[i], j, case[j])
        for case in cases
        for i, j in itertools.combinations(range(len(case)), 2)
    }


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_every_two_values_meet(sizes: list[int]) -> None:
    """As in the product, in no more cases than it has, none of them twice, in its order."""
    dimensions = [range(size) for size in sizes]
    product = list(itertools.product(*dimensions))
    cases = pairwise(*dimensions)
    assert pairs_of(cases) == pairs_of(product)
    assert cases == [case for case in product if case in set(cases)]
    assert cases == pairwise(*dimensions)


def test_it_is_worth_it() -> None:
    """81 cases of four dimensions of three values are a few more than nine."""
    assert len(pairwise(*["abc"] * 4)) <= 12


def test_cases_that_are_named_are_there() -> None:
    """And count: what they cover is not covered again."""
    named = [("a", 2), ("b", 1)]
    assert pairwise("ab", (1, 2), always=named) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    cases = pairwise("ab", (1, 2), "xy", always=[("b", 2, "y")])
    assert ("b", 2, "y") in cases
    assert len(cases) < 8


def test_a_case_that_is_none_is_refused() -> None:
    """A value that a dimension no longer has."""
    with pytest.raises(KeyError):
        pairwise("ab", (1, 2), always=[("c", 1)])
