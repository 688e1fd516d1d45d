"""Run code on tensors without values, and see what it holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxzero._compat.fakes import real_tensors

_ITEM = torch.ops.aten._local_scalar_dense.default


class _Rehearsal(TorchDispatchMode):
    """Counts the bytes of what operators make, from when it is made until nobody holds it."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number
        self.held_bytes = self.most_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        if func is _ITEM:
            dtype = args[0].dtype
            if dtype is torch.bool:
                return False
            return self.number if dtype.is_floating_point else int(self.number)
        given = {self._storage(t) for t in pytree.tree_iter((args, kwargs)) if _is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, pytree.tree_iter(result)):
            storage = self._storage(tensor)
            if storage not in given and storage not in self._alive:
                self._note(tensor.untyped_storage(), storage)
        return result

    @staticmethod
    def _storage(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _note(self, storage: torch.UntypedStorage, number: int) -> None:
        self._alive.add(number)
        num_bytes = storage.nbytes()
        self.held_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        weakref.finalize(storage, self._forget, number, num_bytes)

    def _forget(self, number: int, num_bytes: int) -> None:
        self._alive.discard(number)
        self.held_bytes -= num_bytes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def rehearse(make: Callable[[], Callable[[], Any]], number: float) -> int:
    """Run a function on tensors without values.

    Args:
        make: makes the function, and what it works on, which is not counted.
        number: what a tensor's value is taken for where Python asks for it; of a flag, False.

    Returns:
        The most bytes that it held at a time of what it made.
    """
    # Optimizers take another way while somebody compiles them, which nobody does here.
    runs = mock.patch.object(torch.compiler, "_is_compiling_flag", new=False)
    with real_tensors(), runs, FakeTensorMode(allow_non_fake_inputs=True):
        call = make()
        with _Rehearsal(number) as rehearsal:
            call()
    return rehearsal.most_bytes
