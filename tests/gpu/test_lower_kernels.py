"""Kernels in step graphs on CUDA: Triton's, in regions that Inductor compiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.passes.test_lower_kernels import IDIOMS, Head, Written, eager_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
lowerings = pytest.mark.parametrize("lowering", ["eager", "inductor"])


def check(model: nn.Module, *inputs: Tensor, kernel: str, lowering: str) -> None:
    """Compare a lowered step in float32 with the eager one in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    loss, grads = eager_step(model.double(), *wide)
    model.float().zero_grad()
    torch._dynamo.reset()
    options = {"lower_kernels": {"force": kernel}, "lower_regions": {"backend": lowering}}
    found = torch.compile(model, backend="fxzero", options=options)(*inputs)
    found.backward()
    assert abs(float(found - loss)) <= 1e-5 * abs(float(loss))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = float((parameter.grad - grads[name]).abs().max())
        assert error <= 1e-5 * float(grads[name].abs().max()), name


@lowerings
@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_idiom_becomes_its_kernel(idiom: str, lowering: str) -> None:
    kernel, function, shapes = IDIOMS[idiom]
    torch.manual_seed(0)
    model, x = Written(function, *shapes).cuda(), torch.randn(2, 3, 8, device="cuda")
    check(model, x, kernel=kernel, lowering=lowering)


@lowerings
@pytest.mark.parametrize("kernel", ["linear_cross_entropy", "softmax_cross_entropy"])
def test_losses(kernel: str, lowering: str) -> None:
    torch.manual_seed(0)
    target = torch.randint(1000, (2, 5), device="cuda")
    x = torch.randn(2, 5, 8, device="cuda")
    check(Head(8, 1000).cuda(), x, target, kernel=kernel, lowering=lowering)
