"""Calls that go over the end of a chunk of frames, and a chunk with room for all of them."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from fxzero._compat import with_room_for_frames

CALLS = 200


def nothing() -> None:
    """Takes a frame."""


def faults() -> int:
    """How many pages of memory a loop of calls is given."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int, measure: Callable[[], int]) -> int:
    """Call something below a number of frames."""
    return measure() if depth == 0 else at_depth(depth - 1, measure)


def worst(measure: Callable[[], int]) -> int:
    """The most faults at any of the depths at which a program may stand."""
    return max(at_depth(depth, measure) for depth in range(300))


def test_somewhere_each_call_maps_memory() -> None:
    """Or the remedy below is for nothing."""
    assert worst(faults) >= CALLS


def test_nowhere_behind_a_large_chunk() -> None:
    """Whatever stands above it, and at hundreds of frames below it."""
    assert worst(with_room_for_frames(faults)) < CALLS / 10
    assert with_room_for_frames(worst)(faults) < CALLS / 10


def test_arguments_results_and_errors_pass() -> None:
    """It is the same function."""

    @with_room_for_frames
    def divide(a: float, *, by: float) -> float:
        """A quotient."""
        return a / by

    assert divide(6, by=4) == 1.5
    assert divide.__doc__ == "A quotient."
    with pytest.raises(ZeroDivisionError):
        divide(1, by=0)
