"""Copies of the host's parameters that stay on the device from step to step.

    step n      …  update(w) ─ send(w) ───┐       as soon as it is updated, beside backward
    step n+1    take(w) ──────────────────┘ A     what is there, if w is still what was sent

Between two steps anybody may change a parameter, as in `fxzero.runtime.ahead`. What was sent is
therefore compared with it bit by bit, on the lane of uploads and before compute reads the copy, and
sent again where it differs. To a GPU it is sent from a snapshot in pinned memory, which is what the
parameter is compared with: nobody need wait for a copy that is still running to write to one.
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
from fxzero.runtime.streams import Event, here, host_waits_for, pinned_like


class Resident:
    """The device's copies of the parameters of one update."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.tensors: list[Tensor] = []
        self.sent: list[Tensor] = []
        """What they hold, on the host: they themselves where the device is a CPU by the books."""
        self.num_stale = 0
        """How many tensors were sent again because somebody had changed a parameter."""
        self._leaving: Event | None = None
        """Where the last copy of what was sent is over: until then it must stay what it is."""

    def take(
        self,
        params: list[Tensor],
        dtype: torch.dtype,
        device: torch.device | None,
        bytes_per_s: float,
    ) -> Copy:
        """Start seeing that the copies are what the parameters are."""
        if any(map(is_fake, params)):
            self.tensors = self.sent = []
            return upload(params, dtype, device, bytes_per_s)
        is_known = self._is_for(params, dtype)
        if not is_known:
            self.tensors = [torch.empty_like(p, dtype=dtype, device=device) for p in params]
            self.sent = list(map(pinned_like, self.tensors)) if here() else self.tensors
        tensors, sent = self.tensors, self.sent

        def run() -> None:
            stale = list(zip(tensors, sent, params, strict=True))
            if is_known:
                stale = [one for one in stale if not is_same(one[1], one[2].to(dtype))]
                self.num_stale += len(stale)
            self._send(stale)

        moved = (0, 0.0) if is_known else (sum(tensor.nbytes for tensor in tensors), bytes_per_s)
        return Copy(tensors, params, worker(Lane.H2D).submit(run, *moved))

    def launch(
        self,
        params: list[Tensor],
        update: Future[Any] | Copy,
        dtype: torch.dtype,
        device: torch.device | None,
        bytes_per_s: float,
    ) -> None:
        """Start sending what an update on the host leaves, or what comes back from one on the
        device; the next step waits for it."""
        if any(map(is_fake, params)):
            return
        tensors, sent = self.tensors, self.sent
        done = update.done if isinstance(update, Copy) else update

        def run() -> None:
            host_waits_for(done)
            self._send(list(zip(tensors, sent, params, strict=True)))

        num_bytes = sum(tensor.nbytes for tensor in tensors)
        worker(Lane.H2D).submit(run, num_bytes, bytes_per_s)

    def _send(self, parameters: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Copy parameters to the device, in the lane of uploads, once what was sent before has left
        the host.

        Args:
            parameters: its copy, what is kept of that on the host, and the parameter.
        """
        now = here()
        if now is not None and self._leaving is not None and parameters:
            self._leaving.synchronize()
        for mine, kept, param in parameters:
            kept.copy_(param)
            if now is not None:
                mine.copy_(kept, non_blocking=True)
                now.streams.outlives(mine, now.stream)  # a step that waits for it need not follow
        if now is not None:
            self._leaving = now.record()

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
        resident.tensors = resident.sent = []
