"""What all launchers share: who computes, what an argument must be, how rows are laid out.

A CUDA tensor goes to the Triton kernel, and so does a CPU tensor while Triton interprets
(``TRITON_INTERPRET=1``, set before this package is first imported). Every other tensor, and
float64 anywhere, goes to the same formula in plain torch.

Operators are opaque `torch.library` operators, not `triton_op`s: a kernel stays one node of the
step graph, where the cost model and the memory simulator can see it, and where a CPU graph
lowered by Inductor does not meet a Triton kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeGuard

import torch
import triton
from torch import Tensor

from fxzero.errors import KernelError

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels were made for the interpreter: decided when they are defined."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

MAX_ROW = 65_536
"""Longest row that a kernel which holds whole rows in registers takes, in elements."""


def runs_on_triton(tensor: Tensor) -> bool:
    """Whether a tensor's kernel is the Triton one."""
    if tensor.dtype is torch.float64:
        return False
    return tensor.is_cuda or (INTERPRETED and bool(triton.knobs.runtime.interpret))


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Call a kernel on a grid, on the device of its first tensor: not on whichever is current."""

    def call(*arguments: Any, **settings: Any) -> None:
        device = next(a.device for a in arguments if isinstance(a, Tensor))
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                kernel[grid](*arguments, **settings)
        else:
            kernel[grid](*arguments, **settings)

    return call


def check(holds: bool, kernel: str, argument: str, asked: str, found: object) -> None:
    """Raise unless an argument is what a kernel takes.

    Raises:
        KernelError: it is not. The message names the argument, what it must be and what it is.
    """
    if not holds:
        raise KernelError(f"{kernel}: {argument} must be {asked}, found {found}")


def is_strided(value: object) -> bool:
    """Whether a value is a tensor with strides."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def check_tensor(kernel: str, **tensors: object) -> None:
    """See that arguments are tensors with strides: neither lists nor sparse, and not None."""
    for name, tensor in tensors.items():
        if is_strided(tensor):
            continue
        found = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        check(False, kernel, name, "a strided torch.Tensor", found)


def check_number(
    kernel: str, name: str, value: object, least: float = -math.inf, below: float = math.inf
) -> None:
    """See that a number on the host is finite, at least the one and below the other."""
    # A NaN is in no range. Without an error no message is made, which a trace could not hold.
    if not (is_number(value) and -math.inf < value and least <= value < below):
        lower = [] if least == -math.inf else [f"at least {least:g}"]
        upper = "finite" if below == math.inf else f"below {below:g}"
        check(False, kernel, name, " and ".join([*lower, upper]), repr(value))


def check_integer(kernel: str, name: str, value: object, least: int) -> None:
    """See that a number is an integer, and at least another."""
    if not (isinstance(value, int | torch.SymInt) and value >= least):
        check(False, kernel, name, f"an integer, at least {least}", repr(value))


def check_bool(kernel: str, **flags: object) -> None:
    """See that arguments are True or False."""
    for name, flag in flags.items():
        check(isinstance(flag, bool), kernel, name, "True or False", repr(flag))


def check_sizes(kernel: str, name: str, sizes: object) -> None:
    """See that an argument is a shape."""
    fits = isinstance(sizes, tuple | list) and all(
        isinstance(size, int | torch.SymInt) and size >= 0 for size in sizes
    )
    check(fits, kernel, name, "a shape: integers, each at least 0", sizes)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number on the host, or stands for one in a trace."""
    return isinstance(value, Real | torch.SymInt | torch.SymFloat)


def check_float(kernel: str, **tensors: Tensor | None) -> None:
    """See that tensors hold floating-point numbers that kernels know."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(kernel, **{name: tensor})
            check(
                tensor.dtype in FLOATS,
                kernel,
                name,
                "float32, bfloat16, float16 or float64",
                tensor.dtype,
            )


def check_shape(kernel: str, name: str, tensor: Tensor | None, shape: Sequence[int]) -> None:
    """See that a tensor, if there is one, has a shape."""
    if tensor is not None:
        check_tensor(kernel, **{name: tensor})
        found = tuple(tensor.shape)
        check(found == tuple(shape), kernel, name, f"of shape {list(shape)}", list(found))


def check_together(kernel: str, **tensors: Tensor | None) -> None:
    """See that tensors are on the device of the first one."""
    check_tensor(kernel, **{name: tensor for name, tensor in tensors.items() if tensor is not None})
    first, *others = ((name, t) for name, t in tensors.items() if t is not None)
    for name, tensor in others:
        asked = f"on {first[1].device}, where {first[0]} is"
        check(tensor.device == first[1].device, kernel, name, asked, tensor.device)


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor as ``[rows, row length]`` whose rows are contiguous; copied only if it must be."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    return rows if rows.shape[-1] == 1 or rows.stride(-1) == 1 else rows.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """A tensor in its natural layout, if there is one; copied only if it must be."""
    return None if tensor is None else tensor.contiguous()


def row_block(length: int) -> tuple[int, int]:
    """Elements and warps of a program that holds one row in registers."""
    block = triton.next_power_of_2(max(length, 1))
    return block, min(max(block // 512, 4), 16)


def num_programs(tensor: Tensor, rows: int) -> int:
    """Programs that share rows between them: some for each multiprocessor."""
    if not tensor.is_cuda:
        return min(rows, 4)
    return min(rows, 4 * torch.cuda.get_device_properties(tensor.device).multi_processor_count)
