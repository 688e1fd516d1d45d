"""Copies between a device and its host's memory, and updates there: started, and joined.

up = upload([w, b], …); join_upload(up)             h2d    shards that compute may read
down = download([dw, db], …); arrived(down)         d2h    gradients that updates may read
landed(down)                                               the device's gradients may end
u = HostUpdate(adamw)(…); join_updates([u])         host

up = upload([m, v], …); join_upload(up)             h2d    state that an update on the device reads
back = bring_back([m, v], …); landed(back)          d2h    and what it has made of it

up = upload([w, b], …); join_upload(up)             h2d    shards of the ordinary loop, and
down = send_home([dw, db], …); join_download(down)  d2h    gradients for its optimizer

To and from a GPU they go on the streams of their lanes, from and to pinned memory, and those who
join them wait by events (`fxzero.runtime.lanes`). A `Copy` holds both sides until it was waited
for. What others may write to or read behind a graph, the host waits for as the graph ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from fxzero._compat import is_fake
from fxzero.graph.stamps import Lane
from fxzero.runtime.lanes import worker
from fxzero.runtime.streams import (
    here,
    host_catches_up,
    leaves_open,
    pinned_like,
    wait_for,
)
from fxzero.transfer import Form


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
        wait_for(self.done)
        self.sources.clear()


def upload(
    tensors: list[Tensor],
    dtype: torch.dtype | None,
    device: torch.device | None,
    bytes_per_s: float,
) -> Copy:
    """Start copying tensors of the host to the device.

    Args:
        dtype: what they become there, if another one: cast before, for fewer bytes.
        device: where; None where the device is a CPU by the books alone.
    """
    made = [torch.empty_like(tensor, dtype=dtype, device=device) for tensor in tensors]
    return _started(Lane.H2D, made, tensors, bytes_per_s)


def join_upload(copy: Copy) -> list[Tensor]:
    """Wait for what was copied to the device."""
    copy.wait()
    return copy.tensors


def send_home(tensors: list[Tensor], bytes_per_s: float) -> Copy:
    """Start copying tensors of a device to the host, into memory of their own."""
    return _started(Lane.D2H, list(map(pinned_like, tensors)), tensors, bytes_per_s)


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
        Form.of(other)._replace(dtype=tensor.dtype).at(staging, offset)
        if tensor.dtype is dtype
        else pinned_like(other, tensor.dtype)
        for tensor, other, offset, dtype in zip(tensors, like, offsets, dtypes, strict=True)
    ]
    return _started(Lane.D2H, places, tensors, bytes_per_s, behind)


def bring_back(
    tensors: list[Tensor], homes: list[Tensor], updated: None, bytes_per_s: float
) -> Copy:
    """Start copying tensors of the device over those of the host that they were copied from.

    Args:
        updated: what the update returns that has changed them: it comes first.
    """
    return _started(Lane.D2H, homes, tensors, bytes_per_s)


bring_back.overwrites_homes = True  # type: ignore[attr-defined]


def join_download(copy: Copy) -> list[Tensor]:
    """Wait for what was copied to the host; the device need no longer hold it."""
    copy.wait()
    return copy.tensors


def arrived(copy: Copy) -> list[Tensor]:
    """Let the host's lane wait for what was copied to it: only that lane may read it.

    It holds the copy until then: where compute does not wait for it, nobody else does.
    """
    _submitted(Lane.HOST, lambda: wait_for(copy.done), copy.tensors)
    return copy.tensors


def landed(copy: Copy) -> None:
    """Wait until the device need no longer hold what was copied from it."""
    copy.wait()


def move_up(target: Tensor, source: Tensor) -> None:
    """Copy to the device, in a lane; on a stream nobody waits for it.

    What is to become another dtype, or to lie otherwise, is changed on the host before: torch would
    go through memory of its own, for which it waits. The host may cast before the device is there:
    it does so with what lives on the host, which nothing changes before its update (`verify`).
    """
    if here() is not None and not _alike(target, source):
        if target.dtype is source.dtype:
            host_catches_up()
        source = pinned_like(target).copy_(source)
    target.copy_(source, non_blocking=here() is not None)


def move_down(target: Tensor, source: Tensor) -> None:
    """Copy from the device, in a lane; on a stream nobody waits for it.

    What is to lie otherwise is changed on the device before: torch would read memory of the host
    that is still being written.
    """
    if here() is not None and not _alike(target, source):
        source = torch.empty_like(target, device=source.device).copy_(source)
    target.copy_(source, non_blocking=here() is not None)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bytes."""
    return (one.dtype, one.stride()) == (other.dtype, other.stride())


def _started(
    lane: Lane,
    targets: list[Tensor],
    sources: list[Tensor],
    bytes_per_s: float,
    behind: Sequence[Future[Any]] = (),
) -> Copy:
    move = move_up if lane is Lane.H2D else move_down

    def run() -> None:
        for update in behind:
            wait_for(update)
        for target, source in zip(targets, sources, strict=True):
            move(target, source)

    num_bytes = sum(target.nbytes for target in targets)
    done = _submitted(lane, run, targets, num_bytes, bytes_per_s)
    leaves_open(lane, done)
    return Copy(targets, sources, done)


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

    @property
    def as_code(self) -> str:
        """An expression for another one like it."""
        kernel = f"{self.kernel.__module__}.{self.kernel.__qualname__}"
        return f"fxzero.runtime.copies.HostUpdate({kernel})"

    def __call__(self, *args: Any) -> Future[Any]:
        params: list[Tensor] = args[0]
        return _submitted(Lane.HOST, lambda: self.kernel(*args), params)

    def __repr__(self) -> str:
        return self.__name__


def join_updates(updates: Sequence[Future[Any]]) -> None:
    """Wait for updates on the host."""
    for update in updates:
        update.result()
