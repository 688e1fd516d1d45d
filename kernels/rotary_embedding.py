"""Rotary position embedding: each pair of a head's elements turns by an angle of its position.

    y₁ = x₁ · c₁ − x₂ · s₁,  y₂ = x₂ · c₂ + x₁ · s₂
    (Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", eq. 34)

Element i of a head is paired with i + rotary_dim / 2, or 2i with 2i + 1 if interleaved. c and s
are the cosine and the sine at the place of each element: mostly, but not necessarily, those of
one angle for both of a pair. Elements from rotary_dim on pass unchanged. Backward is the
transpose of this linear map, which is the same map with s₁ and s₂ exchanged and negated:

    dx₁ = dy₁ · c₁ + dy₂ · s₂,  dx₂ = dy₂ · c₂ − dy₁ · s₁

One read of x and one write of y, through the strides of both: heads and positions may be
transposed. A program turns some positions of several heads, so that it reads cos and sin once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxzero.kernels.launch import (
    MAX_ROW,
    check,
    check_bool,
    check_float,
    check_integer,
    check_tensor,
    check_together,
    launch,
    runs_on_triton,
)

_PAIRS = 1024
"""Pairs of elements that a program turns at a time."""

_HEAD_PROGRAMS = 8
"""Programs that share the heads of one batch row and block of positions between them."""


@triton.jit
def _load_pairs(ptr, row, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """First and second elements of each row's pairs, from where the rows start."""
    if INTERLEAVED:
        # Taken apart in registers: neighbours in memory are read as neighbours.
        at = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(ptr + at, mask=row & (at < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [both.shape[0], BLOCK, 2]))
    else:
        at = tl.arange(0, BLOCK)[None, :]
        first = tl.load(ptr + at, mask=row & (at < HALF), other=0.0).to(tl.float32)
        second = tl.load(ptr + HALF + at, mask=row & (at < HALF), other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    ptr, first, second, row,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `_load_pairs` undoes."""
    dtype = ptr.dtype.element_ty
    if INTERLEAVED:
        at = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.interleave(first, second).to(dtype)
        tl.store(ptr + at, both, mask=row & (at < 2 * HALF))
    else:
        at = tl.arange(0, BLOCK)[None, :]
        tl.store(ptr + at, first.to(dtype), mask=row & (at < HALF))
        tl.store(ptr + HALF + at, second.to(dtype), mask=row & (at < HALF))


@triton.jit
def _rotate(
    x_ptr, y_ptr, cos_ptr, sin_ptr,
    x_batch, x_head, x_seq, y_batch, y_head, y_seq, cos_batch, cos_seq, sin_batch, sin_seq,
    heads, seq, seq_blocks,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr, FULL_WIDTH: tl.constexpr,
    SEQ_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch = program // seq_blocks
    position = (program % seq_blocks * SEQ_BLOCK + tl.arange(0, SEQ_BLOCK))[:, None]
    row = position < seq
    cos_ptr += batch * cos_batch + position * cos_seq
    sin_ptr += batch * sin_batch + position * sin_seq
    if FULL_WIDTH:
        c1, c2 = _load_pairs(cos_ptr, row, HALF, INTERLEAVED, PAIR_BLOCK)
        s1, s2 = _load_pairs(sin_ptr, row, HALF, INTERLEAVED, PAIR_BLOCK)
    else:
        pair = tl.arange(0, PAIR_BLOCK)[None, :]
        c1 = tl.load(cos_ptr + pair, mask=row & (pair < HALF), other=0.0).to(tl.float32)
        s1 = tl.load(sin_ptr + pair, mask=row & (pair < HALF), other=0.0).to(tl.float32)
        c2 = c1
        s2 = s1
    into_first = s1
    into_second = s2
    if TRANSPOSED:
        into_first = -s2
        into_second = -s1
    x_ptr += batch * x_batch + position * x_seq
    y_ptr += batch * y_batch + position * y_seq
    head = tl.program_id(1).to(tl.int64)
    # A range of tensors is more than the interpreter of Triton 3.6 can do with NumPy 2.4.
    while head < heads:
        x_at = x_ptr + head * x_head
        y_at = y_ptr + head * y_head
        x1, x2 = _load_pairs(x_at, row, HALF, INTERLEAVED, PAIR_BLOCK)
        y1 = x1 * c1 - x2 * into_first
        y2 = x2 * c2 + x1 * into_second
        _store_pairs(y_at, y1, y2, row, HALF, INTERLEAVED, PAIR_BLOCK)
        if 2 * HALF < HEAD_DIM:
            rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
            kept = row & (rest < HEAD_DIM)
            tl.store(y_at + rest, tl.load(x_at + rest, mask=kept, other=0.0), mask=kept)
        head += tl.num_programs(1)


def rotary_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Tensor:
    """`rotary` in plain torch and in the dtype of its arguments."""
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if cos.shape[-1] != rotary_dim:
        cos, sin = (
            t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)
        )
    x1, x2 = _pairs(head, interleaved)
    turned = torch.stack((-x2, x1), -1).flatten(-2) if interleaved else torch.cat((-x2, x1), -1)
    y = head * cos.unsqueeze(-3) + turned * sin.unsqueeze(-3)
    return torch.cat((y, rest), -1)


def _pairs(t: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of first and second elements of the pairs of a last dim."""
    half = t.shape[-1] // 2
    return (t[..., ::2], t[..., 1::2]) if interleaved else (t[..., :half], t[..., half:])


def _angle_strides(table: Tensor) -> tuple[int, int]:
    """Strides of batch and position of a table of cosines or sines."""
    each = table.dim() == 3 and table.shape[0] > 1
    return (table.stride(0) if each else 0), table.stride(-2)


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    """A tensor whose last dim is contiguous; copied only if it must be."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _plain(
    x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, interleaved: bool, transposed: bool
) -> None:
    """Turn ``x`` into ``y``, both with nothing but pairs in their last dim."""
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(work).unsqueeze(-3) for t in (cos, sin))
    (x1, x2), (y1, y2) = _pairs(x.to(work), interleaved), _pairs(y, interleaved)
    (c1, c2), (s1, s2) = (
        _pairs(t, interleaved) if t.shape[-1] == x.shape[-1] else (t, t) for t in (cos, sin)
    )
    into_first, into_second = (-s2, -s1) if transposed else (s1, s2)
    y1.copy_(x1 * c1 - x2 * into_first)
    y2.copy_(x2 * c2 + x1 * into_second)


@torch.library.custom_op(
    "fxzero::rotary",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, SymInt rotary_dim, bool interleaved,"
    " bool transposed) -> Tensor y",
)
def _rotary(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, transposed: bool
) -> Tensor:
    """Forward, and backward where ``transposed``."""
    y = _rotary_fake(x, cos, sin, rotary_dim, interleaved, transposed)
    if y.numel() == 0:
        return y
    if not runs_on_triton(x):
        _plain(x[..., :rotary_dim], cos, sin, y[..., :rotary_dim], interleaved, transposed)
        y[..., rotary_dim:] = x[..., rotary_dim:]
        return y
    x, cos, sin = (_with_contiguous_rows(t) for t in (x, cos, sin))
    batch, heads, seq, head_dim = x.shape
    pair_block = triton.next_power_of_2(rotary_dim // 2)
    rest_block = triton.next_power_of_2(max(head_dim - rotary_dim, 1))
    seq_block = min(triton.next_power_of_2(seq), max(_PAIRS // max(pair_block, rest_block // 2), 1))
    seq_blocks = triton.cdiv(seq, seq_block)
    launch(_rotate, (batch * seq_blocks, min(heads, _HEAD_PROGRAMS)))(
        x, y, cos, sin, *x.stride()[:3], *y.stride()[:3], *_angle_strides(cos),
        *_angle_strides(sin), heads, seq, seq_blocks,
        HEAD_DIM=head_dim, HALF=rotary_dim // 2, INTERLEAVED=interleaved, TRANSPOSED=transposed,
        FULL_WIDTH=cos.shape[-1] == rotary_dim, SEQ_BLOCK=seq_block, PAIR_BLOCK=pair_block,
        REST_BLOCK=rest_block, num_warps=4,
    )  # fmt: skip
    return y


@_rotary.register_fake
def _rotary_fake(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, transposed: bool
) -> Tensor:
    y = torch.empty_like(x)
    if y.stride(-1) == 1:
        return y
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:
    _, cos, sin, ctx.rotary_dim, ctx.interleaved, ctx.transposed = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, dy):
    dx = torch.ops.fxzero.rotary(
        dy, *ctx.saved_tensors, ctx.rotary_dim, ctx.interleaved, not ctx.transposed
    )
    return dx, None, None, None, None, None


_rotary.register_autograd(_differentiate, setup_context=_setup)


def _check(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    kernel = "rotary"
    batch, _, seq, head_dim = x.shape
    check(head_dim % 2 == 0 and 0 < head_dim <= MAX_ROW, kernel, "x",
          f"of an even head_dim, 2 to {MAX_ROW}", head_dim)  # fmt: skip
    check_integer(kernel, "rotary_dim", rotary_dim, 2)
    check(rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim, kernel, "rotary_dim",
          f"even, 2 to head_dim {head_dim}", rotary_dim)  # fmt: skip
    check_float(kernel, x=x, cos=cos, sin=sin)
    asked = f"[{seq}, {rotary_dim} or {rotary_dim // 2}], or 1 or {batch} of them"
    fits = (
        cos.dim() in (2, 3)
        and cos.shape[-1] in (rotary_dim, rotary_dim // 2)
        and cos.shape[-2] == seq
        and (cos.dim() == 2 or cos.shape[0] in (1, batch))
    )
    check(fits, kernel, "cos", asked, list(cos.shape))
    check(sin.shape == cos.shape, kernel, "sin", f"of cos's shape {list(cos.shape)}",
          list(sin.shape))  # fmt: skip
    check_together(kernel, x=x, cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        asked = "a tensor without gradient (the operator has none for it)"
        check(not table.requires_grad, kernel, name, asked, "one that requires it")


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Tensor:
    """``x · cos + turned(x) · sin``, where turned takes a pair (a, b) to (−b, a).

    The result is laid out as x is, gaps left out. There is no gradient for cos and sin.

    Args:
        x: ``[batch, heads, seq, head_dim]`` of any strides, head_dim even. It is copied only
            where elements of a head do not lie side by side.
        cos, sin: ``[seq, rotary_dim]``, or ``[seq, rotary_dim / 2]`` where both of a pair take
            the same; either also with ``batch`` or 1 in front.
        interleaved: pair 2i with 2i + 1, as GPT-J does, not i with i + rotary_dim / 2.
        rotary_dim: elements at the start of a head that turn; without it, all. Tables of half
            the width are told from those of full width by it alone.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit, or a cos or sin that requires
            a gradient.
    """
    check_tensor("rotary", x=x, cos=cos, sin=sin)
    check_bool("rotary", interleaved=interleaved)
    check(x.dim() == 4, "rotary", "x", "[batch, heads, seq, head_dim]", list(x.shape))
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    _check(x, cos, sin, rotary_dim)
    return torch.ops.fxzero.rotary(x, cos, sin, rotary_dim, interleaved, False)
