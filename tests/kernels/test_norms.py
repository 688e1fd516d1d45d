"""Norms against their float64 references.

Bounds: with m and r the mean and the reciprocal deviation of a row s, the normalized row n is
made of two terms, s · r and m · r, which cancel where the mean is large. Both carry the errors of
two sums over the row (the mean's, then the variance's) and of some operations. The mean's error δ
does not reach the variance to first order, since Σ (s − m) = 0, and δ² stays below what is
counted as long as |m| · r · u is small. Gradients repeat this inside a third sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels.launch import num_programs
from fxzero.kernels.norms import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.kernels.checking import DEVICE, check_close, double, each_dtype, each_size, random

EPS = 1e-5


@dataclass(frozen=True)
class Norm:
    """One kernel, called alike: ``(x, residual, weight, bias) → (y, s)``."""

    run: Callable[..., tuple[Tensor, Tensor]]
    centered: bool = False
    adds: bool = False

    def reference(self, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.centered:
            return layer_norm_reference(s, weight, bias, EPS)[0]
        return rms_norm_reference(s, weight, EPS)[0]

    def inputs(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
        """x, residual, weight and bias; None for those that it does not take."""
        return [
            random(*shape, dtype=dtype, grad=True),
            random(*shape, dtype=dtype, grad=True) if self.adds else None,
            random(shape[-1], dtype=dtype, grad=True),
            random(shape[-1], dtype=dtype, grad=True) if self.centered else None,
        ]


NORMS = {
    "rms_norm": Norm(lambda x, r, w, b: (rms_norm(x, w, EPS), x)),
    "add_rms_norm": Norm(lambda x, r, w, b: add_rms_norm(x, r, w, EPS), adds=True),
    "layer_norm": Norm(lambda x, r, w, b: (layer_norm(x, w, b, EPS), x), centered=True),
    "add_layer_norm": Norm(
        lambda x, r, w, b: add_layer_norm(x, r, w, b, EPS), centered=True, adds=True
    ),
}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())


def check_norm(
    norm: Norm, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> None:
    """See that results and gradients are what the reference makes of the sum that was stored."""
    before = [None if t is None else t.detach().clone() for t in (x, residual, weight, bias)]
    y, s = norm.run(x, residual, weight, bias)
    assert y.dtype is x.dtype
    assert y.is_contiguous()
    dy, ds_out = torch.randn_like(y), torch.randn_like(s)
    if norm.adds:
        terms = [x.detach().double(), residual.detach().double()]
        size = sum(t.abs() for t in terms)
        check_close(s, sum(terms), scale=size, operations=1)
    leaves = [t for t in (x, residual, weight, bias) if t is not None]
    outputs, grads = ((y, s), (dy, ds_out)) if norm.adds else ((y,), (dy,))
    found = list(torch.autograd.grad(outputs, leaves, grads))
    for tensor, old in zip((x, residual, weight, bias), before, strict=True):
        assert old is None or torch.equal(tensor, old)

    s64 = s.detach().double().requires_grad_()
    weight64, bias64 = ([None] if t is None else double(t) for t in (weight, bias))
    leaves64 = [t for t in (s64, *weight64, *bias64) if t is not None]
    y64 = norm.reference(s64, *weight64, *bias64)
    ds64, *expected = torch.autograd.grad(y64, leaves64, dy.double())
    if norm.adds:
        ds64 = ds64 + ds_out.double()

    with torch.no_grad():
        length = x.shape[-1]
        mean = s64.mean(-1, keepdim=True) if norm.centered else torch.zeros_like(s64)
        r = torch.rsqrt((s64 - mean).square().mean(-1, keepdim=True) + EPS)
        n = (s64.abs() + mean.abs()) * r
        scale = n if weight is None else n * weight.double().abs()
        scale = scale if bias is None else scale + bias.double().abs()
        check_close(y, y64, scale=scale, operations=12, terms=length**2)

        g = dy.double().abs()
        g = g if weight is None else g * weight.double().abs()
        scale = g + n * (g * n).mean(-1, keepdim=True)
        scale = (scale + g.mean(-1, keepdim=True) if norm.centered else scale) * r
        scale = scale + ds_out.double().abs() if norm.adds else scale
        for ds in found[: 2 if norm.adds else 1]:
            check_close(ds, ds64, scale=scale, operations=20, terms=length**3)
            assert ds.dtype is x.dtype

        rows = x.numel() // length
        in_turn = math.ceil(rows / num_programs(x, rows))
        scales = [] if weight is None else [(dy.double().abs() * n).flatten(0, -2).sum(0)]
        scales += [] if bias is None else [dy.double().abs().flatten(0, -2).sum(0)]
        for grad, grad64, scale in zip(
            found[len(found) - len(scales) :], expected, scales, strict=True
        ):
            # Every program adds its rows one after the other; then programs are added.
            check_close(grad, grad64, scale=scale, operations=12 + in_turn, terms=length**2 * rows)


@each_norm
@each_dtype
@each_size
def test_norm(norm: Norm, dtype: torch.dtype, size: int) -> None:
    check_norm(norm, *norm.inputs(3, size, dtype=dtype))


@each_norm
@pytest.mark.parametrize("shape", [(31,), (2, 1, 3, 31)], ids=["one row", "rank 4"])
def test_norm_of_any_rank(norm: Norm, shape: tuple[int, ...]) -> None:
    x, residual, weight, bias = norm.inputs(1, *shape)
    x, residual = (None if t is None else t.detach()[0].requires_grad_() for t in (x, residual))
    y, s = norm.run(x, residual, weight, bias)
    parameters = (None if t is None else t.detach().double() for t in (weight, bias))
    expected = norm.reference(s.detach().double(), *parameters)
    check_close(y.detach(), expected, operations=20, terms=shape[-1] ** 2)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@each_norm
def test_many_rows_share_programs(norm: Norm) -> None:
    check_norm(norm, *norm.inputs(101, 5))


@each_norm
def test_rows_that_lie_apart_and_columns_that_do(norm: Norm) -> None:
    for view in (
        lambda t: t[:, ::2, :31],
        lambda t: t.transpose(0, 2)[:31].transpose(0, 2),
        lambda t: t[:1, :, :31].expand(3, -1, -1),
        lambda t: t[..., :1].expand(-1, -1, 31),
    ):
        tensors = norm.inputs(3, 4, 62)
        x, residual = (None if t is None else view(t) for t in tensors[:2])
        weight, bias = (None if t is None else t[::2] for t in tensors[2:])
        check_norm(norm, x, residual, weight, bias)


@each_norm
def test_without_weight_or_bias(norm: Norm) -> None:
    x, residual, weight, bias = norm.inputs(3, 31)
    check_norm(norm, x, residual, None, None)
    check_norm(norm, x, residual, weight, None)
    if norm.centered:
        check_norm(norm, x, residual, None, bias)


@each_norm
@pytest.mark.parametrize("value", [0.0, 3.0], ids=["zeros", "threes"])
def test_rows_of_one_number(norm: Norm, value: float) -> None:
    x, residual, weight, bias = norm.inputs(3, 1000)
    check_norm(norm, torch.full_like(x, value, requires_grad=True), residual, weight, bias)
    if norm.adds:
        zeros = torch.zeros_like(residual, requires_grad=True)
        check_norm(norm, torch.full_like(x, value, requires_grad=True), zeros, weight, bias)


@each_norm
def test_mean_a_thousand_deviations_away(norm: Norm) -> None:
    x, *rest = norm.inputs(3, 1000)
    check_norm(norm, (x.detach() + 1000).requires_grad_(), *rest)


@each_norm
@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
def test_parameters_of_another_dtype(norm: Norm) -> None:
    """The result has x's dtype, as torch's norms have it; gradients are rounded to their own."""
    x, residual, weight, bias = norm.inputs(9, 127, dtype=torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    assert torch.nn.functional.rms_norm(x, x.shape[-1:], weight).dtype is torch.bfloat16
    check_norm(norm, x, residual, weight, bias)
    if norm.centered:
        check_norm(norm, x, residual, weight.bfloat16(), bias.detach().float().requires_grad_())
        check_norm(norm, x, residual, None, bias.detach().float().requires_grad_())


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_gradient_through_the_residual_alone(name: str) -> None:
    x, residual, weight, bias = NORMS[name].inputs(3, 31)
    _, s = NORMS[name].run(x, residual, weight, bias)
    ds = torch.randn_like(s)
    found = torch.autograd.grad(s, [x, residual, weight], ds)
    for grad, expected in zip(found, (ds, ds, torch.zeros_like(weight)), strict=True):
        assert torch.equal(grad, expected)


@each_norm
def test_gradient_of_some_inputs_only(norm: Norm) -> None:
    x, residual, weight, bias = norm.inputs(3, 31)
    all_inputs = [t for t in (x, residual, weight, bias) if t is not None]
    dy = random(3, 31)
    all_grads = torch.autograd.grad(norm.run(x, residual, weight, bias)[0], all_inputs, dy)
    for one, expected in zip(all_inputs, all_grads, strict=True):
        inputs = [t if t is None or t is one else t.detach() for t in (x, residual, weight, bias)]
        found = torch.autograd.grad(norm.run(*inputs)[0], one, dy)[0]
        assert torch.equal(found, expected)


@each_norm
@pytest.mark.parametrize("shape", [(0, 31), (3, 0, 31)])
def test_no_rows(norm: Norm, shape: tuple[int, ...]) -> None:
    x, residual, weight, bias = norm.inputs(*shape)
    y, s = norm.run(x, residual, weight, bias)
    assert y.shape == s.shape == shape
    dx, dw = torch.autograd.grad(y.sum() + s.sum(), [x, weight])
    assert dx.shape == shape
    assert not dw.any()


@each_norm
def test_norm_without_triton(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors where nothing interprets, laid out as the compiled graph was told."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("tests.kernels.checking.DEVICE", "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, weight, bias = norm.inputs(4, 31, 3, dtype=dtype)
        x = x.detach().transpose(0, 1).requires_grad_()
        residual = None if residual is None else residual.detach().transpose(0, 1).requires_grad_()
        check_norm(norm, x, residual, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("adds", "centered", "parameters"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, False)],
)
def test_operators(dtype: torch.dtype, adds: bool, centered: bool, parameters: bool) -> None:
    x, residual = (random(3, 4, 7, dtype=dtype).transpose(0, 1).requires_grad_() for _ in "xr")
    weight, bias = (random(7, dtype=dtype, grad=True) if parameters else None for _ in "wb")
    inputs = (x, residual if adds else None, weight, bias, EPS, centered)
    torch.library.opcheck(torch.ops.fxzero.norm, inputs)
    with torch.no_grad():
        _, s, mean, rstd = torch.ops.fxzero.norm(*inputs)
        s = s if adds else x
        ds_out = torch.randn_like(s) if adds else None
        backward = (torch.randn_like(x), ds_out, s, weight, mean, rstd, centered, parameters)
        torch.library.opcheck(torch.ops.fxzero.norm_backward, backward)


@each_norm
def test_gradients_in_float64(norm: Norm) -> None:
    inputs = norm.inputs(3, 5, dtype=torch.float64)
    present = [t for t in inputs if t is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        y, s = norm.run(*(None if t is None else next(rest) for t in inputs))
        return (y, s) if norm.adds else (y,)

    assert torch.autograd.gradcheck(run, present)


@each_norm
def test_compiled(norm: Norm) -> None:
    inputs = norm.inputs(3, 31)
    leaves = [t for t in inputs if t is not None]
    compiled = torch.compile(norm.run, fullgraph=True, backend="aot_eager")
    dy, ds = random(3, 31), random(3, 31)
    results = []
    for run in (norm.run, compiled):
        y, s = run(*inputs)
        results.append([y, s, *torch.autograd.grad((y, s), leaves, (dy, ds))])
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


BAD = {
    "x": [
        (lambda x, w: rms_norm(x[0, 0]), "0-dim"),
        (lambda x, w: rms_norm(x[:, :0]), "empty rows"),
        (lambda x, w: layer_norm(x.new_empty(1, 65_537)), "long rows"),
        (lambda x, w: layer_norm(x.int()), "int"),
        (lambda x, w: rms_norm(x.tolist()), "list"),
        (lambda x, w: layer_norm(x.to_sparse()), "sparse"),
    ],
    "eps": [
        (lambda x, w: rms_norm(x, w, -1e-6), "negative"),
        (lambda x, w: layer_norm(x, w, eps=math.nan), "not a number"),
        (lambda x, w: add_rms_norm(x, x, eps=math.inf), "infinite"),
        (lambda x, w: add_layer_norm(x, x, eps="small"), "string"),
    ],
    "residual": [
        (lambda x, w: add_rms_norm(x, None), "None"),
        (lambda x, w: add_layer_norm(x, x.to_sparse()), "sparse"),
        (lambda x, w: add_rms_norm(x, x[:1]), "shape"),
        (lambda x, w: add_rms_norm(x, x.int()), "int"),
        (lambda x, w: add_layer_norm(x, x.bfloat16()), "another dtype"),
        (lambda x, w: add_layer_norm(x, x.to("meta")), "device"),
    ],
    "weight": [
        (lambda x, w: rms_norm(x, w[:1]), "shape"),
        (lambda x, w: rms_norm(x, w.tolist()), "list"),
        (lambda x, w: add_rms_norm(x, x, w.int()), "int"),
        (lambda x, w: layer_norm(x, w.to("meta")), "device"),
    ],
    "bias": [
        (lambda x, w: layer_norm(x, w, w[:1]), "shape"),
        (lambda x, w: add_layer_norm(x, x, w, w.int()), "int"),
        (lambda x, w: layer_norm(x, w, w.to("meta")), "device"),
    ],
}


@pytest.mark.parametrize(
    ("argument", "call"),
    [pytest.param(a, call, id=f"{a}, {what}") for a, each in BAD.items() for call, what in each],
)
def test_argument_that_does_not_fit(argument: str, call: Callable[..., object]) -> None:
    with pytest.raises(KernelError, match=rf"norm: {argument} must be"):
        call(torch.zeros(3, 31, device=DEVICE), torch.zeros(31, device=DEVICE))
