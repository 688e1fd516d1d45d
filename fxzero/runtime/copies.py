"""Copies between a device and its host's memory, and updates there: started, and joined.

    up = upload([w, b], …); join_upload(up)             h2d    shards that compute may read
    down = download([dw, db], …); arrived(down)         d2h    gradients that updates may read
    landed(down)                                               the device's gradients may end
    u = HostUpdate(adamw)(…); join_updates([u])         host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from fxzero.graph.stamps import Lane
from fxzero.runtime.arena import Layout
from fxzero.runtime.lanes import worker


class Copy:
    """Tensors on their way."""

    __slots__ = ("done", "tensors")

    def __init__(self, tensors: list[Tensor], done: Future[Any]) -> None:
        self.tensors = tensors
        self.done = done


def upload(tensors: list[Tensor], dtype: torch.dtype, bytes_per_s: float) -> Copy:
    """Start copying tensors of the host to the device, as another dtype if it is another."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    return _started(Lane.H2D, made, tensors, bytes_per_s)


def join_upload(copy: Copy) -> list[Tensor]:
    """Wait for what was copied to the device."""
    copy.done.result()
    return copy.tensors


def download(
    tensors: list[Tensor],
    like: list[Tensor],
    staging: Tensor,
    offsets: list[int],
    bytes_per_s: float,
) -> Copy:
    """Start copying tensors of the device into the arena.

    Args:
        like: tensors whose strides they get.
        staging: the part of the arena that copies may fill: (bytes,).
        offsets: where in it each tensor begins.
    """
    places = [
        Layout(tuple(other.shape), other.stride(), tensor.dtype).at(staging, offset)
        for tensor, other, offset in zip(tensors, like, offsets, strict=True)
    ]
    return _started(Lane.D2H, places, tensors, bytes_per_s)


def arrived(copy: Copy) -> list[Tensor]:
    """Let the host's lane wait for what was copied to it: only that lane may read it."""
    worker(Lane.HOST).submit(copy.done.result)
    return copy.tensors


def landed(copy: Copy) -> None:
    """Wait until the device no longer holds what was copied from it."""
    copy.done.result()


def _started(lane: Lane, targets: list[Tensor], sources: list[Tensor], bytes_per_s: float) -> Copy:
    # The list is emptied, so that sources end with their copy, whoever keeps it.
    pairs = list(zip(targets, sources, strict=True))

    def run() -> None:
        while pairs:
            target, source = pairs.pop(0)
            target.copy_(source)

    num_bytes = sum(target.nbytes for target in targets)
    return Copy(targets, worker(lane).submit(run, num_bytes, bytes_per_s))


class HostUpdate:
    """One of `fxzero.runtime.updates.KERNELS`, run on the host's lane."""

    __module__ = "fxzero.runtime.copies"

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel
        self.__name__ = self.__qualname__ = f"host_{kernel.__name__}"

    def __call__(self, *args: Any) -> Future[Any]:
        return worker(Lane.HOST).submit(lambda: self.kernel(*args))

    def __repr__(self) -> str:
        return self.__name__


def join_updates(updates: Sequence[Future[Any]]) -> None:
    """Wait for updates on the host."""
    for update in updates:
        update.result()
