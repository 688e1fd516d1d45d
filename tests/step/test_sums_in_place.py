"""Gradients of micro-batches are added up in the first one's memory, unless it is another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from tests.tiers import exhaustive


class ItsInput(torch.autograd.Function):
    """The product of two vectors, whose gradients are each the other vector itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        # Eager autograd would add the next gradient to the batch, and refuses to.
        return (x if torch.compiler.is_compiling() else x.clone()), None


class Gradients(nn.Module):
    """Parameters whose gradients are one tensor, parts of one, a view, expanded, or an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(6))
        self.upper, self.lower = (nn.Parameter(torch.randn(3, 4)) for _ in "ab")
        self.one, self.same = (nn.Parameter(torch.randn(6, 6)) for _ in "ab")
        self.shift = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.randn(()))
        self.seen = nn.Parameter(torch.randn(4))
        self.seen_all = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → ()."""
        hidden = x @ torch.cat([self.upper, self.lower]).t()
        hidden = torch.tanh(hidden @ (self.one + self.same).t() + self.bias)
        loss = hidden.pow(2).mean() * self.scale + self.shift.sum()
        return loss + ItsInput.apply(self.seen, x[0]) + ItsInput.apply(self.seen_all, x)


@pytest.mark.parametrize("backend", ["eager", *exhaustive("inductor")])
def test_sums(backend: str) -> None:
    """The gradients of the eager loop, and the batch as it was."""
    model, reference = Gradients().double(), Gradients().double()
    step = fxzero.compile_step(
        fxzero.shard(model, zero=0),
        torch.optim.SGD(model.parameters(), lr=0.1),
        micro_batches=3,
        options={"lower_regions": {"backend": backend}},
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for seed in range(2):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        before = x.clone()
        step(x)
        for part in x.chunk(3):
            (reference(part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(x, before)
        for (name, mine), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            error = float((mine - theirs).detach().abs().max())
            assert error <= 1e-12 * float(theirs.detach().abs().max()), name
