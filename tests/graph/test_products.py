"""Products of two dtypes, which fake tensors take and kernels do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero import CaptureError
from fxzero.inspect import capture


class Mixed(nn.Module):
    """A linear layer whose parameters are of another dtype than its input."""

    def __init__(self, what: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=what == "linear").to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (batch, 4, 8)."""
        return self.layer(x).float().mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        """A batch in float32."""
        return (torch.randn(batch_size, 4, 8),)


@pytest.mark.parametrize("what", ["plain", "linear"])
@pytest.mark.parametrize("step", [False, True])
def test_a_product_of_two_dtypes_is_refused_where_it_is_made(what: str, step: bool) -> None:
    """Before anything is estimated of a step that cannot run; the message has the line."""
    with pytest.raises(CaptureError, match=r"test_products\.py.*bf16\[.*f32\[|f32\[.*bf16\["):
        capture(lambda: Mixed(what), zero=3, world_size=2, step=step)


class Three(nn.Module):
    """Layers on lines of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8).bfloat16() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Rows (batch, 8)."""
        x = self.a(x)  # first
        x = self.b(x)
        return self.c(x).float().mean()

    def example_inputs(self, batch_size: int) -> tuple[Tensor]:
        """A batch in float32."""
        return (torch.randn(batch_size, 8),)


def test_the_first_of_them_is_named() -> None:
    """Where the dtypes meet, and not in a gradient of what came out of it."""
    with pytest.raises(CaptureError, match=r"self\.a\(x\)"):
        capture(Three, zero=0, world_size=2, step=True)


@pytest.mark.parametrize("what", ["plain", "linear"])
def test_products_of_one_dtype_are_not(what: str) -> None:
    """The same model, all in one dtype."""
    assert capture(lambda: Mixed(what, torch.float32), zero=3, world_size=2).compilations


def test_a_step_that_trains_says_it_too() -> None:
    """In words of the model, and not of a kernel's in the middle of a compiled step."""
    model = fxzero.shard(Mixed("plain"), zero=0)
    step = fxzero.compile_step(model, torch.optim.AdamW(model.parameters(), fused=True))
    with pytest.raises(CaptureError, match="PyTorch multiplies, and adds a bias, in one dtype"):
        step(torch.randn(2, 4, 8))
