"""Every operator that runs, seen below autograd, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SeeOperators(TorchDispatchMode):
    """A context that calls a function behind every operator. (torch 2.11 to 2.13; autograd's
    threads of a device run in the contexts of whoever has called backward.)

    Args:
        see: is given the operator, its arguments, and what it has returned.
    """

    def __init__(self, see: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and show it."""
        result = func(*args, **(kwargs or {}))
        self._see(func, args, kwargs or {}, result)
        return result
