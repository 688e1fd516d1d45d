"""Gradients that share memory, or have other strides than their parameters, in whole steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import fxzero

EAGER = {"lower_regions": {"backend": "eager"}}


class Sum(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a loss."""
        return (x @ (self.a + self.b)).square().mean()


def test_a_gradient_of_two_parameters_is_clipped_once() -> None:
    """As the ordinary loop clips it: both lie in the same memory here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours, theirs = Sum().double(), Sum().double()
    theirs.load_state_dict(ours.state_dict())
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = fxzero.compile_step(ours, mine, clip_grad_norm=0.1, options=EAGER)
    for _ in range(2):
        x = torch.randn(8, 4, dtype=torch.float64)
        step(x)
        theirs(x).backward()
        clip_grad_norm_(theirs.parameters(), 0.1)
        other.step()
        other.zero_grad()
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-13)


def test_sums_of_gradients_in_other_strides() -> None:
    """Channels last, over micro-batches: the sum is laid out like its parameter."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours, theirs = (
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        ).to(torch.float64, memory_format=torch.channels_last)
        for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = fxzero.compile_step(ours, mine, F.cross_entropy, micro_batches=2, options=EAGER)
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    target = torch.randint(0, 5, (8,))
    step(x, target)
    F.cross_entropy(theirs(x), target).backward()
    other.step()
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-13)
