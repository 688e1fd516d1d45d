"""Fewer cases than a product: every two values of different dimensions still meet in one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

Case = tuple[Any, ...]
_Pair = tuple[int, Any, int, Any]


def pairwise(*dimensions: Sequence[Any], always: Iterable[Case] = ()) -> list[Case]:
    """Cases in which each value of a dimension occurs with each value of every other one.

    A mistake that shows where two values meet is seen by one of them, whatever the others are.
    Greedy: the next case is the one with most pairs that are new, the first of them in the order
    of the product, so that the same dimensions always give the same cases.

    Args:
        dimensions: the values of each; they can be hashed.
        always: cases that are wanted anyway, because somebody names them.
    """
    cases = list(dict.fromkeys(always))
    product = list(itertools.product(*dimensions))
    new = {case: _pairs(case) for case in product}
    left = set().union(*new.values())
    for case in cases:
        left -= _pairs(case)
    while left:
        best, most = product[0], 0
        for case, pairs in new.items():
            if len(pairs) > most:  # no pair is new again: fewer are left of these, if any
                pairs &= left
                if len(pairs) > most:
                    best, most = case, len(pairs)
        cases.append(best)
        left -= new[best]
    order = {case: i for i, case in enumerate(product)}
    return sorted(cases, key=order.__getitem__)


def _pairs(case: Case) -> set[_Pair]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)}
