"""Quantize blocks of consecutive elements to 8 bits, each by its largest absolute value.

    scale_b = max_{i in b} |x_i| / qmax          qmax = 127, 448 (e4m3) or 57,344 (e5m2); float32
    code_i  = round(x_i / scale_b)               to nearest, ties to even
    x̂_i     = code_i · scale_b

(Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1, with codes
that are evenly spaced or of an 8-bit floating-point format; for collectives, Wang et al. 2023,
"ZeRO++", section 3.1.)

A block of zeros has scale 0 and codes 0, and so has one so small that its scale underflows. A
block with an infinite element has scale inf, one with a NaN has scale NaN: all its codes are 0,
and all of it dequantizes to NaN, never to finite numbers.

One read of x, one write of codes and of a scale per block, and the other way around. No gradient:
rounding has none. Floats of 8 bits are made and read by integer arithmetic, so that the bits are
those of ``(x / scale).to(float8)`` on every device, with or without instructions for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxzero.kernels.launch import (
    FLOATS,
    MAX_ROW,
    check,
    check_float,
    check_integer,
    check_shape,
    check_sizes,
    check_tensor,
    check_together,
    launch,
    runs_on_triton,
)
from fxzero.kernels.multi_tensor import from_float32, to_float32

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""What a block's largest element is scaled to."""

_FORMATS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}

_TILE = 2048
"""Elements of a program, if blocks are not longer."""


@triton.jit
def _to_int8(x):
    # The sum has no bits for a fraction: it is rounded to a whole number, ties to even.
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _to_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    # x is at most the largest number of the format, so that rounding does not overflow.
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Normal numbers: round away the lower bits of the mantissa, then change the bias.
    shift: tl.constexpr = 23 - MANTISSA
    odd = (bits >> shift) & 1
    normal = ((bits + ((1 << (shift - 1)) - 1) + odd) >> shift) - ((127 - BIAS) << MANTISSA)
    # Others: next to a number whose last bit is the format's smallest step, adding rounds to it.
    next_bits: tl.constexpr = (127 + 1 - BIAS + shift) << 23
    next_to = tl.full([], next_bits, tl.uint32).to(tl.float32, bitcast=True)
    small = bits.to(tl.float32, bitcast=True) + next_to
    small = small.to(tl.uint32, bitcast=True) - next_bits
    is_normal = bits >= ((127 + 1 - BIAS) << 23)
    return (tl.where(is_normal, normal, small) | sign).to(tl.uint8)


@triton.jit
def _from_code(code, FORMAT: tl.constexpr):
    if FORMAT == 0:
        return code.to(tl.float32)
    # e5m2 is the upper half of a float16. So is e4m3, but for its shorter exponent: a shift of
    # one bit, and a factor for the other bias.
    bits = code.to(tl.uint16)
    if FORMAT == 1:
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), x)
    return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _tile_of(size, blocks, LENGTH: tl.constexpr, SHORT: tl.constexpr,
             ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    at = block[:, None] * LENGTH + column
    # Where the last block is whole, blocks are inside or not: wide loads are then possible.
    inside = (block < blocks)[:, None] & (column < BLOCK)
    if SHORT:
        inside = at < size
    if LENGTH < BLOCK:
        inside = inside & (column < LENGTH)
    return block, at, inside


@triton.jit
def _quantize(
    x_ptr, codes_ptr, scales_ptr, size, blocks,
    LENGTH: tl.constexpr, LARGEST: tl.constexpr, FORMAT: tl.constexpr,
    SHORT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, at, inside = _tile_of(size, blocks, LENGTH, SHORT, ROWS, BLOCK)
    x = to_float32(tl.load(x_ptr + at, mask=inside, other=0.0))
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), LARGEST)
    # A maximum passes over what is not a number.
    missing = tl.max((x != x).to(tl.int32), axis=1) != 0
    scale = tl.where(missing, float("nan"), scale)
    tl.store(scales_ptr + block, scale, mask=block < blocks)
    usable = (scale > 0.0) & (scale < float("inf"))
    x = tl.div_rn(x, tl.where(usable, scale, 1.0)[:, None])
    # A subnormal scale may be far from the quotient that it rounds.
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    x = tl.where(usable[:, None], x, 0.0)
    if FORMAT == 0:
        codes = _to_int8(x)
    elif FORMAT == 1:
        codes = _to_float8(x, 3, 7)
    else:
        codes = _to_float8(x, 2, 15)
    tl.store(codes_ptr + at, codes, mask=inside)


@triton.jit
def _dequantize(
    codes_ptr, scales_ptr, y_ptr, size, blocks,
    LENGTH: tl.constexpr, FORMAT: tl.constexpr, SHORT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, at, inside = _tile_of(size, blocks, LENGTH, SHORT, ROWS, BLOCK)
    x = _from_code(tl.load(codes_ptr + at, mask=inside, other=0), FORMAT)
    y = x * tl.load(scales_ptr + block, mask=block < blocks, other=0.0)[:, None]
    tl.store(y_ptr + at, from_float32(y, y_ptr.dtype.element_ty), mask=inside)


def quantize_blockwise_reference(
    x: Tensor, dtype: torch.dtype = torch.int8, block: int = 256
) -> tuple[Tensor, Tensor]:
    """`quantize_blockwise` in plain torch; in float32, or for a float64 x in float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = torch.full((), LARGEST[dtype], dtype=wide.dtype, device=x.device)
    rows = _as_blocks(wide, block)
    scales = rows.abs().amax(-1, keepdim=True) / largest
    usable = (scales > 0) & scales.isfinite()
    codes = rows / torch.where(usable, scales, 1)
    codes = torch.where(usable, codes.clamp(-LARGEST[dtype], LARGEST[dtype]), 0)
    codes = (codes.round() if dtype is torch.int8 else codes).to(dtype)
    return codes.flatten()[: x.numel()].view(x.shape), scales[:, 0]


def dequantize_blockwise_reference(
    codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, block: int = 256
) -> Tensor:
    """`dequantize_blockwise` in plain torch, of the shape of `codes`, in the scales' dtype."""
    y = _as_blocks(codes.to(scales.dtype), block) * scales[:, None]
    return y.flatten()[: codes.numel()].view(codes.shape).to(dtype)


def _as_blocks(x: Tensor, block: int) -> Tensor:
    """``[blocks, block]``, filled up with zeros."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)


@torch.library.custom_op(
    "fxzero::quantize_blockwise",
    mutates_args=(),
    schema="(Tensor x, ScalarType dtype, int block) -> (Tensor codes, Tensor scales)",
)
def _quantize_op(x: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor]:
    """Codes of the shape of x, one float32 scale per block."""
    codes, scales = _quantize_fake(x, dtype, block)
    if x.numel() == 0:
        return codes, scales
    if not runs_on_triton(x):
        codes, scales = quantize_blockwise_reference(x.float(), dtype, block)
        return codes.contiguous(), scales.contiguous()
    rows, columns, warps = _tile(block)
    # Triton knows fewer dtypes than torch, and the kernel makes bits.
    bits = codes if dtype is torch.int8 else codes.view(torch.uint8)
    launch(_quantize, (triton.cdiv(len(scales), rows),))(
        x.contiguous(), bits, scales, x.numel(), len(scales),
        LENGTH=block, LARGEST=LARGEST[dtype], FORMAT=_FORMATS[dtype],
        SHORT=x.numel() % block != 0, ROWS=rows, BLOCK=columns, num_warps=warps,
    )  # fmt: skip
    return codes, scales


@_quantize_op.register_fake
def _quantize_fake(x: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(((x.numel() + block - 1) // block,), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scales


@torch.library.custom_op(
    "fxzero::dequantize_blockwise",
    mutates_args=(),
    schema="(Tensor codes, Tensor scales, ScalarType dtype, SymInt[] shape, int block) -> Tensor",
)
def _dequantize_op(
    codes: Tensor, scales: Tensor, dtype: torch.dtype, shape: Sequence[int], block: int
) -> Tensor:
    """Values of a shape that has as many elements as there are codes."""
    y = _dequantize_fake(codes, scales, dtype, shape, block)
    if codes.numel() == 0:
        return y
    if not runs_on_triton(scales) or dtype is torch.float64:
        return dequantize_blockwise_reference(codes, scales, dtype, block).reshape(shape).clone()
    rows, columns, warps = _tile(block)
    bits = codes.contiguous()
    bits = bits if codes.dtype is torch.int8 else bits.view(torch.uint8)
    launch(_dequantize, (triton.cdiv(len(scales), rows),))(
        bits, scales.contiguous(), y, codes.numel(), len(scales),
        LENGTH=block, FORMAT=_FORMATS[codes.dtype], SHORT=codes.numel() % block != 0,
        ROWS=rows, BLOCK=columns, num_warps=warps,
    )  # fmt: skip
    return y


@_dequantize_op.register_fake
def _dequantize_fake(
    codes: Tensor, scales: Tensor, dtype: torch.dtype, shape: Sequence[int], block: int
) -> Tensor:
    return scales.new_empty(shape, dtype=dtype)


def _tile(block: int) -> tuple[int, int, int]:
    """Blocks of a program, a block's length rounded up, and warps."""
    columns = triton.next_power_of_2(block)
    return max(_TILE // columns, 1), columns, min(max(columns // 512, 4), 16)


def _check_block(kernel: str, block: int) -> None:
    check_integer(kernel, "block", block, 1)
    check(block <= MAX_ROW, kernel, "block", f"from 1 to {MAX_ROW}", block)


def quantize_blockwise(
    x: Tensor, dtype: torch.dtype = torch.int8, block: int = 256
) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, and one scale for each block of consecutive elements.

    Args:
        x: of any shape; blocks run through its rows. The last block may be short. Computed with
            in float32, where elements of float64 may become infinite. No gradient flows back
            into it.
        dtype: int8, float8_e4m3fn or float8_e5m2.
        block: elements that share a scale, up to 65,536.

    Returns:
        codes: of the shape of x.
        scales: float32, ``[ceil(numel / block)]``; inf or NaN for a block that has an element
            that is infinite or not a number, which dequantizes to NaN.

    Raises:
        KernelError: dtypes that do not fit.
    """
    kernel = "quantize_blockwise"
    check_tensor(kernel, x=x)
    check_float(kernel, x=x)
    check(dtype in LARGEST, kernel, "dtype", "int8, float8_e4m3fn or float8_e5m2", dtype)
    _check_block(kernel, block)
    # Scales would ask for a gradient that the operator does not have.
    return torch.ops.fxzero.quantize_blockwise(x.detach(), dtype, block)


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
    block: int = 256,
) -> Tensor:
    """``code · scale``, rounded to a dtype: the inverse of `quantize_blockwise`.

    Args:
        codes: int8, float8_e4m3fn or float8_e5m2; of any shape.
        scales: float32, ``[ceil(numel / block)]``.
        shape: of the result; that of the codes without it.
        block: elements that share a scale.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit.
    """
    kernel = "dequantize_blockwise"
    check_tensor(kernel, codes=codes, scales=scales)
    check(codes.dtype in LARGEST, kernel, "codes", "int8, float8_e4m3fn or float8_e5m2",
          codes.dtype)  # fmt: skip
    check(dtype in FLOATS, kernel, "dtype", "float32, bfloat16, float16 or float64", dtype)
    check(scales.dtype is torch.float32, kernel, "scales", "float32", scales.dtype)
    _check_block(kernel, block)
    check_shape(kernel, "scales", scales, ((codes.numel() + block - 1) // block,))
    check_together(kernel, codes=codes, scales=scales)
    shape = codes.shape if shape is None else shape
    check_sizes(kernel, "shape", shape)
    check(math.prod(shape) == codes.numel(), kernel, "shape",
          f"of {codes.numel()} elements", list(shape))  # fmt: skip
    return torch.ops.fxzero.dequantize_blockwise(codes, scales, dtype, shape, block)
