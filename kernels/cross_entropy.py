"""Softmax cross entropy over rows of logits, with label smoothing and z-loss.

For one row x of V logits and its target t, with e the smoothing and z the weight of the z-loss
(Szegedy et al. 2016, section 7; Chowdhery et al. 2022, "PaLM", section 5):

    lse  = log Σ_j exp(x_j)
    loss = lse − (1 − e) · x_t − e/V · Σ_j x_j + z · lse²
    dx_j = dloss · ((1 + 2 z · lse) · exp(x_j − lse) − (1 − e) · [j = t] − e/V)

Forward reads the logits once, with a running maximum (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax", algorithm 3); backward reads them once and writes the
gradient once: neither the softmax nor its logarithm is ever stored.

A row whose target is `ignore_index` has loss 0 and gradient 0. A target outside of [0, V) is an
error on CPU, and makes the loss NaN on a GPU, where raising would mean waiting for it.
"""

from __future__ import annotations

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
    launch,
    runs_on_triton,
)

BLOCK = 4096
"""Logits that a program looks at together."""


@triton.jit
def _forward(
    x_ptr, target_ptr, loss_ptr, lse_ptr, x_stride, ignore_index, smoothing, z_loss,
    LENGTH: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    at = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    normalizer = tl.zeros((), tl.float32)
    total = tl.zeros((), tl.float32)
    # A constant: of other bounds the interpreter of Triton 3.6 with NumPy 2.4 makes no range.
    for start in range(0, LENGTH, BLOCK):
        inside = start + at < LENGTH
        x = tl.load(x_ptr + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(x, axis=0))
        # A row of −inf so far: exp(−inf − −inf) would be NaN.
        base = tl.where(largest == float("-inf"), 0.0, largest)
        normalizer = normalizer * tl.exp(before - base) + tl.sum(tl.exp(x - base), axis=0)
        if SMOOTHS:
            total += tl.sum(tl.where(inside, x, 0.0), axis=0)
    lse = largest + tl.log(normalizer)
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < LENGTH)
    x_target = tl.load(x_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    loss = lse - (1.0 - smoothing) * x_target + z_loss * lse * lse
    if SMOOTHS:
        loss -= smoothing / LENGTH * total
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _backward(
    x_ptr, target_ptr, lse_ptr, dloss_ptr, dx_ptr, x_stride, dx_stride, length,
    ignore_index, smoothing, z_loss, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    dx = (1.0 + 2.0 * z_loss * lse) * tl.exp(x - lse) - smoothing / length
    dx -= tl.where(at == target, 1.0 - smoothing, 0.0)
    dx = tl.where(target == ignore_index, 0.0, dx * tl.load(dloss_ptr + row))
    tl.store(dx_ptr + row * dx_stride + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def softmax_cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`softmax_cross_entropy` in plain torch and in the dtype of the logits."""
    rows, targets = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = torch.nn.functional.cross_entropy(
        rows,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    kept = targets != ignore_index
    loss = loss + z_loss * torch.where(kept, rows.logsumexp(-1).square(), 0.0)
    return reduce_loss(loss.reshape(target.shape), target, ignore_index, reduction)


def reduce_loss(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The losses of rows, their sum, or their mean over the rows that are not ignored."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    count = (target != ignore_index).sum()
    # As in torch, the mean of no rows is NaN and its gradient 0: dividing by 0 would make that NaN.
    return torch.where(count > 0, loss.sum() / count.clamp(min=1), torch.nan)


def loss_and_lse(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel on ``[rows, V]`` logits with contiguous rows."""
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    lse = torch.empty_like(loss)
    if len(logits):
        length = logits.shape[1]
        block = min(BLOCK, triton.next_power_of_2(length))
        launch(_forward, (len(logits),))(
            logits, target, loss, lse, logits.stride(0), ignore_index, smoothing, z_loss,
            LENGTH=length, SMOOTHS=smoothing != 0.0, BLOCK=block,
            num_warps=8 if block > 1024 else 4,
        )  # fmt: skip
    return loss, lse


def write_gradient(
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    """Launch the backward kernel; `out` may be the logits themselves."""
    if len(logits):
        length = logits.shape[1]
        block = min(BLOCK, triton.next_power_of_2(length))
        launch(_backward, (len(logits), triton.cdiv(length, block)))(
            logits, target, lse, dloss, out, logits.stride(0), out.stride(0), length,
            ignore_index, smoothing, z_loss, BLOCK=block, num_warps=8 if block > 1024 else 4,
        )  # fmt: skip
    return out


def check_targets(kernel: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """See that every target is a class or ignored; on CPU, where looking costs nothing."""
    if target.is_cuda or not target.numel():
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    asked = f"within [0, {classes}) or ignore_index={ignore_index}"
    found = f"{len(wrong)} others, the first {wrong[:1].tolist()}"
    check(not len(wrong), kernel, "target", asked, found)


@torch.library.custom_op(
    "fxzero::softmax_cross_entropy",
    mutates_args=(),
    schema="(Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss)"
    " -> (Tensor loss, Tensor lse)",
)
def _cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Losses of rows and their log-sum-exp, float32 unless the logits are float64."""
    check_targets("softmax_cross_entropy", target, logits.shape[-1], ignore_index)
    if runs_on_triton(logits):
        loss, lse = loss_and_lse(
            as_rows(logits), target.reshape(-1).contiguous(), ignore_index, label_smoothing, z_loss
        )
        return loss.reshape(target.shape), lse.reshape(target.shape)
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kept = target != ignore_index
    lse = x.logsumexp(-1)
    x_target = x.gather(-1, torch.where(kept, target, 0)[..., None])[..., 0]
    loss = lse - (1 - label_smoothing) * x_target + z_loss * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * x.mean(-1)
    return torch.where(kept, loss, 0.0), lse


@_cross_entropy.register_fake
def _cross_entropy_fake(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    work = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(target.shape, dtype=work), logits.new_empty(target.shape, dtype=work)


@torch.library.custom_op(
    "fxzero::softmax_cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor dloss, Tensor logits, Tensor target, Tensor lse, int ignore_index,"
    " float label_smoothing, float z_loss) -> Tensor",
)
def _cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    if runs_on_triton(logits):
        rows = as_rows(logits)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        target, lse, dloss = (t.reshape(-1).contiguous() for t in (target, lse, dloss))
        write_gradient(out, rows, target, lse, dloss, ignore_index, label_smoothing, z_loss)
        return out.reshape(logits.shape)
    kept = (target != ignore_index)[..., None]
    classes = torch.where(kept, target[..., None], 0)
    dx = (logits.to(lse.dtype) - lse[..., None]).exp() * (1 + 2 * z_loss * lse[..., None])
    dx -= label_smoothing / logits.shape[-1]
    dx.scatter_add_(-1, classes, torch.full_like(lse, label_smoothing - 1)[..., None])
    return torch.where(kept, dx * dloss[..., None], 0.0).to(logits.dtype)


@_cross_entropy_backward.register_fake
def _cross_entropy_backward_fake(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:
    logits, target, *ctx.settings = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, dloss, _):
    dlogits = torch.ops.fxzero.softmax_cross_entropy_backward(
        dloss, *ctx.saved_tensors, *ctx.settings
    )
    return dlogits, None, None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_setup)


def check_loss(
    kernel: str,
    target: Tensor,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    reductions: tuple[str, ...] = ("mean", "sum", "none"),
) -> None:
    """See that what all losses take is right."""
    check(target.dtype is torch.int64, kernel, "target", "int64", target.dtype)
    check(0.0 <= label_smoothing <= 1.0, kernel, "label_smoothing", "in [0, 1]", label_smoothing)
    check(z_loss >= 0.0, kernel, "z_loss", "0 or more", z_loss)
    check(reduction in reductions, kernel, "reduction", f"one of {reductions}", repr(reduction))


def softmax_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of class numbers, as `torch.nn.functional.cross_entropy` has it.

    Args:
        logits: ``[..., V]``.
        target: ``[...]``, int64.
        label_smoothing: the share of the probability that is spread over all classes.
        z_loss: the weight of ``logsumexp(logits)²``.
        reduction: ``mean`` over the rows that are not ignored, ``sum`` or ``none``.

    Returns:
        float32, or float64 for float64 logits: a loss in 16 bits has no use.

    Raises:
        KernelError: shapes, dtypes, devices or settings that do not fit.
    """
    kernel = "softmax_cross_entropy"
    check_tensor(kernel, logits=logits, target=target)
    check(logits.dim() >= 1 and logits.shape[-1] > 0, kernel, "logits", "[..., V] with V > 0",
          list(logits.shape))  # fmt: skip
    check_float(kernel, logits=logits)
    check_shape(kernel, "target", target, logits.shape[:-1])
    check_together(kernel, logits=logits, target=target)
    check_loss(kernel, target, label_smoothing, z_loss, reduction)
    loss, _ = torch.ops.fxzero.softmax_cross_entropy(
        logits, target, ignore_index, label_smoothing, z_loss
    )
    return reduce_loss(loss, target, ignore_index, reduction)
