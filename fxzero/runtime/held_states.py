"""Optimizer state that is held elsewhere than its parameters: on the host, for updates on a GPU.

    optimizer.state[p]["exp_avg"]    of the device, when torch has made or loaded it
                                  →  of the host, for a step that streams it in and out
                                  →  of the device again, before ``optimizer.step()`` itself

Torch makes and loads state where the parameters are, and steps with it there. What a compiled step
holds on the host comes back for whoever calls ``optimizer.step()`` between two steps.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxzero._compat import call_before_steps, dtensor_of, layout_of
from fxzero.sharding.ops import local_of

State = MutableMapping[str, Any]
"""What an optimizer keeps for a parameter."""


def hold(state: State, name: str, device: torch.device) -> Tensor:
    """See that a tensor of a parameter's state is on a device; this rank's part of it."""
    value: Tensor = state[name]
    if local_of(value).device != device:
        value = state[name] = _moved(value, device)
    return local_of(value)


def hold_all(state: State, device: torch.device, *, counts: bool = True) -> None:
    """See that all of a parameter's state is on a device.

    Args:
        counts: that of its steps, too.
    """
    for name, value in list(state.items()):
        if isinstance(value, Tensor) and (counts or name != "step"):
            hold(state, name, device)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """A DTensor says where its part is, and is another one where that is elsewhere."""
    if not isinstance(value, DTensor):
        return value.to(device)
    made = dtensor_of(local_of(value).to(device), layout_of(value))
    made.__class__ = value.__class__
    return made


_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def give_back_before_steps(optimizer: Optimizer) -> None:
    """Let an optimizer's state be with its parameters when somebody calls its ``step()``."""
    _watched.add(optimizer)
    call_before_steps(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in _watched:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                hold_all(optimizer.state[parameter], local_of(parameter).device)
