"""See that what is on disk is right before somebody saves it.

A step checks every piece that it reads. A state dict is read through the mapping, which nothing
checks: a byte that the disk has changed would go into a checkpoint without a word.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fxzero.runtime.disk_arena import disk_arena_of


class CheckSaves:
    """A hook that runs before a model's, or an optimizer's, state dict is made, or loaded.

    Args:
        of_parameters: whether it is the model's, else the optimizer's.
        loads: whether it is loaded: what it writes over need not be right.
    """

    def __init__(
        self, optimizer: Optimizer | None, *, of_parameters: bool, loads: bool = False
    ) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._of_parameters = of_parameters
        self._loads = loads

    def __call__(self, *_: Any, **__: Any) -> None:
        """See to it.

        Raises:
            DiskError: something on disk is not what was written there.
        """
        optimizer = self._optimizer() if self._optimizer is not None else None
        arena = disk_arena_of(optimizer) if optimizer is not None else None
        if arena is None:
            return
        if self._loads:
            arena.expect(of_parameters=self._of_parameters)
        else:
            arena.check(of_parameters=self._of_parameters)

    def __reduce__(self) -> Any:
        """A copied, or pickled, model has nothing on disk."""
        return _nothing_to_check, (self._of_parameters,)


def _nothing_to_check(of_parameters: bool) -> CheckSaves:
    return CheckSaves(None, of_parameters=of_parameters)


_checked: weakref.WeakSet[Any] = weakref.WeakSet()


def check_saves(model: nn.Module, optimizer: Optimizer) -> None:
    """Check what is on disk whenever a state dict is made; asked for again, nothing happens."""
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    owners: tuple[Any, ...] = (optimizer, model)
    for owner in owners:
        of = {"of_parameters": owner is model}
        owner.register_state_dict_pre_hook(CheckSaves(optimizer, **of))
        owner.register_load_state_dict_pre_hook(CheckSaves(optimizer, **of, loads=True))
