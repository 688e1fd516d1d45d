"""Cases in two tiers: none is lost, and each value is met in every run."""

from __future__ import annotations

import itertools
from typing import Any

from tests.tiers import exhaustive, in_two_tiers

CASES = [*itertools.product("abc", (0, 1), ({}, {"x": 1}))]


def of_every_run(parameters: list[Any]) -> list[tuple[Any, ...]]:
    return [parameter.values for parameter in parameters if not parameter.marks]


def test_no_case_is_lost() -> None:
    """They stand where they stood, and their marks say which of them are for later."""
    found = in_two_tiers(CASES)
    assert [parameter.values for parameter in found] == CASES
    marks = {mark.name for parameter in found for mark in parameter.marks}
    assert marks == {"exhaustive"}


def test_every_value_is_in_every_run() -> None:
    """In as few cases as the largest dimension has values."""
    found = of_every_run(in_two_tiers(CASES))
    for position in range(3):
        values = [repr(case[position]) for case in found]
        assert set(values) == {repr(case[position]) for case in CASES}
    assert len(found) == 3


def test_cases_that_somebody_names() -> None:
    """Beside them only what has not occurred."""
    named = [CASES[-1], CASES[-2]]
    found = of_every_run(in_two_tiers(CASES, always=named))
    assert {*map(repr, named)} < {*map(repr, found)}
    assert len(found) == 4


def test_cheap_cases_come_first() -> None:
    """Where the values are new all the same."""
    found = of_every_run(in_two_tiers(CASES, cost=lambda case: 10 if case[1] and case[2] else 1))
    assert not any(case[1] and case[2] for case in found)


def test_values_that_are_cases() -> None:
    assert of_every_run(in_two_tiers([3, 1])) == [(3,), (1,)]
    assert [parameter.values for parameter in exhaustive(3, (1, 2))] == [(3,), (1, 2)]
