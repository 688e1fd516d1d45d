"""GELU, and the gated activations SwiGLU and GEGLU.

    gelu(x) = x · Φ(x)
            ≈ x · (1 + tanh(z)) / 2 = x / (1 + exp(−2z)),  z = √(2/π) · (x + 0.044715 x³)
    silu(x) = x / (1 + exp(−x))
              (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2)
    swiglu(gate, up) = silu(gate) · up,  geglu(gate, up) = gelu(gate) · up
              (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6)

All are f(x) = x · P(x), with P the normal or a logistic distribution function. Backward:

    f'(x) = P(x) + x · P'(x)
    dgate = dy · up · f'(gate),  dup = dy · f(gate)                              (up = 1 in gelu)

One read of each input and one write of each output: backward keeps gate and up, and computes
the rest again. Both may be halves of one projection's output: rows may lie apart.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxzero.kernels.launch import (
    as_rows,
    check,
    check_float,
    check_shape,
    check_tensor,
    check_together,
    contiguous,
    launch,
    runs_on_triton,
)

_BLOCK = 1024

# In a kernel these stand right of a tensor: the interpreter would make ``constexpr · tensor`` a
# constexpr.
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_BELL = tl.constexpr(1 / math.sqrt(2 * math.pi))
_SCALE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715)
_FAR = tl.constexpr(30.0)


@triton.jit
def _logistic(x):
    """``1 / (1 + exp(−x))`` and its derivative, where nothing overflows or cancels."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e), e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _distribution(x, KIND: tl.constexpr):
    """P(x) and P'(x)."""
    if KIND == "silu":
        p, slope = _logistic(x)
    elif KIND == "gelu":
        p = 0.5 + 0.5 * tl.erf(x * _SQRT_HALF)
        slope = tl.exp(-0.5 * x * x) * _BELL
    else:
        # P is 0 or 1 and flat long before, and the cube of a large number is infinite.
        x = tl.minimum(tl.maximum(x, -_FAR), _FAR)
        square = x * x * _CUBIC
        p, slope = _logistic((x + square * x) * _SCALE)
        slope *= (1.0 + 3.0 * square) * _SCALE
    return p, slope


@triton.jit
def _forward(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, length, blocks,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    at = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    p, _ = _distribution(gate, KIND)
    y = gate * p
    if GATED:
        y *= tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * length + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, length, blocks,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    at = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    p, slope = _distribution(gate, KIND)
    dgate = dy * (p + gate * slope)
    if GATED:
        dgate *= tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
        dup = dy * (gate * p)
        tl.store(dup_ptr + row * length + at, dup.to(dup_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + row * length + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """`gelu` in plain torch and in the dtype of its argument."""
    return torch.nn.functional.gelu(x, approximate=approximate)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in plain torch and in the dtype of its arguments."""
    return torch.nn.functional.silu(gate) * up


def geglu_reference(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """`geglu` in plain torch and in the dtype of its arguments."""
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _plain_distribution(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """P(x) and P'(x) in plain torch."""
    if kind == "gelu":
        return torch.special.ndtr(x), _BELL.value * torch.exp(-0.5 * x.square())
    chain: Tensor | float = 1.0
    if kind == "gelu_tanh":
        x = x.clamp(-_FAR.value, _FAR.value)
        chain = _SCALE.value * (1 + 3 * _CUBIC.value * x.square())
        x = _SCALE.value * (x + _CUBIC.value * x**3)
    p = torch.sigmoid(x)
    return p, p * torch.sigmoid(-x) * chain


def _as_few_rows(*tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors of one shape as rows; as a single row each, where nothing lies between rows."""
    rows = [None if t is None else as_rows(t) for t in tensors]
    if all(t is None or t.is_contiguous() for t in rows):
        return [None if t is None else t.view(1, -1) for t in rows]
    return rows


def _tiles(rows: Tensor) -> tuple[int, int, int]:
    """Programs, programs for a row, and elements of a program."""
    length = rows.shape[1]
    block = min(triton.next_power_of_2(length), _BLOCK)
    blocks = triton.cdiv(length, block)
    return rows.shape[0] * blocks, blocks, block


@torch.library.custom_op(
    "fxzero::activation",
    mutates_args=(),
    schema="(Tensor gate, Tensor? up, str kind) -> Tensor y",
)
def _activation(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """Forward. ``kind`` is silu, gelu or gelu_tanh; without ``up`` nothing is gated."""
    y = _activation_fake(gate, up, kind)
    if y.numel() == 0:
        return y
    if not runs_on_triton(gate):
        work = gate.contiguous().to(torch.promote_types(gate.dtype, torch.float32))
        found = work * _plain_distribution(work, kind)[0]
        return (found if up is None else found * up.contiguous()).to(gate.dtype)
    gate_rows, up_rows = _as_few_rows(gate, up)
    assert gate_rows is not None
    programs, blocks, block = _tiles(gate_rows)
    launch(_forward, (programs,))(
        gate_rows, up_rows, y, gate_rows.stride(0), 0 if up_rows is None else up_rows.stride(0),
        gate_rows.shape[1], blocks,
        KIND=kind, GATED=up is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return y


@_activation.register_fake
def _activation_fake(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "fxzero::activation_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor gate, Tensor? up, str kind) -> (Tensor dgate, Tensor dup)",
)
def _activation_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; that of an ``up`` that does not exist is empty."""
    dgate, dup = _activation_backward_fake(dy, gate, up, kind)
    if dgate.numel() == 0:
        return dgate, dup
    if not runs_on_triton(gate):
        work = torch.promote_types(gate.dtype, torch.float32)
        grad, x, factor = dy.contiguous().to(work), gate.contiguous().to(work), contiguous(up)
        p, slope = _plain_distribution(x, kind)
        inner = grad * (p + x * slope)
        if factor is not None:
            inner, dup = inner * factor, (grad * (x * p)).to(gate.dtype)
        return inner.to(gate.dtype), dup
    dy_rows, gate_rows, up_rows = _as_few_rows(dy, gate, up)
    assert dy_rows is not None
    assert gate_rows is not None
    programs, blocks, block = _tiles(gate_rows)
    launch(_backward, (programs,))(
        dy_rows, gate_rows, up_rows, dgate, dup,
        dy_rows.stride(0), gate_rows.stride(0), 0 if up_rows is None else up_rows.stride(0),
        gate_rows.shape[1], blocks,
        KIND=kind, GATED=up is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return dgate, dup


@_activation_backward.register_fake
def _activation_backward_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(gate, memory_format=torch.contiguous_format),
        gate.new_empty(gate.shape if up is not None else (0,)),
    )


def _setup(ctx, inputs, output) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, dy):
    gate, up = ctx.saved_tensors
    dgate, dup = torch.ops.fxzero.activation_backward(dy, gate, up, ctx.kind)
    return dgate, (None if up is None else dup), None


_activation.register_autograd(_differentiate, setup_context=_setup)


def _gelu_kind(kernel: str, approximate: str) -> str:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    check(approximate in kinds, kernel, "approximate", "'none' or 'tanh'", repr(approximate))
    return kinds[approximate]


def _check_gated(kernel: str, gate: Tensor, up: Tensor) -> None:
    check_tensor(kernel, gate=gate, up=up)
    check_float(kernel, gate=gate, up=up)
    check_shape(kernel, "up", up, gate.shape)
    check(up.dtype == gate.dtype, kernel, "up", f"{gate.dtype}, as gate is", up.dtype)
    check_together(kernel, gate=gate, up=up)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """``x · Φ(x)``, with Φ the normal distribution function.

    Args:
        x: of any shape.
        approximate: ``"none"``, or ``"tanh"`` for ``x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``.

    Raises:
        KernelError: a dtype or an `approximate` that does not exist.
    """
    check_tensor("gelu", x=x)
    check_float("gelu", x=x)
    return torch.ops.fxzero.activation(x, None, _gelu_kind("gelu", approximate))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up``.

    Args:
        gate, up: of one shape, any; halves of one tensor's last dim are read where they lie.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit.
    """
    _check_gated("swiglu", gate, up)
    return torch.ops.fxzero.activation(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) · up``.

    Args:
        gate, up: of one shape, any; halves of one tensor's last dim are read where they lie.
        approximate: that of `gelu`.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit, or an `approximate` that does
            not exist.
    """
    _check_gated("geglu", gate, up)
    return torch.ops.fxzero.activation(gate, up, _gelu_kind("geglu", approximate))
