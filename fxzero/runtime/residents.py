"""Copies of the host's parameters that stay on the device from step to step.

    step n      …  update(w) ─ upload(w) ─┐       as soon as it is updated, beside backward
    step n+1    take(w) ──────────────────┘ A     what is there, if w is still what was copied

Between two steps anybody may change a parameter, as in `fxzero.runtime.ahead`. What is on the
device is therefore compared with it bit by bit, on the lane of uploads and before compute reads it,
and copied again where it differs.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxzero._compat import is_fake
from fxzero.graph.stamps import Lane
from fxzero.runtime.ahead import is_same
from fxzero.runtime.copies import Copy, upload
from fxzero.runtime.lanes import worker


class Resident:
    """The device's copies of the parameters of one update."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.tensors: list[Tensor] = []
        self.num_stale = 0
        """How many tensors were copied again because somebody had changed a parameter."""

    def take(self, params: list[Tensor], dtype: torch.dtype, bytes_per_s: float) -> Copy:
        """Start seeing that the copies are what the parameters are."""
        if any(map(is_fake, params)) or not self._is_for(params, dtype):
            copy = upload(params, dtype, bytes_per_s)
            self.tensors = [] if any(map(is_fake, params)) else copy.tensors
            return copy
        tensors = self.tensors

        def refresh() -> None:
            for mine, param in zip(tensors, params, strict=True):
                now = param.to(dtype)
                if not is_same(mine, now):
                    mine.copy_(now)
                    self.num_stale += 1

        return Copy(tensors, params, worker(Lane.H2D).submit(refresh))

    def launch(
        self,
        params: list[Tensor],
        update: Future[Any] | Copy,
        dtype: torch.dtype,
        bytes_per_s: float,
    ) -> None:
        """Start copying what an update on the host leaves, or what comes back from one on the
        device; the next step waits for it."""
        if any(map(is_fake, params)):
            return
        tensors = self.tensors
        done = update.done if isinstance(update, Copy) else update

        def run() -> None:
            done.result()
            for mine, param in zip(tensors, params, strict=True):
                mine.copy_(param)

        num_bytes = sum(tensor.nbytes for tensor in tensors)
        worker(Lane.H2D).submit(run, num_bytes, bytes_per_s)

    def _is_for(self, params: list[Tensor], dtype: torch.dtype) -> bool:
        """Whether there are copies, and they look like these parameters."""
        known = [(mine.shape, mine.stride(), mine.dtype) for mine in self.tensors]
        return known == [(param.shape, param.stride(), dtype) for param in params]


_Known = weakref.WeakValueDictionary[Any, Resident]
_residents: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
"""Kept alive by the graphs that use them: what no graph reads any more ends."""


def resident_of(
    optimizer: Optimizer, keys: tuple[str, ...], dtype: torch.dtype, name: str
) -> Resident:
    """The copies of some of an optimizer's parameters: one for all of its graphs.

    Args:
        keys: the parameters'.
        name: what a graph calls it.
    """
    known = _residents.setdefault(optimizer, weakref.WeakValueDictionary())
    found = known.get((keys, dtype))
    if found is None:
        found = known[keys, dtype] = Resident(name)
    return found


def release(optimizer: Optimizer) -> None:
    """Let go of an optimizer's copies: its graphs will be others. Who needs one makes it anew."""
    for resident in list(_residents.get(optimizer, {}).values()):
        resident.tensors = []
