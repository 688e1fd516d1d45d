"""Nets that are small enough to read what passes make of them: the documentation's examples.

    fxzero inspect examples.small_nets:two_layers --cluster dgx_h100 --diff shard_params

Widths are multiples of 8, so that eight ranks share rows evenly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Net(nn.Module):
    """Layers, one after the other, and a loss: the mean square of what comes out."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        """A batch of rows."""
        return (torch.randn(batch_size, WIDTH),)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (B, WIDTH) → a scalar."""
        for layer in self.children():
            x = layer(x)
        return x.square().mean()


def wider() -> nn.Linear:
    """A matrix without a bias, to four times the width."""
    return nn.Linear(WIDTH, 4 * WIDTH, bias=False)


def narrower() -> nn.Linear:
    """And back."""
    return nn.Linear(4 * WIDTH, WIDTH, bias=False)


def two_layers() -> Net:
    """Two matrices with a ReLU between them."""
    return Net(up=wider(), act=nn.ReLU(), down=narrower())


def with_gelu() -> Net:
    """Two matrices with a GELU between them, which is cheaper to repeat than to keep."""
    return Net(up=wider(), act=nn.GELU(), down=narrower())


def with_dropout() -> Net:
    """Two matrices with dropout between them."""
    return Net(up=wider(), drop=nn.Dropout(0.1), down=narrower())


class RMSNorm(nn.Module):
    """A norm as models write it out: x / √(mean(x²) + ε) · w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Rows (B, WIDTH) → the same."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def with_norm() -> Net:
    """A norm and a matrix."""
    return Net(norm=RMSNorm(), up=wider())


class Block(nn.Module):
    """A layer as most are: two matrices, and around them a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = wider()
        self.down = narrower()

    def forward(self, x: Tensor) -> Tensor:
        """Rows (B, WIDTH) → the same."""
        return x + self.down(torch.relu(self.up(x)))


def deep() -> Net:
    """Nine equal layers, of which most passes see five."""
    return Net(layers=nn.Sequential(*(Block() for _ in range(9))))
