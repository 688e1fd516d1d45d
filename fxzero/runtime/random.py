"""Random numbers of a scheduled graph: torch's own, from its default generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dropout_mask(shape: Sequence[int], rate: float) -> Tensor:
    """Which elements a dropout keeps, as torch's CPU kernel draws them: ones with 1 - `rate`."""
    return torch.empty(tuple(shape), dtype=torch.bool).bernoulli_(1.0 - rate)


dropout_mask.draws_random_numbers = True  # type: ignore[attr-defined]  # see graph.operators
