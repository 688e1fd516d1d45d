"""Whole values of what ranks hold in parts, for tools that know of plain tensors.

Every rank takes part; of a model one whole tensor is held at a time, and all of them on the host of
the rank that keeps them. A tensor that has several names stays one, so that whoever writes sees
that they are tied.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxzero import _compat
from fxzero.checkpoint import by_name


def whole(value: Any) -> Any:
    """A plain tensor of what may be one that ranks hold in parts, as a norm over their gradients
    is. A collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_weights(
    model: nn.Module, *, keep: bool, names: Collection[str] | None = None
) -> dict[str, Any]:
    """A state dict of whole tensors in the host's memory. A collective: all ranks call it alike.

    Args:
        keep: whether this rank wants them; else it only gives its parts.
        names: which entries; None takes all.

    Returns:
        The state dict; an empty one on a rank that does not want it.
    """
    found: dict[str, Any] = {}
    by_identity: dict[int, Tensor] = {}
    with _compat.without_torch_function(), torch.no_grad():
        for name, value in by_name.model_state(model).items():
            if names is not None and name not in names:
                continue
            if not isinstance(value, Tensor):
                found[name] = value
                continue
            if id(value) not in by_identity:
                tensor = whole(value.detach())
                by_identity[id(value)] = tensor.cpu() if keep else tensor.new_empty(0)
            found[name] = by_identity[id(value)]
    return found if keep else {}
