# ruff: noqa: E501
"""Weights in blocks of columns: what is rewritten, decided and refused, and that it means the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxzero.compiler.run import run_passes
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.passes import Context, Pass, TileLinear
from fxzero.passes.tile_linear import Tiles
from tests import simulated_ranks, tracing
from tests.passes.test_meaning import assert_equal, graphs_of
from tests.tracing import JOINT, OUTLINED, of, run, texts, trace, words

_DOUBLE = {"dtype": torch.float64}


def tiled(max_bytes: int, passes: Sequence[Pass] = JOINT) -> list[Pass]:
    """All joint passes, with the one that this is about at its place."""
    names = [one.name for one in passes]
    place = names.index("recompute") + 1
    return [*passes[:place], TileLinear(max_bytes), *passes[place:]]


class Small(nn.Module):
    """A wide layer between narrow ones, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, **_DOUBLE)
        self.wide = nn.Linear(6, 10, **_DOUBLE)
        self.last = nn.Linear(10, 6, bias=False, **_DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        """(…, 6) → scalar."""
        return self.last(self.wide(self.first(x).relu()).relu()).square().sum()


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, padding_idx, **_DOUBLE)
        self.middle = nn.Linear(6, 6, **_DOUBLE)
        self.head = nn.Linear(6, 10, bias=False, **_DOUBLE)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """(4, 6) → scalar."""
        tokens = torch.arange(4) % 3
        return self.head(self.middle(x + self.embedding(tokens))).square().sum()


class Turned(nn.Module):
    """Weights as GPT-2 has them, (in, out): columns stand side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 7, **_DOUBLE))
        self.bias = nn.Parameter(torch.randn(7, **_DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        """(4, 6) → scalar."""
        return torch.addmm(self.bias, x, self.weight).square().sum()


class Twice(nn.Module):
    """One layer, applied twice, and on the left of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False, **_DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        """(4, 6) → scalar."""
        y = self.layer(self.layer(x).relu())
        return torch.mm(self.layer.weight, y.t()).sum()


small = of(lambda: Small().double(), 4, 6)


def double(make: Any, *shape: int) -> tracing.Build:
    """A model, and an input in float64."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        return make(), (torch.randn(*shape, dtype=torch.float64, requires_grad=True),)

    return build


_MODELS = {
    "small": double(Small, 4, 6),
    "deep-batch": double(Small, 2, 4, 6),
    "tied": double(Tied, 4, 6),
    "padding": double(lambda: Tied(1), 4, 6),
    "turned": double(Turned, 4, 6),
    "twice": double(Twice, 4, 6),
}


@pytest.mark.parametrize("passes", [JOINT, OUTLINED], ids=["operators", "pieces"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model", _MODELS)
def test_nothing_changes_in_meaning(model: str, world_size: int, passes: Sequence[Pass]) -> None:
    """On whole numbers, whose sums are exact in any order, after every pass, on rows that ranks
    have unequal numbers of; results are NaN before their wait and after their release."""
    graphs = graphs_of(_MODELS[model], 3, world_size)
    inputs = simulated_ranks.random_inputs(graphs)
    expected = simulated_ranks.run(graphs, inputs)
    contexts = [Context() for _ in graphs]
    facts: frozenset[Any] = frozenset()
    for step in tiled(8 * 12 * 2, passes):
        for graph, context in zip(graphs, contexts, strict=True):
            run_passes([step], graph, context, given=facts)
        facts |= step.provides
        if step.name == "tile_linear":
            assert graphs[0].blocks
        assert_equal(simulated_ranks.run(graphs, inputs), expected, step.name)
