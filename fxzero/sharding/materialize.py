"""Meta-device models: give each module real memory, and let it initialise itself.

A module is materialised right before it is sharded and its full parameters are freed
right after, so the most that a rank holds is its shards and one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxzero._compat import is_fake
from fxzero.errors import ShardingError


def refuse_without_initialiser(model: nn.Module) -> None:
    """Refuse a meta module that does not know how to initialise itself.

    Raises:
        ShardingError: names the module, its tensors and what to write.
    """
    if callable(getattr(model, "_init_weights", None)):
        return
    for path, module in model.named_modules():
        names = _meta_names(module)
        if names and not callable(getattr(module, "reset_parameters", None)):
            raise ShardingError(
                f"{path or 'the model'} ({type(module).__name__}) has {', '.join(names)} on the "
                "meta device and no reset_parameters() to fill them. Define one that initialises "
                "every parameter and buffer of the module, or build the model on a real device."
            )


def module(
    model: nn.Module,
    path: str,
    owner: nn.Module,
    device: torch.device,
    tied: Mapping[str, nn.Parameter],
    home: torch.device | None = None,
) -> None:
    """Replace the meta tensors that `owner` holds itself by initialised ones.

    Args:
        model: the root, whose ``_init_weights(module)`` runs last if there is one.
        path: where `owner` sits, for messages.
        device: where the values go.
        home: where those of parameters go, if that is not the device.
        tied: parameters of `owner` that an earlier module has initialised already; the
            initialiser gets stand-ins for them, whose values are dropped.

    Raises:
        ShardingError: the initialiser left a value unset.
    """
    names = _meta_names(owner)
    if all(name in tied for name in names):
        return
    for name in names:
        _make_real(owner, name, device, home or device)
    with torch.no_grad():
        own_initialiser: Any = getattr(owner, "reset_parameters", None)
        if callable(own_initialiser):
            own_initialiser()
        model_initialiser: Any = getattr(model, "_init_weights", None)
        if callable(model_initialiser):
            model_initialiser(owner)
    for name in names:
        value = owner._parameters.get(name, owner._buffers.get(name))
        if value is None or not value.is_floating_point() or is_fake(value):
            continue
        if bool(value.isnan().any()):
            raise ShardingError(
                f"{path}.{name} was on the meta device and {type(owner).__name__}."
                "reset_parameters() left it unset. Fill it there."
            )


def _meta_names(owner: nn.Module) -> list[str]:
    tensors = {**owner._parameters, **owner._buffers}
    return [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]


def _make_real(owner: nn.Module, name: str, device: torch.device, home: torch.device) -> None:
    """Allocate a tensor; NaN marks what an initialiser forgets."""
    if name in owner._buffers:
        buffer = owner._buffers[name]
        assert buffer is not None
        owner._buffers[name] = _unset(buffer, device)
        return
    parameter = owner._parameters[name]
    assert parameter is not None
    owner._parameters[name] = nn.Parameter(_unset(parameter, home), parameter.requires_grad)


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.empty_like(like, device=device)
    return value.fill_(float("nan")) if value.is_floating_point() else value.zero_()
