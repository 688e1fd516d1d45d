"""How far a kernel may be from its float64 reference: derived, not chosen.

With u = 2⁻²⁴ for float32, 2⁻⁸ for bfloat16, 2⁻¹¹ for float16 (half the distance from 1 to the
next number: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 2.1), twice
that for bfloat16 in Triton's interpreter, which cuts instead of rounding, a
kernel that rounds to its dtype r times, does c operations in float32 on the way to an element,
and sums n terms in a tree of depth log2(n), is within

    (r · u(dtype) + (c + log2(n)) · u(float32)) · scale

where scale is the largest sum of absolute values that an element is made of (section 4.2). The
reference gets the inputs that the kernel got, as float64: their rounding is not counted.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.tiers import exhaustive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_size = pytest.mark.parametrize("size", [1, 31, 4097, *exhaustive(127, 1000)])


def unit_roundoff(dtype: torch.dtype) -> float:
    """How far off one rounding may be: half the distance from 1 to the next number."""
    cuts = DEVICE == "cpu" and dtype is torch.bfloat16
    return torch.finfo(dtype).eps / (1 if cuts else 2)


def tolerance(
    dtype: torch.dtype, *, roundings: int = 1, operations: int = 8, terms: int = 1
) -> float:
    """The bound of the module's docstring, for a scale of 1.

    Args:
        roundings: times that a value is rounded to `dtype` on its way.
        operations: float32 operations on the way to an element, sums aside; exp, tanh and the
            like count as 2.
        terms: summands of the longest sum.
    """
    steps = operations + math.log2(max(terms, 1))
    return roundings * unit_roundoff(dtype) + steps * unit_roundoff(torch.float32)


def check_close(
    found: Tensor,
    reference: Tensor,
    *,
    scale: float | Tensor | None = None,
    dtype: torch.dtype | None = None,
    roundings: int = 1,
    operations: int = 8,
    terms: int = 1,
) -> None:
    """See that every element is within the bound of its float64 reference.

    Args:
        scale: the largest sum of absolute values that an element is made of; without it, the
            largest element of the reference.
        dtype: what values are rounded to; without it, that of `found`.
    """
    assert reference.dtype is torch.float64
    assert found.shape == reference.shape, (found.shape, reference.shape)
    if not found.numel():
        return
    assert bool(torch.isfinite(found).all()), "the kernel made a value that is not finite"
    size = float(
        reference.detach().abs().max() if scale is None else torch.as_tensor(scale).detach().max()
    )
    bound = size * tolerance(
        dtype or found.dtype, roundings=roundings, operations=operations, terms=terms
    )
    error = float((found.detach().double() - reference.detach()).abs().max())
    assert error <= bound, f"off by {error:.3e}, {bound:.3e} are allowed (largest {size:.3e})"


def random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Normal numbers on the device under test."""
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(grad)


def double(*tensors: Tensor) -> list[Tensor]:
    """The same values in float64, as new leaves that require what the others did."""
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
