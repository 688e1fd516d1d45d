"""One launch over many tensors: tables that tell each program which part of which tensor is its.

    work     [programs, 2]   tensor, block of it        made from the tensors' sizes, and kept:
    sizes    [tensors]       elements                   a bucket's sizes are those of the last step
    starts   [tensors]       where a tensor begins when all lie one after another
    numbers  [rows, tensors] addresses and the like     kept too: an allocator that gives the same
                                                        memory every step makes the same table

A program loads its two numbers from `work`, an address from `numbers`, and casts that to a
pointer. Nothing but tables is read that a kernel on one tensor would not read: 8 bytes for every
`BLOCK` elements.

In a CUDA graph a table must not come from memory that Python may free before the graph is
replayed. While one is captured, tables are made anew inside of it, from numbers that travel as
arguments of torch's kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxzero._compat import foreach_add_
from fxzero.kernels.launch import INTERPRETED, check

BLOCK = 1024
"""Elements of a program: 8 for each thread of 4 warps, so that 16-bit ones fill a 16-byte load."""

ALIGNMENT = 16
"""Bytes of the widest load: addresses that are multiples of it are loaded that way."""

POINTEES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What Triton calls a dtype."""

# Triton's interpreter truncates where it should round to bfloat16, and loses subnormal numbers.
_ROUND_BFLOAT16: tl.constexpr = tl.constexpr(INTERPRETED)


class WorkTables(NamedTuple):
    """Tables that depend on sizes alone."""

    work: Tensor
    """int32 ``[programs, 2]``."""
    sizes: Tensor
    """int64 ``[tensors]``."""
    starts: Tensor
    """int64 ``[tensors]``."""


def round_up(size: int, align: int) -> int:
    """The next multiple of `align`."""
    return -(-size // align) * align


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Where tensors begin in memory."""
    return tuple(t.data_ptr() for t in tensors)


def numel(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Elements of each tensor."""
    return tuple(t.numel() for t in tensors)


def aligned(*numbers: int) -> bool:
    """Whether addresses or offsets, in bytes, allow the widest loads."""
    return all(n % ALIGNMENT == 0 for n in numbers)


def lay_out(sizes: tuple[int, ...], device: torch.device, align: int = 1) -> WorkTables:
    """Share tensors of some sizes among programs of `BLOCK` elements, on the device.

    Args:
        align: each tensor starts at a multiple of it, and its programs also cover the gap
            before the next one.
    """
    stream = _stream(device)
    if stream is None:
        return _lay_out.__wrapped__(sizes, device, align, stream)
    return _lay_out(sizes, device, align, stream)


def table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Integers as an int64 tensor on the device."""
    stream = _stream(device)
    if stream is None:
        return _table.__wrapped__(numbers, device, stream)
    return _table(numbers, device, stream)


def check_bucket(
    kernel: str, name: str, tensors: Sequence[Tensor], like: Sequence[Tensor], first: str
) -> None:
    """See that a list of tensors goes with another: count, shapes, device, one dtype.

    Raises:
        KernelError: it does not. The message names the list, and the position of the tensor.
    """
    check(len(tensors) == len(like), kernel, name, f"as many tensors as {first}, {len(like)}",
          len(tensors))  # fmt: skip
    for i, (tensor, other) in enumerate(zip(tensors, like, strict=True)):
        fits = tensor.dtype == tensors[0].dtype and tensor.shape == other.shape
        if fits and tensor.device == like[0].device:
            continue  # Every step comes here for every tensor: no message is made.
        place = f"{name}[{i}]"
        same_dtype = f"of the dtype of {name}[0], {tensors[0].dtype}"
        check(tensor.dtype == tensors[0].dtype, kernel, place, same_dtype, tensor.dtype)
        same_shape = f"of shape {list(other.shape)}, that of {first}[{i}]"
        check(tensor.shape == other.shape, kernel, place, same_shape, list(tensor.shape))
        same_device = f"on {like[0].device}, where {first}[0] is"
        check(tensor.device == like[0].device, kernel, place, same_device, tensor.device)


def check_written(kernel: str, name: str, tensor: Tensor) -> None:
    """See that a tensor that a kernel writes by address has no gaps.

    Raises:
        KernelError: it has.
    """
    if not tensor.is_contiguous():
        check(False, kernel, name, "contiguous", f"strides {list(tensor.stride())}")


Spans = tuple[tuple[int, int], ...]
"""First byte and number of bytes of tensors."""


@lru_cache(maxsize=1024)
def check_apart(kernel: str, name: str, written: Spans, read: Spans = ()) -> None:
    """See that what a kernel writes is written once, and not read elsewhere: programs run in any
    order.

    Args:
        name: what the spans are, for the message.

    Raises:
        KernelError: two tensors share memory.
    """
    ordered = sorted(span for span in written if span[1])
    pairs = list(itertools.pairwise(ordered))
    pairs += [(min(one, other), max(one, other)) for one in read if one[1] for other in ordered]
    for (start, length), (later, _) in pairs:
        if start + length > later:
            found = f"two tensors that share {start + length - later} bytes or more"
            check(False, kernel, name, "in memory of their own", found)


def spans(*lists: Sequence[Tensor]) -> Spans:
    """First byte and number of bytes of contiguous tensors."""
    return tuple((t.data_ptr(), t.numel() * t.element_size()) for ts in lists for t in ts)


def _stream(device: torch.device) -> int | None:
    """The stream on which a table is made and used, by its handle; None while it is captured.

    Tables that are kept belong to one stream each: nothing else orders their making, use and end.
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream


@lru_cache(maxsize=256)
def _lay_out(
    sizes: tuple[int, ...], device: torch.device, align: int, stream: int | None
) -> WorkTables:
    padded = [round_up(size, align) for size in sizes]
    blocks = [triton.cdiv(size, BLOCK) for size in padded]
    programs = sum(blocks)
    sizes_there = _send(sizes, device, stream)
    padded_there = (sizes_there + (align - 1)) // align * align
    blocks_there = (padded_there + (BLOCK - 1)) // BLOCK
    tensor = torch.repeat_interleave(blocks_there, output_size=programs)
    first = (blocks_there.cumsum(0) - blocks_there)[tensor]
    block = torch.arange(programs, device=device) - first
    return WorkTables(
        torch.stack((tensor, block), dim=1).int(),
        sizes_there,
        padded_there.cumsum(0) - padded_there,
    )


@lru_cache(maxsize=1024)
def _table(numbers: tuple[int, ...], device: torch.device, stream: int | None) -> Tensor:
    return _send(numbers, device, stream)


def _send(numbers: Sequence[int], device: torch.device, stream: int | None) -> Tensor:
    """Integers, to the device, without waiting for it."""
    if stream is None:
        return _send_as_arguments(numbers, device)
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=True)
    return host.to(device, non_blocking=True)


def _send_as_arguments(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Integers, to the device, as arguments of kernels: nothing on the host is read later."""
    there = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    if numbers:
        foreach_add_(list(there.unbind()), list(numbers))
    return there


@triton.jit
def number(argument, ON_DEVICE: tl.constexpr):
    """A number that is an argument of the kernel, or one that it points to; float32."""
    return tl.load(argument).to(tl.float32) if ON_DEVICE else tl.full([], argument, tl.float32)


@triton.jit
def to_float32(x):
    """A block in float32, exactly."""
    if _ROUND_BFLOAT16 and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def from_float32(x, DTYPE: tl.constexpr):
    """A float32 block rounded to another dtype: to nearest, ties to even."""
    if _ROUND_BFLOAT16 and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A carry would turn some that are not a number into one.
        rounded = tl.where(x == x, rounded, 0x7FC0)
        narrow = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(DTYPE)
    return narrow


@triton.jit
def pointers_to(ptr, at, ALIGNED: tl.constexpr):
    """Pointers to elements; where they are aligned and one after another, Triton is told so."""
    pointers = ptr + at
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def load_block(ptr, at, inside, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements `at` of a tensor in float32; zero outside of it, where a block has an outside."""
    pointers = pointers_to(ptr, at, ALIGNED)
    x = tl.load(pointers, mask=inside, other=0.0) if MASKED else tl.load(pointers)
    return to_float32(x)


@triton.jit
def store_block(ptr, at, inside, x, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    """Write elements `at` of a tensor: float32 values rounded to its dtype, or values of that."""
    pointers = pointers_to(ptr, at, ALIGNED)
    if x.dtype == tl.float32:
        x = from_float32(x, ptr.dtype.element_ty)
    if MASKED:
        tl.store(pointers, x, mask=inside)
    else:
        tl.store(pointers, x)
