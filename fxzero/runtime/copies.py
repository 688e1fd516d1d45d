"""Copies between a device and its host's memory, and updates there: started, and joined.

up = upload([w, b], …); join_upload(up)             h2d    shards that compute may read
down = download([dw, db], …); arrived(down)         d2h    gradients that updates may read
landed(down)                                               the device's gradients may end
u = HostUpdate(adamw)(…); join_updates([u])         host

up = upload([m, v], …); join_upload(up)             h2d    state that an update on the device reads
back = bring_back([m, v], …); landed(back)          d2h    and what it has made of it

up = bring([w, b], …); join_upload(up)              h2d    shards of the ordinary loop, and
down = send_home([dw, db], …); join_download(down)  d2h    gradients for its optimizer

Those of the loop go to and from a GPU too: on the current stream, which orders them before what
reads them there, from and to pinned memory. What the host may write to, or read, behind a graph is
waited for: gradients where they are joined, shards where the graph ends (`wait_for_copies`).
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
from fxzero.sharding.host import HOST, pinned


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


def bring(
    tensors: list[Tensor], dtype: torch.dtype, device: torch.device, bytes_per_s: float
) -> Copy:
    """Start copying shards of the host to a device, as a dtype: cast before, for fewer bytes."""
    made = [torch.empty_like(tensor, dtype=dtype, device=device) for tensor in tensors]
    if device.type == "cpu" or any(map(is_fake, tensors)):
        return _started(Lane.H2D, made, tensors, bytes_per_s)
    staged = [tensor if tensor.dtype is dtype else _cast(tensor, dtype) for tensor in tensors]
    event = _on_stream(made, staged)
    _unsettled.append(event)
    # Compute follows on the same stream: it need not wait.
    return Copy(made, staged, _done(None))


def send_home(tensors: list[Tensor], bytes_per_s: float) -> Copy:
    """Start copying gradients of a device to the host, into memory of their own."""
    made = [torch.empty_like(tensor, device=HOST) for tensor in tensors]
    if any(map(is_fake, tensors)) or all(tensor.device.type == "cpu" for tensor in tensors):
        return _started(Lane.D2H, made, tensors, bytes_per_s)
    made = [pinned(tensor) for tensor in made]
    event = _on_stream(made, tensors)
    return Copy(made, tensors, _Landing(event))


def wait_for_copies() -> None:
    """Wait until no copy to a GPU reads the host's memory: an optimizer may write to it now."""
    while _unsettled:
        _unsettled.pop().synchronize()


_unsettled: list[torch.cuda.Event] = []
"""What is recorded behind copies that may still be running."""


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the host as another dtype, in memory that a GPU reads by itself."""
    made = pinned(torch.empty_like(tensor, dtype=dtype))
    return made.copy_(tensor)


def _on_stream(targets: list[Tensor], sources: list[Tensor]) -> torch.cuda.Event:
    """Copy between a GPU and the host on the current stream; what is recorded behind it."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event


class _Landing(Future[Any]):
    """What waits for an event of a GPU."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self.event = event

    def result(self, timeout: float | None = None) -> Any:
        self.event.synchronize()


def _done(result: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(result)
    return done


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
    return _done(work())


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
