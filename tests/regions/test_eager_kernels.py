"""Regions of torch's own kernels compute what was traced, whatever lies where in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close


class NormOfTransposed(nn.Module):
    """BatchNorm over the features of a series, as PatchTST has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, L, 16) → a loss``."""
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        loss: Tensor = self.head(x.reshape(-1, 16)).square().mean()
        return loss


class LossOfTransposed(nn.Module):
    """The backward of this loss is traced with other strides than its kernel gives."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, L, 16) → a loss``."""
        found = self.head(x).transpose(1, 2) * x.mean((1, 2), keepdim=True)
        target = x[..., :4].transpose(1, 2).contiguous()
        return nn.functional.mse_loss(found, target)


@pytest.mark.parametrize("build", [NormOfTransposed, LossOfTransposed])
@pytest.mark.parametrize("training", [True, False])
def test_a_view_of_what_lies_otherwise_than_traced_is_eagers(
    training: bool, build: type[nn.Module]
) -> None:
    torch._dynamo.reset()
    model = build().double().train(training)
    expected = copy.deepcopy(model)
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    options = {"lower_regions": {"backend": "eager"}}
    torch.compile(model, backend="fxzero", options=options)(x).backward()
    expected(x).backward()
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert actual.grad is not None
        assert_close(actual.grad, wanted.grad, rtol=1e-12, atol=1e-15)
    for actual, wanted in zip(model.buffers(), expected.buffers(), strict=True):
        assert_close(actual, wanted, rtol=1e-12, atol=1e-15)
