"""Cast and gather many tensors into one flat buffer, and back, each in one launch.

    start_0 = 0,  start_{i+1} = round_up(start_i + numel_i, align)
    cast_pack:  buffer[start_i + j] = round(scale · tensor_i[j]),  0 between tensors
    unpack:     tensor_i[j] = round(scale · buffer[start_i + j])

Backward of each is the other, with the same scale: both are linear. (The layout is that of the
buckets of Li et al. 2020, "PyTorch Distributed", section 3.2.3.)

One read and one write of each element. Rounding is to nearest, ties to even, as `Tensor.to` does;
without a scale the bits are the same. Tensors that are contiguous, or whose rows are, are
read and written where they lie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxzero.kernels.launch import (
    FLOATS,
    check,
    check_float,
    check_integer,
    check_shape,
    check_sizes,
    check_tensor,
    is_number,
    launch,
    runs_on_triton,
)
from fxzero.kernels.multi_tensor import (
    BLOCK,
    addresses,
    aligned,
    check_apart,
    check_written,
    lay_out,
    load_block,
    number,
    numel,
    round_up,
    spans,
    store_block,
    table,
)

Number = float | Tensor
"""A number on the host, or a tensor of one element that the kernel reads."""

_KINDS = {dtype: kind for kind, dtype in enumerate(FLOATS)}
"""Dtypes as numbers: 0, 1 and 2 are those that the kernel knows."""


@triton.jit
def _place(at, columns, stride, STRIDED: tl.constexpr):
    # Where elements lie in a tensor of contiguous rows.
    if STRIDED:
        at = at // columns * stride + at % columns
    return at


@triton.jit
def _pack_block(
    flat_ptr, address, kind, at, size, end, columns, stride, factor,
    HAS_SCALE: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    TENSORS_ALIGNED: tl.constexpr, FLAT_ALIGNED: tl.constexpr,
):  # fmt: skip
    place = _place(at, columns, stride, STRIDED)
    inside = at < size
    if kind == 0:
        x = load_block(
            address.to(tl.pointer_type(tl.float32)), place, inside, MASKED, TENSORS_ALIGNED
        )
    elif kind == 1:
        x = load_block(
            address.to(tl.pointer_type(tl.bfloat16)), place, inside, MASKED, TENSORS_ALIGNED
        )
    else:
        x = load_block(
            address.to(tl.pointer_type(tl.float16)), place, inside, MASKED, TENSORS_ALIGNED
        )
    if HAS_SCALE:
        x = x * factor
    store_block(flat_ptr, at, at < end, x, MASKED, FLAT_ALIGNED)


@triton.jit
def _unpack_block(
    flat_ptr, address, kind, at, size, columns, stride, factor,
    HAS_SCALE: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    TENSORS_ALIGNED: tl.constexpr, FLAT_ALIGNED: tl.constexpr,
):  # fmt: skip
    place = _place(at, columns, stride, STRIDED)
    inside = at < size
    x = load_block(flat_ptr, at, inside, MASKED, FLAT_ALIGNED)
    if HAS_SCALE:
        x = x * factor
    if kind == 0:
        store_block(
            address.to(tl.pointer_type(tl.float32)), place, inside, x, MASKED, TENSORS_ALIGNED
        )
    elif kind == 1:
        store_block(
            address.to(tl.pointer_type(tl.bfloat16)), place, inside, x, MASKED, TENSORS_ALIGNED
        )
    else:
        store_block(
            address.to(tl.pointer_type(tl.float16)), place, inside, x, MASKED, TENSORS_ALIGNED
        )


@triton.jit
def _move(
    flat_ptr, numbers_ptr, work_ptr, sizes_ptr, starts_ptr, tensors, align, scale, scale_ptr,
    PACK: tl.constexpr, HAS_SCALE: tl.constexpr, SCALE_ON_DEVICE: tl.constexpr,
    STRIDED: tl.constexpr, TENSORS_ALIGNED: tl.constexpr, FLAT_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(work_ptr + 2 * program).to(tl.int64)
    block = tl.load(work_ptr + 2 * program + 1).to(tl.int64)
    size = tl.load(sizes_ptr + tensor)
    flat_ptr += tl.load(starts_ptr + tensor)
    address = tl.load(numbers_ptr + tensor)
    kind = tl.load(numbers_ptr + tensors + tensor)
    columns = size
    stride = size
    if STRIDED:
        columns = tl.load(numbers_ptr + 2 * tensors + tensor)
        stride = tl.load(numbers_ptr + 3 * tensors + tensor)
    factor = number(scale, False)
    if SCALE_ON_DEVICE:
        factor = factor * number(scale_ptr, True)
    end = (size + align - 1) // align * align
    at = block * BLOCK + tl.arange(0, BLOCK)
    if (block + 1) * BLOCK <= size:
        if PACK:
            _pack_block(
                flat_ptr, address, kind, at, size, end, columns, stride, factor,
                HAS_SCALE, STRIDED, False, TENSORS_ALIGNED, FLAT_ALIGNED,
            )  # fmt: skip
        else:
            _unpack_block(
                flat_ptr, address, kind, at, size, columns, stride, factor,
                HAS_SCALE, STRIDED, False, TENSORS_ALIGNED, FLAT_ALIGNED,
            )  # fmt: skip
    else:
        if PACK:
            _pack_block(
                flat_ptr, address, kind, at, size, end, columns, stride, factor,
                HAS_SCALE, STRIDED, True, TENSORS_ALIGNED, FLAT_ALIGNED,
            )  # fmt: skip
        else:
            _unpack_block(
                flat_ptr, address, kind, at, size, columns, stride, factor,
                HAS_SCALE, STRIDED, True, TENSORS_ALIGNED, FLAT_ALIGNED,
            )  # fmt: skip


def packed_offsets(
    tensors: Sequence[Tensor | Sequence[int]], align: int = 1
) -> tuple[list[int], int]:
    """Where each tensor starts in a packed buffer, and the buffer's length, in elements.

    Args:
        tensors: tensors, or their shapes.
        align: every start, and the length, is a multiple of it.

    Raises:
        KernelError: `align` is less than 1, or a size less than 0.
    """
    check_integer("packed_offsets", "align", align, 1)
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        shape = tensor.shape if isinstance(tensor, Tensor) else tensor
        if shape is tensor:
            check_sizes("packed_offsets", "tensors", shape)
        end = end + round_up(math.prod(shape), align)
    return starts, end


def cast_pack_reference(
    tensors: Sequence[Tensor], dtype: torch.dtype, align: int = 1, scale: Number | None = None
) -> Tensor:
    """`cast_pack` in plain torch; products are in float32, those of float64 in float64."""
    starts, length = packed_offsets(tensors, align)
    buffer = tensors[0].new_zeros(length, dtype=dtype)
    for start, tensor in zip(starts, tensors, strict=True):
        buffer[start : start + tensor.numel()] = _scaled(tensor, scale, dtype).flatten()
    return buffer


def unpack_reference(
    buffer: Tensor,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    align: int = 1,
    scale: Number | None = None,
) -> list[Tensor]:
    """`unpack` in plain torch, into new tensors; products as in `cast_pack_reference`."""
    starts, _ = packed_offsets(shapes, align)
    return [
        _scaled(buffer[start : start + math.prod(shape)].view(shape), scale, dtype).clone()
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    ]


def _scaled(x: Tensor, scale: Number | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return x.to(dtype)
    scale = scale.reshape(()) if isinstance(scale, Tensor) else scale
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * scale).to(dtype)


@torch.library.custom_op(
    "fxzero::cast_pack",
    mutates_args=(),
    schema="(Tensor[] tensors, ScalarType dtype, SymInt align, Tensor? scale, float factor)"
    " -> Tensor",
)
def _cast_pack(
    tensors: Sequence[Tensor], dtype: torch.dtype, align: int, scale: Tensor | None, factor: float
) -> Tensor:
    """A new buffer. The scale is the tensor, if there is one, times the factor."""
    buffer = _cast_pack_fake(tensors, dtype, align, scale, factor)
    _cast_pack_into(buffer, tensors, align, scale, factor)
    return buffer


@_cast_pack.register_fake
def _cast_pack_fake(
    tensors: Sequence[Tensor], dtype: torch.dtype, align: int, scale: Tensor | None, factor: float
) -> Tensor:
    return tensors[0].new_empty((packed_offsets(tensors, align)[1],), dtype=dtype)


@torch.library.custom_op(
    "fxzero::cast_pack_into",
    mutates_args=("buffer",),
    schema="(Tensor(a!) buffer, Tensor[] tensors, SymInt align, Tensor? scale, float factor) -> ()",
)
def _cast_pack_into_op(
    buffer: Tensor, tensors: Sequence[Tensor], align: int, scale: Tensor | None, factor: float
) -> None:
    """`fxzero::cast_pack` into a buffer that is there."""
    _cast_pack_into(buffer, tensors, align, scale, factor)


@_cast_pack_into_op.register_fake
def _cast_pack_into_fake(*_: object) -> None:
    return None


@torch.library.custom_op(
    "fxzero::unpack",
    mutates_args=(),
    schema="(Tensor buffer, SymInt[] sizes, int[] kinds, SymInt align, Tensor? scale,"
    " float factor) -> Tensor[]",
)
def _unpack(
    buffer: Tensor,
    sizes: Sequence[int],
    kinds: Sequence[int],
    align: int,
    scale: Tensor | None,
    factor: float,
) -> list[Tensor]:
    """New tensors of one dim, of some sizes and of dtypes that are positions in `FLOATS`."""
    tensors = _unpack_fake(buffer, sizes, kinds, align, scale, factor)
    _unpack_into(buffer, tensors, align, scale, factor)
    return tensors


@_unpack.register_fake
def _unpack_fake(
    buffer: Tensor,
    sizes: Sequence[int],
    kinds: Sequence[int],
    align: int,
    scale: Tensor | None,
    factor: float,
) -> list[Tensor]:
    each = zip(sizes, kinds, strict=True)
    return [buffer.new_empty((size,), dtype=FLOATS[kind]) for size, kind in each]


@torch.library.custom_op(
    "fxzero::unpack_into",
    mutates_args=("tensors",),
    schema="(Tensor buffer, Tensor(a!)[] tensors, SymInt align, Tensor? scale, float factor) -> ()",
)
def _unpack_into_op(
    buffer: Tensor, tensors: Sequence[Tensor], align: int, scale: Tensor | None, factor: float
) -> None:
    """`fxzero::unpack` into tensors that are there."""
    _unpack_into(buffer, tensors, align, scale, factor)


@_unpack_into_op.register_fake
def _unpack_into_fake(*_: object) -> None:
    return None


def _pack_setup(ctx, inputs, output) -> None:
    tensors, _, ctx.align, scale, ctx.factor = inputs
    ctx.shapes, ctx.kinds = [t.shape for t in tensors], [_KINDS[t.dtype] for t in tensors]
    ctx.save_for_backward(scale)


def _pack_differentiate(ctx, grad):
    (scale,) = ctx.saved_tensors
    sizes = [math.prod(shape) for shape in ctx.shapes]
    grads = torch.ops.fxzero.unpack(grad, sizes, ctx.kinds, ctx.align, scale, ctx.factor)
    return (
        [g.view(shape) for g, shape in zip(grads, ctx.shapes, strict=True)],
        None,
        None,
        None,
        None,
    )


def _unpack_setup(ctx, inputs, output) -> None:
    buffer, _, _, ctx.align, scale, ctx.factor = inputs
    ctx.length, ctx.dtype = buffer.numel(), buffer.dtype
    ctx.save_for_backward(scale)


def _unpack_differentiate(ctx, grads):
    (scale,) = ctx.saved_tensors
    grad = torch.ops.fxzero.cast_pack(grads, ctx.dtype, ctx.align, scale, ctx.factor)
    return grad, None, None, None, None, None


_cast_pack.register_autograd(_pack_differentiate, setup_context=_pack_setup)
_unpack.register_autograd(_unpack_differentiate, setup_context=_unpack_setup)


def _cast_pack_into(
    buffer: Tensor, tensors: Sequence[Tensor], align: int, scale: Tensor | None, factor: float
) -> None:
    if not all(runs_on_triton(t) for t in (buffer, *tensors)):
        buffer.copy_(cast_pack_reference(tensors, buffer.dtype, align, _joint(scale, factor)))
        return
    tensors = [t if _rows(t) is not None else t.contiguous() for t in tensors]
    whole = [t for t in tensors if t.is_contiguous()]
    check_apart("cast_pack", "out and tensors", spans([buffer]), spans(whole))
    if len(whole) < len(tensors):
        gapped = [t for t in tensors if not t.is_contiguous()]
        _check_rows_apart("cast_pack", "out and tensors", _bands([buffer]), _bands(gapped))
    _launch(buffer, tensors, align, scale, factor, pack=True)


def _unpack_into(
    buffer: Tensor, tensors: Sequence[Tensor], align: int, scale: Tensor | None, factor: float
) -> None:
    # A gradient may be one number, expanded: the tensors may then lie right behind it.
    buffer = buffer.contiguous()
    whole = [t for t in tensors if t.is_contiguous()]
    check_apart("unpack_into", "buffer and tensors", spans(whole), spans([buffer]))
    if len(whole) < len(tensors):
        _check_rows_apart("unpack_into", "buffer and tensors", _bands(tensors), _bands([buffer]))
    if all(runs_on_triton(t) for t in (buffer, *tensors)):
        _launch(buffer, tensors, align, scale, factor, pack=False)
        return
    shapes, dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
    made = unpack_reference(buffer, shapes, dtypes, align, _joint(scale, factor))
    for tensor, value in zip(tensors, made, strict=True):
        tensor.copy_(value)


def _launch(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    align: int,
    scale: Tensor | None,
    factor: float,
    *,
    pack: bool,
) -> None:
    layout = lay_out(numel(tensors), buffer.device, align)
    programs = len(layout.work)
    if programs == 0:
        return
    places = addresses(tensors)
    numbers = places + tuple(_KINDS[t.dtype] for t in tensors)
    strided = not all(t.is_contiguous() for t in tensors)
    if strided:
        columns, strides = zip(*(_rows(t) or (1, 1) for t in tensors), strict=True)
        numbers += columns + strides
    launch(_move, (programs,))(
        buffer, table(numbers, buffer.device), *layout, len(tensors), align, factor, scale,
        PACK=pack, HAS_SCALE=scale is not None or factor != 1.0,
        SCALE_ON_DEVICE=scale is not None, STRIDED=strided,
        TENSORS_ALIGNED=not strided and aligned(*places),
        FLAT_ALIGNED=aligned(buffer.data_ptr(), align * buffer.element_size()),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _rows(tensor: Tensor) -> tuple[int, int] | None:
    """Length of a tensor's contiguous rows, and elements from one to the next.

    A tensor without gaps is one row. None if no such two numbers describe the tensor.
    """
    if tensor.is_contiguous():
        return max(tensor.numel(), 1), 0
    dims = [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    columns = 1
    while dims and dims[-1][1] == columns:
        columns *= dims.pop()[0]
    if any(outer != n * inner for (_, outer), (n, inner) in itertools.pairwise(dims)):
        return None
    return columns, dims[-1][1]


class _Band(NamedTuple):
    """Rows of bytes that a tensor takes, each `stride` bytes after the one before."""

    start: int
    width: int
    stride: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + (self.rows - 1) * self.stride + self.width


def _bands(tensors: Sequence[Tensor]) -> tuple[_Band, ...]:
    """Where tensors lie, but for those that are empty; each has the rows of `_rows`."""
    bands = []
    for tensor in tensors:
        rows = _rows(tensor)
        if rows is not None and tensor.numel():
            element, (columns, stride) = tensor.element_size(), rows
            count = tensor.numel() // columns
            bands.append(_Band(tensor.data_ptr(), columns * element, stride * element, count))
    return tuple(bands)


@lru_cache(maxsize=1024)
def _check_rows_apart(
    kernel: str, name: str, written: tuple[_Band, ...], read: tuple[_Band, ...]
) -> None:
    """`check_apart` for tensors with gaps, which may lie in those of each other.

    Raises:
        KernelError: two tensors share memory, or one lies in gaps of another whose rows are
            not as far apart as its own: nothing is then said of whether they share any.
    """
    each = [(band, True) for band in written] + [(band, False) for band in read]
    before: list[tuple[_Band, bool]] = []
    for band, is_written in sorted(each):
        before = [other for other in before if other[0].end > band.start]
        for other, other_is_written in before:
            if (is_written or other_is_written) and not _interleave(other, band):
                found = f"two tensors that share bytes {band.start} to {min(band.end, other.end)}"
                if band.stride != other.stride and band.rows > 1 and other.rows > 1:
                    found = "two tensors in the gaps of each other, of different strides"
                check(False, kernel, name, "in memory of their own", found)
        before.append((band, is_written))


def _interleave(one: _Band, other: _Band) -> bool:
    """Whether rows of a tensor lie in gaps of another; false too if their strides differ."""
    if one.rows > 1 and other.rows > 1 and one.stride != other.stride:
        return False
    # A single row has no stride: that of the other will do.
    stride = max(one.stride if one.rows > 1 else 0, other.stride if other.rows > 1 else 0, 1)
    # Row i of one and row j of the other share bytes if (i - j) * stride is between these two.
    least = other.start - one.start - one.width
    most = other.start - one.start + other.width
    first = max(least // stride + 1, 1 - other.rows)
    last = min(-(-most // stride) - 1, one.rows - 1)
    return first > last


def _joint(scale: Tensor | None, factor: float) -> Number | None:
    if scale is not None:
        return scale * factor
    return None if factor == 1.0 else factor


def _check_arguments(
    kernel: str,
    name: str,
    buffer: Tensor | None,
    tensors: Sequence[Tensor],
    scale: Number | None,
    align: int,
) -> tuple[Tensor | None, float]:
    """The scale, as a tensor if it is one, and as a factor if not."""
    check_integer(kernel, "align", align, 1)
    named = [] if buffer is None else [(name, buffer)]
    named += [(f"tensors[{i}]", t) for i, t in enumerate(tensors)]
    if isinstance(scale, Tensor):
        check_tensor(kernel, scale=scale)
        check(scale.numel() == 1, kernel, "scale", "a tensor of one element", list(scale.shape))
        named.append(("scale", scale))
    elif scale is not None and not is_number(scale):
        check(False, kernel, "scale", "a number, or a tensor of one element", repr(scale))
    for place, tensor in named:
        check_tensor(kernel, **{place: tensor})
        check_float(kernel, **{place: tensor})
        if tensor.device != named[0][1].device:
            asked = f"on {named[0][1].device}, where {named[0][0]} is"
            check(False, kernel, place, asked, tensor.device)
    if buffer is not None:
        check_written(kernel, name, buffer)
    if isinstance(scale, Tensor):
        return scale, 1.0
    return None, 1.0 if scale is None else float(scale)


def cast_pack(
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    align: int = 1,
    scale: Number | None = None,
) -> Tensor:
    """Cast tensors of any shapes and floating-point dtypes into one flat buffer.

    `packed_offsets` says where each one starts. Differentiable in the tensors, not in `scale`.

    Args:
        out: the buffer to write, contiguous, of `dtype` and of the packed length; a new one
            without it. Not differentiable with it.
        align: each tensor starts at a multiple of it, in elements; gaps are filled with zeros.
        scale: what elements are multiplied by, in float32, before they are rounded; a tensor of
            one element is read on the device.

    Raises:
        KernelError: no tensors, dtypes or devices that do not fit, an `out` of another length,
            or one that overlaps a tensor.
    """
    kernel = "cast_pack"
    check(len(tensors) > 0, kernel, "tensors", "at least one", "none")
    check(dtype in FLOATS, kernel, "dtype", "float32, bfloat16, float16 or float64", dtype)
    there, factor = _check_arguments(kernel, "out", out, tensors, scale, align)
    if out is None:
        return torch.ops.fxzero.cast_pack(tensors, dtype, align, there, factor)
    check(out.dtype == dtype, kernel, "out", f"of dtype {dtype}", out.dtype)
    check_shape(kernel, "out", out, (packed_offsets(tensors, align)[1],))
    torch.ops.fxzero.cast_pack_into(out, tensors, align, there, factor)
    return out


def unpack(
    buffer: Tensor,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    *,
    align: int = 1,
    scale: Number | None = None,
) -> list[Tensor]:
    """Cast a flat buffer into new tensors: the inverse of `cast_pack`.

    Differentiable in the buffer, not in `scale`.

    Args:
        buffer: contiguous, of the length that `packed_offsets` gives for the shapes.
        dtype: of all tensors, or one for each; the buffer's without it.
        align, scale: as in `cast_pack`.

    Raises:
        KernelError: a buffer of another length, negative sizes, or dtypes that do not fit.
    """
    kernel = "unpack"
    there, factor = _check_arguments(kernel, "buffer", buffer, (), scale, align)
    for i, shape in enumerate(shapes):
        check_sizes(kernel, f"shapes[{i}]", shape)
    check_shape(kernel, "buffer", buffer, (packed_offsets(shapes, align)[1],))
    dtype = buffer.dtype if dtype is None else dtype
    dtypes = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else list(dtype)
    check(len(dtypes) == len(shapes), kernel, "dtype", f"one, or {len(shapes)}", len(dtypes))
    for each in dtypes:
        check(each in FLOATS, kernel, "dtype", "float32, bfloat16, float16 or float64", each)
    if not shapes:
        return []
    sizes = [math.prod(shape) for shape in shapes]
    kinds = [_KINDS[each] for each in dtypes]
    flat = torch.ops.fxzero.unpack(buffer, sizes, kinds, align, there, factor)
    return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]


def unpack_into(
    buffer: Tensor, tensors: Sequence[Tensor], *, align: int = 1, scale: Number | None = None
) -> None:
    """Cast a flat buffer into tensors that are there: the inverse of `cast_pack`, in place.

    Args:
        buffer: contiguous, of the length that `packed_offsets` gives for the tensors.
        tensors: contiguous, or of contiguous rows that do not overlap. Rows of one may lie
            between those of another if they are as far apart: columns of one matrix.
        align, scale: as in `cast_pack`.

    Raises:
        KernelError: a buffer of another length, dtypes or devices that do not fit, tensors that
            overlap, or whose elements lie in another order.
    """
    kernel = "unpack_into"
    there, factor = _check_arguments(kernel, "buffer", buffer, tensors, scale, align)
    check_shape(kernel, "buffer", buffer, (packed_offsets(tensors, align)[1],))
    for i, tensor in enumerate(tensors):
        rows = _rows(tensor)
        apart = rows is not None and (tensor.is_contiguous() or rows[1] >= rows[0])
        if not apart:
            found = f"strides {list(tensor.stride())}"
            check(False, kernel, f"tensors[{i}]", "contiguous, or of contiguous rows", found)
    if tensors:
        torch.ops.fxzero.unpack_into(buffer, tensors, align, there, factor)
