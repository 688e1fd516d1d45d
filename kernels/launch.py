"""What all launchers share: who computes, what an argument must be, how rows are laid out.

A CUDA tensor goes to the Triton kernel, and so does a CPU tensor while Triton interprets
(``TRITON_INTERPRET=1``, set before this package is first imported). Every other tensor, and
float64 anywhere, goes to the same formula in plain torch.

Operators are opaque `torch.library` operators, not `triton_op`s: a kernel stays one node of the
step graph, where the cost model and the memory simulator can see it, and where a CPU graph
lowered by Inductor does not meet a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def check_float(kernel: str, **tensors: Tensor | None) -> None:
    """See that tensors hold floating-point numbers that kernels know."""
    for name, tensor in tensors.items():
        if tensor is not None:
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
        found = tuple(tensor.shape)
        check(found == tuple(shape), kernel, name, f"of shape {list(shape)}", list(found))


def check_together(kernel: str, **tensors: Tensor | None) -> None:
    """See that tensors are on the device of the first one."""
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
