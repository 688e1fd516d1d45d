"""RMS norm and layer norm over the last dim, with the residual add fused.

    s = x + residual                                            (s = x without one)
    rms_norm:    y = s · r · w,            r = 1 / sqrt(mean(s²) + eps)
                 (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4)
    layer_norm:  y = (s − m) · r · w + b,  m = mean(s), r = 1 / sqrt(mean((s − m)²) + eps)
                 (Ba et al. 2016, "Layer Normalization", eq. 4)

Backward, with n = (s − m) · r, g = dy · w, and ds' what flows back into s itself:

    ds = r · (g − n · mean(g · n) − mean(g)) + ds'              (no mean(g) in rms_norm)
    dw = Σ_rows dy · n,  db = Σ_rows dy

One read of each input and one write of each output: the norm's statistics stay in registers.
Sums over rows are taken in float32, by each program over its rows, then over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxzero.kernels.launch import (
    MAX_ROW,
    as_rows,
    check,
    check_float,
    check_number,
    check_shape,
    check_tensor,
    check_together,
    contiguous,
    launch,
    num_programs,
    row_block,
    runs_on_triton,
)


@triton.jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,
    x_stride, residual_stride, length, eps,
    CENTERED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < length
    s = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual_ptr + row * residual_stride + at, mask=inside, other=0.0).to(
            tl.float32
        )
        tl.store(s_ptr + row * length + at, s.to(s_ptr.dtype.element_ty), mask=inside)
        # What backward will read is what was stored.
        s = s.to(s_ptr.dtype.element_ty).to(tl.float32)
    if CENTERED:
        mean = tl.sum(s, axis=0) / length
        tl.store(mean_ptr + row, mean)
        s = tl.where(inside, s - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(s * s, axis=0) / length + eps)
    tl.store(rstd_ptr + row, rstd)
    y = s * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * length + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, ds_out_ptr, ds_ptr, dw_ptr, db_ptr,
    dy_stride, s_stride, ds_out_stride, rows, length,
    CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < length
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    row = program
    # A range of tensors is more than the interpreter of Triton 3.6 can do with NumPy 2.4.
    while row < rows:
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
        n = tl.load(s_ptr + row * s_stride + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if CENTERED:
            n = tl.where(inside, n - tl.load(mean_ptr + row), 0.0)
        n *= rstd
        g = dy
        if HAS_WEIGHT:
            g = dy * weight
            dw += dy * n
        if HAS_BIAS:
            db += dy
        ds = g - n * (tl.sum(g * n, axis=0) / length)
        if CENTERED:
            ds -= tl.sum(g, axis=0) / length
        ds *= rstd
        if HAS_DS:
            ds += tl.load(ds_out_ptr + row * ds_out_stride + at, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(ds_ptr + row * length + at, ds.to(ds_ptr.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    if HAS_WEIGHT:
        tl.store(dw_ptr + program * length + at, dw, mask=inside)
    if HAS_BIAS:
        tl.store(db_ptr + program * length + at, db, mask=inside)


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` and ``x + residual``, in plain torch and in the dtype of its arguments."""
    s = x if residual is None else x + residual
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight), s


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`layer_norm` and ``x + residual``, in plain torch and in the dtype of its arguments."""
    s = x if residual is None else x + residual
    return torch.nn.functional.layer_norm(s, s.shape[-1:], weight, bias, eps), s


@torch.library.custom_op(
    "fxzero::norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered)"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
)
def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward. ``s`` is empty without a residual, ``mean`` unless centered."""
    y, s, mean, rstd = _norm_fake(x, residual, weight, bias, eps, centered)
    rows, length = rstd.numel(), x.shape[-1]
    if rows == 0:
        return y, s, mean, rstd
    if not runs_on_triton(x):
        # Contiguous, so that every output is, as `_norm_fake` promises.
        n = x.contiguous()
        if residual is not None:
            n = s = n + residual.contiguous()
        n = n.to(rstd.dtype)
        if centered:
            mean = n.mean(-1)
            n = n - mean[..., None]
        rstd = torch.rsqrt(n.square().mean(-1) + eps)
        n = n * rstd[..., None]
        n = n if weight is None else n * weight
        return (n if bias is None else n + bias).to(x.dtype), s, mean, rstd
    weight, bias = contiguous(weight), contiguous(bias)
    x_rows = as_rows(x)
    residual_rows = x_rows if residual is None else as_rows(residual)
    block, warps = row_block(length)
    launch(_forward, (rows,))(
        x_rows, residual_rows, weight, bias, y, s, mean, rstd,
        x_rows.stride(0), residual_rows.stride(0), length, eps,
        CENTERED=centered, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, s, mean, rstd


@_norm.register_fake
def _norm_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    work = torch.promote_types(x.dtype, torch.float32)
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(x, memory_format=contiguous),
        x.new_empty(x.shape if residual is not None else (0,)),
        x.new_empty(x.shape[:-1] if centered else (0,), dtype=work),
        x.new_empty(x.shape[:-1], dtype=work),
    )


@torch.library.custom_op(
    "fxzero::norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor? ds_out, Tensor s, Tensor? weight, Tensor mean, Tensor rstd,"
    " bool centered, bool has_bias) -> (Tensor ds, Tensor dw, Tensor db)",
)
def _norm_backward(
    dy: Tensor,
    ds_out: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``s``, weight and bias, those of the last two in `rstd`'s dtype.

    Those that do not exist are empty.
    """
    ds, dw, db = _norm_backward_fake(dy, ds_out, s, weight, mean, rstd, centered, has_bias)
    rows, length = rstd.numel(), s.shape[-1]
    if rows == 0:
        return ds, dw.zero_(), db.zero_()
    if not runs_on_triton(s):
        grad, n = dy.contiguous().to(rstd.dtype), s.contiguous().to(rstd.dtype)
        n = (n - mean[..., None] if centered else n) * rstd[..., None]
        g = grad if weight is None else grad * weight
        inner = g - n * (g * n).mean(-1, keepdim=True)
        inner = inner - g.mean(-1, keepdim=True) if centered else inner
        inner = inner * rstd[..., None]
        inner = inner if ds_out is None else inner + ds_out
        if weight is not None:
            dw = (grad * n).reshape(rows, length).sum(0)
        if has_bias:
            db = grad.reshape(rows, length).sum(0)
        return inner.to(s.dtype), dw, db
    weight, mean, rstd = contiguous(weight), mean.contiguous(), rstd.contiguous()
    dy_rows, s_rows = as_rows(dy), as_rows(s)
    ds_out_rows = dy_rows if ds_out is None else as_rows(ds_out)
    programs = num_programs(s, rows)
    partial = [g.new_empty((programs, length) if len(g) else (0, 0)) for g in (dw, db)]
    block, warps = row_block(length)
    launch(_backward, (programs,))(
        dy_rows, s_rows, weight, mean, rstd, ds_out_rows, ds, *partial,
        dy_rows.stride(0), s_rows.stride(0), ds_out_rows.stride(0), rows, length,
        CENTERED=centered, HAS_WEIGHT=weight is not None, HAS_BIAS=has_bias,
        HAS_DS=ds_out is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return ds, *(p.sum(0) for p in partial)


@_norm_backward.register_fake
def _norm_backward_fake(
    dy: Tensor,
    ds_out: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(s, memory_format=torch.contiguous_format),
        rstd.new_empty(s.shape[-1:] if weight is not None else (0,)),
        rstd.new_empty(s.shape[-1:] if has_bias else (0,)),
    )


def _setup(ctx, inputs, output) -> None:
    x, residual, weight, bias, _, ctx.centered = inputs
    _, s, mean, rstd = output
    ctx.has_residual, ctx.bias_dtype = residual is not None, getattr(bias, "dtype", None)
    ctx.save_for_backward(s if ctx.has_residual else x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, ds_out, *_):
    s, weight, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(s) if dy is None else dy
    ds_out = ds_out if ctx.has_residual else None
    has_bias = ctx.bias_dtype is not None
    ds, dw, db = torch.ops.fxzero.norm_backward(
        dy, ds_out, s, weight, mean, rstd, ctx.centered, has_bias
    )
    residual = ds if ctx.has_residual else None
    dw = None if weight is None else dw.to(weight.dtype)
    return ds, residual, dw, (db.to(ctx.bias_dtype) if has_bias else None), None, None


_norm.register_autograd(_differentiate, setup_context=_setup)


def _check(
    kernel: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    check_tensor(kernel, x=x)
    check_number(kernel, "eps", eps, least=0)
    check(x.dim() >= 1 and 0 < x.shape[-1] <= MAX_ROW, kernel, "x",
          f"of 1 to {MAX_ROW} elements in its last dim", list(x.shape))  # fmt: skip
    check_float(kernel, x=x, residual=residual, weight=weight, bias=bias)
    check_shape(kernel, "residual", residual, x.shape)
    if residual is not None:
        same = residual.dtype == x.dtype
        check(same, kernel, "residual", f"{x.dtype}, as x is", residual.dtype)
    check_shape(kernel, "weight", weight, x.shape[-1:])
    check_shape(kernel, "bias", bias, x.shape[-1:])
    check_together(kernel, x=x, residual=residual, weight=weight, bias=bias)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dim.

    Args:
        x: ``[..., n]``, n up to 65,536.
        weight: ``[n]``. The result has x's dtype, whatever that of the weight.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit, or an eps below 0.
    """
    _check("rms_norm", x, None, weight, None, eps)
    return torch.ops.fxzero.norm(x, None, weight, None, eps, False)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual)``, and the sum, which goes on as the residual stream.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit, or an eps below 0.
    """
    check_tensor("add_rms_norm", residual=residual)
    _check("add_rms_norm", x, residual, weight, None, eps)
    y, s, _, _ = torch.ops.fxzero.norm(x, residual, weight, None, eps, False)
    return y, s


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """``(x − mean(x)) / sqrt(var(x) + eps) · weight + bias`` over the last dim.

    Args:
        x: ``[..., n]``, n up to 65,536.
        weight, bias: ``[n]``. The result has x's dtype, whatever theirs.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit, or an eps below 0.
    """
    _check("layer_norm", x, None, weight, bias, eps)
    return torch.ops.fxzero.norm(x, None, weight, bias, eps, True)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """``layer_norm(x + residual)``, and the sum, which goes on as the residual stream.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit, or an eps below 0.
    """
    check_tensor("add_layer_norm", residual=residual)
    _check("add_layer_norm", x, residual, weight, bias, eps)
    y, s, _, _ = torch.ops.fxzero.norm(x, residual, weight, bias, eps, True)
    return y, s
