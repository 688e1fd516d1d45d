"""Dropout's masks come first, the rest of the layer is one region, and no bit changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero.compiler.compilation import Compilation
from fxzero.compiler.pipelines import loop_passes
from fxzero.graph import Role, StepGraph
from fxzero.runtime.random import dropout_mask
from tests.tiers import exhaustive
from tests.tracing import find, observed


class Dropping(nn.Module):
    """A layer with two dropouts in its middle."""

    def __init__(self, rate: float = 0.25) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.first = nn.Dropout(rate)
        self.second = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to the same."""
        return x + self.second(self.down(self.first(self.up(x).relu())))


def lowered(model: nn.Module, x: Tensor) -> tuple[Tensor, list[StepGraph]]:
    """What the compiled model returns, and the graphs that ran."""
    kept: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        kept.append(compilation)

    torch._dynamo.reset()
    with observed(keep):
        compiled = torch.compile(model, backend="fxzero")
        torch.manual_seed(7)
        result = compiled(x)
        result.square().sum().backward()
    return result, [side for compilation in kept for side in compilation.sides]


@pytest.mark.parametrize("rate", [0.25, *exhaustive(0.9)])
def test_the_same_bits(rate: float) -> None:
    """Masks, products and the generator's state afterwards; sums of gradients to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(Dropping(rate))
    x = torch.randn(32, 8)
    result, _ = lowered(model, x)
    after = torch.rand(1)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    expected = model(x)
    expected.square().sum().backward()
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(result == x, expected == x), "other elements were dropped"
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        assert mine is not None
        assert parameter.grad is not None
        assert (mine - parameter.grad).abs().max() <= 1e-5 * max(parameter.grad.abs().max(), 1e-6)


def test_one_region() -> None:
    """The layer is not taken apart around its dropouts."""
    _, (forward, _) = lowered(nn.Sequential(Dropping()), torch.randn(4, 8))
    names = [n.name for n in forward.nodes() if n.target is dropout_mask]
    assert len(names) == 2
    assert not find(forward, torch.ops.aten.native_dropout.default)
    regions = list(forward.nodes(role=Role.REGION))
    assert len(regions) == 1


def test_eager_lowering_keeps_torchs_kernel() -> None:
    """There is nothing to fuse with."""
    config = fxzero.Config.from_options({"lower_regions": {"backend": "eager"}})
    assert "draw_masks" not in [p.name for p in loop_passes(config).lowering]


def test_a_mask_is_what_dropout_draws() -> None:
    """From the same generator state."""
    x = torch.ones(5, 7)
    torch.manual_seed(1)
    mask = dropout_mask([5, 7], 0.3)
    torch.manual_seed(1)
    assert torch.equal(mask, nn.functional.dropout(x, 0.3) != 0)
