"""Copies between a device and its host's memory, and updates there: started, and joined.

up = upload([w, b], …); join_upload(up)             h2d    shards that compute may read
down = download([dw, db], …); arrived(down)         d2h    gradients that updates may read
landed(down)                                               the device's gradients may end
u = HostUpdate(adamw)(…); join_updates([u])         host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import is_fake
from fxzero.graph.stamps import Lane
from fxzero.runtime.arena import Layout
from fxzero.runtime.lanes import worker


class Copy:
    """Tensors on their way."""

    __slots__ = ("done", "sources", "tensors")

    def __init__(self, tensors: list[Tensor], sources: list[Tensor], done: Future[Any]) -> None:
        self.tensors = tensors
        self.sources = sources
        """What is copied: it lives until somebody has waited."""
        self.done = done

    def wait(self) -> None:
        """Wait until all is there, and let go of what it was copied from."""
        self.done.result()
        self.sources.clear()


def upload(tensors: list[Tensor], dtype: torch.dtype | None, bytes_per_s: float) -> Copy:
    """Start copying tensors of the host to the device, as another dtype if one is given."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    return _started(Lane.H2D, made, tensors, bytes_per_s)


def join_upload(copy: Copy) -> list[Tensor]:
    """Wait for what was copied to the device."""
    copy.wait()
    return copy.tensors


def download(
    tensors: list[Tensor],
    like: list[Tensor],
    staging: Tensor,
    offsets: list[int],
    dtypes: list[torch.dtype],
    behind: list[Future[Any]],
    bytes_per_s: float,
) -> Copy:
    """Start copying tensors of the device into the arena.

    Args:
        like: tensors whose strides they get.
        staging: the part of the arena that copies may fill: (bytes,).
        offsets: where in it each tensor begins.
        dtypes: what they are by their fake kernels, for which there is room. Statistics of norms
            of bf16 on CPU are float32 all the same: such a tensor gets memory of its own.
        behind: updates that read what is in these places now.
    """
    places = [
        replace(Layout.of(other), dtype=tensor.dtype).at(staging, offset)
        if tensor.dtype is dtype
        else torch.empty_like(other, dtype=tensor.dtype)
        for tensor, other, offset, dtype in zip(tensors, like, offsets, dtypes, strict=True)
    ]
    return _started(Lane.D2H, places, tensors, bytes_per_s, behind)


def join_download(copy: Copy) -> list[Tensor]:
    """Wait for what was copied to the host; the device need no longer hold it."""
    copy.wait()
    return copy.tensors


def arrived(copy: Copy) -> list[Tensor]:
    """Let the host's lane wait for what was copied to it: only that lane may read it."""
    _submitted(Lane.HOST, copy.done.result, copy.tensors)
    return copy.tensors


def landed(copy: Copy) -> None:
    """Wait until the device need no longer hold what was copied from it."""
    copy.wait()


def _started(
    lane: Lane,
    targets: list[Tensor],
    sources: list[Tensor],
    bytes_per_s: float,
    behind: Sequence[Future[Any]] = (),
) -> Copy:
    def run() -> None:
        for update in behind:
            update.result()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    num_bytes = sum(target.nbytes for target in targets)
    return Copy(targets, sources, _submitted(lane, run, targets, num_bytes, bytes_per_s))


def _submitted(
    lane: Lane,
    work: Callable[[], Any],
    tensors: Sequence[Tensor],
    num_bytes: int = 0,
    bytes_per_s: float = 0.0,
) -> Future[Any]:
    """Give work to a lane; with fake tensors, of which a thread has its own mode, do it at once."""
    if not any(map(is_fake, tensors)):
        return worker(lane).submit(work, num_bytes, bytes_per_s)
    done: Future[Any] = Future()
    done.set_result(work())
    return done


class HostUpdate:
    """One of `fxzero.runtime.updates.KERNELS`, run on the host's lane."""

    __module__ = "fxzero.runtime.copies"
    runs_on_host = True

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel
        self.__name__ = self.__qualname__ = f"host_{kernel.__name__}"

    def __call__(self, *args: Any) -> Future[Any]:
        params: list[Tensor] = args[0]
        return _submitted(Lane.HOST, lambda: self.kernel(*args), params)

    def __repr__(self) -> str:
        return self.__name__


def join_updates(updates: Sequence[Future[Any]]) -> None:
    """Wait for updates on the host."""
    for update in updates:
        update.result()
