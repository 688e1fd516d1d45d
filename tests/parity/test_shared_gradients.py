"""One gradient for two parameters, and several for one: each is reduced once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import fxzero
from tests.pairwise import pairwise
from tests.parity.harness import Pools
from tests.parity.models import Example, regression_loss, vectors
from tests.parity.sharded import FLOAT64, TIGHT, batches_of
from tests.parity.training import (
    adamw,
    assert_same,
    assert_same_trace,
    build,
    full_parameters,
    rows_of_rank,
    train,
)
from tests.tiers import exhaustive, in_two_tiers


class SumOfTwo(nn.Module):
    """Two weights that are added up before they are used: their gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 4)."""
        weight = self.first.weight + self.second.weight
        return nn.functional.linear(x, weight, self.first.bias + self.second.bias)


class Block(nn.Module):
    """Enough parameters that the sums of their gradients would be worth a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to the same."""
        return x + self.down(self.up(self.norm(x)).relu())


class Recurrence(nn.Module):
    """Equal layers that are all called again, in the other direction too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 4)."""
        for layer in (*self.layers, *self.layers, *reversed(self.layers)):
            x = layer(x)
        return self.out(x)


EXAMPLES = {
    kind.__name__: Example(kind.__name__, kind, vectors, regression_loss)
    for kind in (SumOfTwo, Recurrence)
}


CASES = pairwise(tuple(EXAMPLES), (0, 1, 2, 3), ("loop", "step"), always=[("SumOfTwo", 0, "loop")])


@pytest.mark.parametrize(
    ("example", "zero", "door"),
    [
        *in_two_tiers([case for case in CASES if case[0] == "SumOfTwo"]),
        *exhaustive(*(case for case in CASES if case[0] == "Recurrence")),
    ],
)
def test_each_gradient_is_reduced_once(ranks: Pools, example: str, zero: int, door: str) -> None:
    """By default settings, against eager training on the whole batch."""
    ranks(2).run(train_and_compare, example, zero, door, {})


def test_of_layers_that_are_called_again(ranks: Pools) -> None:
    """By torch's own kernels."""
    options = {"lower_regions": {"backend": "eager"}}
    ranks(2).run(train_and_compare, "Recurrence", 0, "step", options)


def train_and_compare(name: str, zero: int, door: str, options: dict[str, Any]) -> None:
    """Job."""
    example = EXAMPLES[name]
    batches = batches_of(example, 2)
    mine = [rows_of_rank(batch) for batch in batches]
    expected = train(build(example, FLOAT64), example.loss, batches)
    model = build(example, FLOAT64)
    fxzero.shard(model, zero=zero)
    if door == "loop":
        model.compile(backend="fxzero", options=options)
        assert_same_trace(train(model, example.loss, mine), expected, TIGHT)
        return
    optimizer, loss_fn = adamw(model.parameters()), nn.functional.mse_loss
    step = fxzero.compile_step(model, optimizer, loss_fn, options=options)
    for batch in mine:
        step(batch["x"], batch["y"])
    assert_same(full_parameters(model), expected.parameters, TIGHT)
