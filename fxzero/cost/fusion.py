"""What a compiler makes of operators: which it computes where they are read, and which it rounds
otherwise from place to place."""

from __future__ import annotations

import torch
from torch import fx

from fxzero._compat import OpOverload, hint
from fxzero.cost.analytic import flops_of

_REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "argmax", "any", "all"}


def rounds_by_place(node: fx.Node) -> bool:
    """Whether a compiled region rounds some elements otherwise than another one might.

    On CPU Inductor computes a row's last elements, that fill no vector, by the scalar functions of
    the C library, unless it makes one row of all: the last bit of an exponential differs.
    """
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor):
        return False
    if value.device.type != "cpu" or value.dim() == 0 or not value.dtype.is_floating_point:
        return False
    is_exact = node.target.overloadpacket.__name__ in _EXACT
    is_pointwise = torch.Tag.pointwise in node.target.tags
    return is_pointwise and not is_exact and hint(value.shape[-1]) % VECTOR != 0


VECTOR = 16
"""Most elements of a CPU's vector register: AVX-512's of fp32."""
_EXACT = frozenset(
    "abs add sub mul div neg sign relu clamp clamp_min clamp_max maximum minimum where sqrt floor "
    "ceil round trunc convert_element_type _to_copy clone masked_fill fill copy".split()
)
"""Pointwise operators that are rounded correctly, or not at all."""


def is_reduction(node: fx.Node) -> bool:
    """Whether an operator sums up elements, in an order that is the compiler's choice."""
    target = node.target
    return isinstance(target, OpOverload) and target.overloadpacket.__name__ in _REDUCTIONS


def fuses_into_readers(node: fx.Node) -> bool:
    """Whether a compiler computes a node where it is read instead of keeping it in memory."""
    target = node.target
    if not isinstance(target, OpOverload) or flops_of(node):
        return False
    name = target.overloadpacket.__name__
    made = {"full", "iota", "arange", "scalar_tensor", "zeros", "ones", "empty", "expand"}
    return torch.Tag.pointwise in target.tags or name in _REDUCTIONS | made or name in _MOVES


_MOVES = {"clone", "_to_copy", "convert_element_type", "cat", "constant_pad_nd", "slice_scatter"}
