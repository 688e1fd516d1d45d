"""Every gradient of a replicated parameter is reduced once, whatever path it came by.

A parameter that every rank holds in full (stage 0, and models that nobody sharded) may be
reached around `fxzero::unshard`: through a tuple, ``self._parameters``, a layer that was not
compiled. What autograd then accumulates is this rank's own. A hook on each such parameter
looks at the sum of what arrives in a backward: if that is, to the tensor, what a reduction
returned, there is nothing to do; else the sum is averaged over the ranks. Averaging what was
averaged before changes nothing, since it is equal on all ranks, so the sum may hold both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fxzero._compat import backward_number, is_fake
from fxzero.sharding.params import ParamSpec, spec_of

_arrived: dict[str, tuple[int, int, int]] = {}
"""By parameter key: the backward, the address and the version of a gradient that was reduced."""

OURS = "_fxzero_reduces"
"""Attribute of our hooks, which no user has put there."""


def note_reduced(key: str, gradient: Tensor) -> None:
    """Remember that a gradient on its way to its parameter has been reduced."""
    if not is_fake(gradient):
        _arrived[key] = (backward_number(), gradient.data_ptr(), gradient._version)


def reduce_what_arrives(parameter: nn.Parameter, spec: ParamSpec) -> None:
    """Let autograd reduce those gradients of a replicated parameter that nobody has reduced."""
    key = spec.key

    def hook(gradient: Tensor | None) -> Tensor | None:
        seen = _arrived.pop(key, None)
        if gradient is None or is_fake(gradient):  # None: no path led to the parameter
            return None
        now = (backward_number(), gradient.data_ptr(), gradient._version)
        return None if seen == now or gradient.numel() == 0 else _synchronised(gradient, key)

    setattr(hook, OURS, True)
    _when_trainable(parameter, hook)


def _when_trainable(parameter: nn.Parameter, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Register a hook, also on a parameter that is frozen now and may be trained later."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return  # it never has a gradient
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_hook(hook)
    parameter.requires_grad_(before)


def _synchronised(gradient: Tensor, key: str) -> Tensor:
    """This rank's gradient averaged over the ranks, or kept, as the model's `no_sync` says."""
    spec = spec_of(key)
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    result: Tensor = torch.ops.fxzero.reshard_grad(dense, key, spec.state.sync)
    return result


def hooks_of_users(hooks: Iterable[object]) -> list[object]:
    """The hooks that are not ours."""
    return [hook for hook in hooks if not hasattr(hook, OURS)]
