"""The cross entropy of a linear layer's output that never holds the logits.

    loss = Σ_n row_loss(h_n Wᵀ + b, t_n)        row_loss as in `cross_entropy`
    G    = ∂loss/∂logits,   dh = G W,   dW = Gᵀ h,   db = Σ_n G_n

Rows are taken in chunks: a chunk's logits are made, turned into their gradient in place, and
multiplied into dh and dW at once, in the forward pass; backward only scales (the approach of
Hsu et al. 2024, "Liger Kernel", section 3.2). So one chunk of logits is alive instead of all of
them two or three times over, for the same three products.

The operator works on the sum of the losses, whose gradient has elements of about 1: a mean's,
made before the loss scale is known, would underflow in float16.

Chunks are of rows, not of the vocabulary: a chunk of the vocabulary cannot give its part of dW
before the log-sum-exp over all of it is known, which costs a fourth product of the same size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxzero.cost.workspace import register_workspace_formula
from fxzero.kernels.cross_entropy import (
    check_loss,
    check_targets,
    loss_and_lse,
    reduce_loss,
    softmax_cross_entropy_reference,
    write_gradient,
)
from fxzero.kernels.launch import (
    check,
    check_float,
    check_shape,
    check_tensor,
    check_together,
    runs_on_triton,
)

CHUNK_BYTES = 64 << 20
"""What the logits of a chunk may take. Smaller chunks read and write dW more often."""

_MIN_ROWS = 64  # below that, products are bound by reading the weight


def chunk_rows(rows: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Rows of one chunk: as many as `CHUNK_BYTES` hold, in multiples of 64, in equal chunks."""
    most = max(CHUNK_BYTES // (max(vocabulary, 1) * dtype.itemsize), _MIN_ROWS)
    chunks = max(-(-rows // most), 1)
    return max(-(-rows // (chunks * _MIN_ROWS)) * _MIN_ROWS, _MIN_ROWS)


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`linear_cross_entropy` in plain torch, logits and all."""
    return softmax_cross_entropy_reference(
        torch.nn.functional.linear(hidden, weight, bias),
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )


def _gradient_in_place(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Losses of a chunk's rows, and the gradient of their sum where the logits were."""
    if runs_on_triton(logits):
        loss, lse = loss_and_lse(logits, target, ignore_index, smoothing, z_loss)
        if wants_gradient:
            ones = torch.ones_like(lse)
            write_gradient(logits, logits, target, lse, ones, ignore_index, smoothing, z_loss)
        return loss, logits
    kept = target != ignore_index
    classes = torch.where(kept, target, 0)[:, None]
    # The logits themselves, unless they have 16 bits.
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x_target = x.gather(1, classes)[:, 0]
    mean = x.mean(1) if smoothing else 0.0
    largest = x.amax(1, keepdim=True)
    normalizer = x.sub_(largest).exp_().sum(1)
    lse = largest[:, 0] + normalizer.log()
    loss = lse - (1 - smoothing) * x_target - smoothing * mean + z_loss * lse.square()
    loss = torch.where(kept, loss, 0.0)
    if not wants_gradient:
        return loss, logits
    kept_rows = kept.to(x.dtype)[:, None]
    x.mul_(((1 + 2 * z_loss * lse) / normalizer)[:, None] * kept_rows)
    if smoothing:
        x.sub_(smoothing / x.shape[1] * kept_rows)
    x.scatter_add_(1, classes, (smoothing - 1) * kept_rows)
    return loss, x.to(logits.dtype)


@torch.library.custom_op(
    "fxzero::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int ignore_index,"
    " float label_smoothing, float z_loss, bool[3] wants)"
    " -> (Tensor loss, Tensor dhidden, Tensor dweight, Tensor dbias)",
)
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The losses' sum and, where wanted, its gradients for hidden, weight and bias, else empty."""
    check_targets("linear_cross_entropy", target, len(weight), ignore_index)
    rows, width = target.numel(), hidden.shape[-1]
    work = torch.promote_types(hidden.dtype, torch.float32)
    h, t = hidden.reshape(rows, width), target.reshape(rows)
    step = chunk_rows(rows, len(weight), hidden.dtype)
    wants_hidden, wants_weight, wants_bias = wants
    dhidden = torch.empty_like(h) if wants_hidden else h.new_empty(0)
    # Chunks are summed in float32 whatever the dtype: bfloat16 would lose the later ones.
    dweight = torch.zeros_like(weight, dtype=work) if wants_weight else weight.new_empty(0)
    dbias = weight.new_zeros(len(weight), dtype=work) if wants_bias else weight.new_empty(0)
    total = h.new_zeros((), dtype=work)
    buffer = h.new_empty(min(step, rows), len(weight))
    for begin in range(0, rows, step):
        part, classes = h[begin : begin + step], t[begin : begin + step]
        logits = buffer[: len(part)]
        if bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        loss, gradient = _gradient_in_place(
            logits, classes, ignore_index, label_smoothing, z_loss, any(wants)
        )
        total += loss.sum()
        if wants_hidden:
            torch.mm(gradient, weight, out=dhidden[begin : begin + step])
        if wants_weight and dweight.dtype == gradient.dtype:
            dweight.addmm_(gradient.t(), part)
        elif wants_weight:
            dweight += gradient.t() @ part
        if wants_bias:
            dbias += gradient.sum(0, dtype=work)
    dhidden = dhidden.reshape(hidden.shape) if wants_hidden else dhidden
    held = _held_dtype(weight.dtype)
    return total, dhidden, dweight.to(held), dbias.to(held)


def _held_dtype(dtype: torch.dtype) -> torch.dtype:
    """How sums over all rows wait for backward: they may leave the range of float16."""
    return torch.float32 if dtype is torch.float16 else dtype


@_linear_cross_entropy.register_fake
def _linear_cross_entropy_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held = _held_dtype(weight.dtype)
    return (
        hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32)),
        hidden.new_empty(hidden.shape if wants[0] else (0,)),
        weight.new_empty(weight.shape if wants[1] else (0,), dtype=held),
        weight.new_empty(weight.shape[:1] if wants[2] else (0,), dtype=held),
    )


def _setup(ctx, inputs, output) -> None:
    hidden, weight, *_, ctx.wants = inputs
    ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype)
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, dloss, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy computes its gradients in the forward pass and can be "
            "differentiated once. For create_graph=True call softmax_cross_entropy on the logits, "
            "or switch lower_kernels off."
        )
    saved = zip(ctx.saved_tensors, ctx.wants, ctx.dtypes, strict=True)
    # dloss may be a loss scale beyond the range of float16.
    grads = ((g * dloss[None]).to(dtype) if wanted else None for g, wanted, dtype in saved)
    return *grads, None, None, None, None, None


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_setup)


@register_flop_formula(torch.ops.fxzero.linear_cross_entropy)
def _flops(hidden, weight, bias, target, *settings, out_shape=None, **kwargs) -> int:
    """A product for the logits, and one for each gradient."""
    rows = 1
    for size in hidden[:-1]:
        rows *= size
    products = 1 + sum(settings[-1][:2])
    return 2 * rows * hidden[-1] * weight[0] * products


@register_workspace_formula(torch.ops.fxzero.linear_cross_entropy)
def _workspace(hidden, weight, bias, target, *settings) -> int:
    """One chunk of logits, and in 16 bits its float32 copy and the sum of dW."""
    rows = target.numel()
    elements = min(chunk_rows(rows, len(weight), hidden.dtype), rows) * len(weight)
    if hidden.dtype in (torch.float32, torch.float64):
        return elements * hidden.element_size()
    summed = 2 * weight.numel() if settings[-1][1] else 0
    return elements * hidden.element_size() + (0 if hidden.is_cuda else 4 * elements) + 4 * summed


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias), target)`` without the logits.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``, as `torch.nn.Linear` has it.
        target: ``[...]``, int64.
        bias: ``[V]``.
        label_smoothing: the share of the probability that is spread over all classes.
        z_loss: the weight of ``logsumexp(logits)²``.
        reduction: ``mean`` over the rows that are not ignored, or ``sum``. Not ``none``: the
            gradients are computed in the forward pass, before those of single rows are known.

    Returns:
        A scalar in float32, or float64 for float64 inputs. It can be differentiated once.

    Raises:
        KernelError: shapes, dtypes, devices or settings that do not fit.
    """
    kernel = "linear_cross_entropy"
    check_tensor(kernel, hidden=hidden, weight=weight, target=target)
    check(hidden.dim() >= 1 and hidden.shape[-1] > 0, kernel, "hidden", "[..., H] with H > 0",
          list(hidden.shape))  # fmt: skip
    found = list(weight.shape)
    fits = weight.dim() == 2 and weight.shape[1] == hidden.shape[-1] and len(weight) > 0
    check(fits, kernel, "weight", f"[V, {hidden.shape[-1]}]", found)
    check_float(kernel, hidden=hidden)
    check(weight.dtype == hidden.dtype, kernel, "weight", f"{hidden.dtype} as hidden", weight.dtype)
    if bias is not None:
        check(bias.dtype == hidden.dtype, kernel, "bias", f"{hidden.dtype} as hidden", bias.dtype)
    check_shape(kernel, "bias", bias, weight.shape[:1])
    check_shape(kernel, "target", target, hidden.shape[:-1])
    check_together(kernel, hidden=hidden, weight=weight, bias=bias, target=target)
    check_loss(kernel, target, label_smoothing, z_loss, reduction, ("mean", "sum"))
    wants = [
        t is not None and t.requires_grad and torch.is_grad_enabled()
        for t in (hidden, weight, bias)
    ]
    loss, *_ = torch.ops.fxzero.linear_cross_entropy(
        hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, wants
    )
    return reduce_loss(loss, target, ignore_index, reduction)
