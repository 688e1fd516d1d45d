"""What an operator allocates while it runs, besides its results.

Memory is simulated from values of nodes; an operator that works through its input in chunks
holds a chunk too. Whoever defines such an operator registers a formula, as
`torch.utils.flop_counter` has it for FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

_formulas: dict[Any, Callable[..., int]] = {}


def register_workspace_formula(
    packet: Any,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register ``formula(*args, **kwargs) -> bytes`` for an operator; it gets fake tensors."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[packet] = formula
        return formula

    return register


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a node's operator holds while it runs, its arguments and results aside."""
    formula = _formulas.get(getattr(node.target, "overloadpacket", None)) if _formulas else None
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return formula(*args, **kwargs)
