"""Activations against their float64 references.

Bounds: every result is a product of a few numbers of which only P(x), or f'(x), is a sum: of two
terms of which neither is above 1 and |x · P'(x)|. exp, erf and a division count as two operations;
an error in the argument of P is damped by P', whose product with the argument stays below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels.activations import (
    geglu,
    geglu_reference,
    gelu,
    gelu_reference,
    swiglu,
    swiglu_reference,
)
from fxzero.kernels.launch import as_rows
from tests.kernels.checking import DEVICE, check_close, double, each_dtype, each_size, random


@dataclass(frozen=True)
class Activation:
    """One kernel and its reference, called with x, or with gate and up."""

    run: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: int

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Inputs that reach both tails of P."""
        tensors = [random(1, *shape)[0] for _ in range(self.inputs)]
        return [(3 * t).to(dtype).requires_grad_() for t in tensors]


ACTIVATIONS = {
    "gelu": Activation(gelu, gelu_reference, 1),
    "gelu_tanh": Activation(
        lambda x: gelu(x, approximate="tanh"), lambda x: gelu_reference(x, "tanh"), 1
    ),
    "swiglu": Activation(swiglu, swiglu_reference, 2),
    "geglu": Activation(geglu, geglu_reference, 2),
    "geglu_tanh": Activation(
        lambda gate, up: geglu(gate, up, approximate="tanh"),
        lambda gate, up: geglu_reference(gate, up, "tanh"),
        2,
    ),
}
each_activation = pytest.mark.parametrize(
    "activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys()
)


def check_activation(activation: Activation, *inputs: Tensor) -> None:
    """See that result and gradients are the reference's."""
    before = [t.detach().clone() for t in inputs]
    y = activation.run(*inputs)
    assert y.dtype is inputs[0].dtype
    assert y.is_contiguous()
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, inputs, dy)
    assert all(torch.equal(t, old) for t, old in zip(inputs, before, strict=True))

    inputs64, dy64 = double(*inputs), dy.double()
    y64 = activation.reference(*inputs64)
    expected = torch.autograd.grad(y64, inputs64, dy64)
    x, up = (inputs64[0].abs(), inputs64[-1].abs() if len(inputs) == 2 else 1.0)
    check_close(y, y64.detach(), scale=x * up, operations=12)
    # |x · P'(x)| is below 1 for every kind.
    for grad, grad64, scale in zip(found, expected, (2 * up, x), strict=False):
        assert grad.dtype is inputs[0].dtype
        scale = dy64.abs() * scale
        check_close(grad, grad64, scale=scale, operations=16)


@each_activation
@each_dtype
@each_size
def test_activation(activation: Activation, dtype: torch.dtype, size: int) -> None:
    check_activation(activation, *activation.random(3, size, dtype=dtype))


@each_activation
def test_halves_of_a_projection(activation: Activation) -> None:
    """Rows lie apart, and are read where they lie."""
    for size in (31, 1500):
        halves = random(2, 3, 2 * size, grad=True).chunk(2, -1)
        assert all(as_rows(t).data_ptr() == t.data_ptr() for t in halves)
        check_activation(activation, *halves[: activation.inputs])


@each_activation
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 2),
        lambda t: t[..., ::2],
        lambda t: t[:, :1].expand(-1, 3, -1),
        lambda t: t[..., :1].expand(-1, -1, 31),
    ],
    ids=["transposed", "columns apart", "one row again", "one column again"],
)
def test_layouts(activation: Activation, view: Callable[[Tensor], Tensor]) -> None:
    check_activation(activation, *(view(t) for t in activation.random(3, 5, 62)))
    first, *others = activation.random(3, 5, 62)
    others = [view(t).detach().clone().requires_grad_() for t in others]
    check_activation(activation, view(first), *others)


@each_activation
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 3, 31)], ids=str)
def test_any_rank(activation: Activation, shape: tuple[int, ...]) -> None:
    check_activation(activation, *activation.random(*shape))


@each_activation
@pytest.mark.parametrize("shape", [(0,), (0, 31), (3, 0)], ids=str)
def test_nothing(activation: Activation, shape: tuple[int, ...]) -> None:
    inputs = activation.random(*shape)
    y = activation.run(*inputs)
    assert y.shape == shape
    assert all(g.shape == shape for g in torch.autograd.grad(y, inputs, torch.empty_like(y)))


@each_activation
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_large_numbers(activation: Activation) -> None:
    """P is 0 or 1 there: nothing overflows, and no product of 0 and infinity is met."""
    x = torch.tensor([1e2, -1e2, 1e5, -1e5, 1e13, -1e13, 1e30, -1e30, 3e38, -3e38], device=DEVICE)
    x.requires_grad_()
    y = activation.run(x, *[torch.ones_like(x)] * (activation.inputs - 1))
    assert torch.allclose(y, x.clamp(min=0), rtol=1e-6, atol=1e-37)
    slope = torch.autograd.grad(y.sum(), x)[0]
    assert torch.allclose(slope, (x > 0).float(), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("name", ["gelu_tanh", "swiglu", "geglu_tanh"])
def test_small_tails(name: str) -> None:
    """1 + tanh would cancel on the left; a logistic function does not.

    Its argument is rounded, which moves it by as many units as its size is.
    """
    activation = ACTIVATIONS[name]
    for number in (-1.0, -2.0, -3.0, -4.0):
        x = torch.tensor([number], device=DEVICE)
        inputs = [x] * activation.inputs
        y64 = activation.reference(*double(*inputs))
        argument = abs(number) if name == "swiglu" else 1.6 * (-number + 0.0448 * -(number**3))
        check_close(activation.run(*inputs), y64, operations=12 + int(6 * argument))


@each_activation
def test_backward_keeps_its_inputs_only(activation: Activation) -> None:
    kept = []
    inputs = activation.random(3, 31)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), id):
        activation.run(*inputs)
    assert kept == [t.data_ptr() for t in inputs]


@each_activation
def test_activation_without_triton(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors where nothing interprets, laid out as the compiled graph was told."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("tests.kernels.checking.DEVICE", "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        check_activation(activation, *(t.t() for t in activation.random(3, 31, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "gated"), [("silu", True), ("gelu", False), ("gelu_tanh", True)])
def test_operators(dtype: torch.dtype, kind: str, gated: bool) -> None:
    gate, other = (random(4, 3, 7, dtype=dtype).transpose(0, 1).requires_grad_() for _ in "gu")
    up = other if gated else None
    torch.library.opcheck(torch.ops.fxzero.activation, (gate, up, kind))
    backward = (
        random(3, 4, 7, dtype=dtype),
        gate.detach(),
        up if up is None else up.detach(),
        kind,
    )
    torch.library.opcheck(torch.ops.fxzero.activation_backward, backward)


@each_activation
def test_gradients_in_float64(activation: Activation) -> None:
    inputs = activation.random(3, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(activation.run, inputs)
    found, expected = activation.run(*inputs).detach(), activation.reference(*inputs).detach()
    check_close(found, expected, roundings=8, operations=0)


@each_activation
def test_compiled(activation: Activation) -> None:
    inputs = list(random(3, 62, grad=True).chunk(2, -1))[: activation.inputs]
    compiled = torch.compile(activation.run, fullgraph=True, backend="aot_eager")
    dy = random(3, 31)
    results = []
    for run in (activation.run, compiled):
        y = run(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, dy)])
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda x: gelu(x.int())),
        ("x", lambda x: gelu(x.tolist())),
        ("x", lambda x: gelu(x.to_sparse())),
        ("approximate", lambda x: gelu(x, "exact")),
        ("approximate", lambda x: geglu(x, x, "sigmoid")),
        ("gate", lambda x: swiglu(x.int(), x)),
        ("gate", lambda x: geglu(x.int(), x)),
        ("up", lambda x: swiglu(x, x[:1])),
        ("up", lambda x: swiglu(x, None)),
        ("up", lambda x: geglu(x, x.bfloat16())),
        ("up", lambda x: swiglu(x, x.int())),
        ("up", lambda x: geglu(x, x.to("meta"))),
    ],
)
def test_argument_that_does_not_fit(argument: str, call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(KernelError, match=rf"glu: {argument} must be|gelu: {argument} must be"):
        call(torch.zeros(3, 31, device=DEVICE))
