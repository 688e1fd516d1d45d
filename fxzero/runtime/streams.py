"""What runs beside the host on a device: streams and events, in the few words that lanes need.

    compute   A ─●─ B ──────┬─ C        ● what a copy begins behind: recorded when it is submitted
    h2d          └── copy ──●           ● what compute waits for, and the host does not

On a GPU a thread runs ahead of what it has launched. A graph with copies therefore runs inside of
`computing_on`, and whoever waits, waits as what it is: compute and the lanes of copies by a stream
that waits for an event, the host's own lanes by a thread that does. A device that is a CPU by the
books has no streams: there what a thread has called is done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fxzero.graph.stamps import Lane
from fxzero.runtime.cuda_streams import CudaStreams
from fxzero.sharding.host import HOST

OF_COPIES = frozenset({Lane.H2D, Lane.D2H})
"""Lanes that have a stream: what the others do, the host does."""


class Event(Protocol):
    """A point of a stream."""

    def synchronize(self) -> None:
        """Let the calling thread wait until it is reached."""


class Stream(Protocol):
    """What a device does one after the other."""

    def wait_event(self, event: Any) -> None:
        """Let what comes wait for a point of another stream."""

    def synchronize(self) -> None:
        """Let the calling thread wait for all that was launched."""


class Streams(Protocol):
    """Those of one device: see `fxzero.runtime.cuda_streams`."""

    def current(self) -> Any:
        """The stream on which the calling thread computes."""

    def of(self, lane: Lane) -> Any:
        """A lane's own."""

    def made(self) -> list[Any]:
        """Those of lanes, as far as there are any."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """A context whose operators go to a stream; with None, to the host beside the device."""

    def record(self, stream: Any) -> Any:
        """An event where a stream is now."""

    def outlives(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory for what a stream has been given, however soon it is let go of."""

    def pinned_like(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Memory of the host that the device reads and writes by itself."""

    def return_pinned(self) -> None:
        """Give back what `pinned_like` keeps for others to use."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Let the device read and write some memory of the host by itself; return what ends that.

        Raises:
            RuntimeError: the system gives no such memory.
        """


MAKERS: dict[str, Callable[[torch.device], Streams]] = {"cuda": CudaStreams}
"""By a device's type, what makes its streams; one that is not here has none."""
_made: dict[torch.device, Streams] = {}
_making = threading.Lock()


def streams_of(device: torch.device) -> Streams | None:
    """A device's streams; None if it has none."""
    if device.type not in MAKERS:
        return None
    with _making:
        if device not in _made:
            _made[device] = MAKERS[device.type](device)
        return _made[device]


@dataclass
class Here:
    """What the calling thread is to a device."""

    streams: Streams
    stream: Any
    """Where what it calls runs; None where it is the host's alone."""
    ready: Event | None = None
    """Of a lane: what its work begins behind."""
    open: dict[Lane, Future[Any]] = field(default_factory=dict)
    """Of compute, by lane: the last copy from or to memory that others see when a graph is over."""

    def record(self) -> Event:
        """Where the stream is now."""
        event: Event = self.streams.record(self.stream)
        return event


class _Thread(threading.local):
    here: Here | None = None


_thread = _Thread()


@contextlib.contextmanager
def _being(here: Here) -> Iterator[Here]:
    before, _thread.here = _thread.here, here
    try:
        with here.streams.using(here.stream):
            yield here
    finally:
        _thread.here = before


@contextlib.contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Let lanes begin behind what this thread launches on a device; in the end the host waits for
    copies of memory that others may use now."""
    streams = streams_of(device)
    if streams is None:
        yield
        return
    with _being(Here(streams, streams.current())) as here:
        yield
        _end(here)


def _end(computing: Here) -> None:
    """Let the host wait for copies of memory that others may use now."""
    for copy in computing.open.values():
        host_waits_for(copy)


@dataclass(frozen=True)
class Ready:
    """What a lane's work begins behind."""

    streams: Streams
    event: Event


def ready() -> Ready | None:
    """Where compute is now, for work that is submitted; None where it has done what it called."""
    mine = _thread.here
    return None if mine is None else Ready(mine.streams, mine.record())


@contextlib.contextmanager
def behind(ready: Ready, lane: Lane) -> Iterator[Here]:
    """Be a lane on a device: its stream, or else the host alone; behind what is ready."""
    stream = ready.streams.of(lane) if lane in OF_COPIES else None
    with _being(Here(ready.streams, stream, ready.event)) as here:
        _begin(here, ready.event)
        yield here


def _begin(lane: Here, event: Event) -> None:
    """Let a lane begin behind an event: its stream, or else its thread."""
    if lane.stream is None:
        event.synchronize()
    else:
        lane.stream.wait_event(event)


@dataclass
class Launched:
    """What a thread has given a stream to do."""

    event: Event | None = None
    """Behind it; None where there are no streams."""


@contextlib.contextmanager
def launching(lane: Lane) -> Iterator[Launched]:
    """In a lane that is the host's alone: be another one, which has a stream, for a while."""
    launched, mine = Launched(), _thread.here
    if mine is None:
        yield launched
        return
    with _being(Here(mine.streams, mine.streams.of(lane), mine.ready)) as now:
        yield launched
        launched.event = now.record()


def wait_for(done: Future[Any]) -> None:
    """Wait for a lane's work, as what the calling thread is: a stream waits for an event, and the
    thread only until that is recorded."""
    event: Event | None = done.result()
    if event is None:
        return
    mine = _thread.here
    if mine is None or mine.stream is None:
        event.synchronize()
    else:
        mine.stream.wait_event(event)


def host_waits_for(done: Future[Any]) -> None:
    """Wait for a lane's work: the calling thread itself is to use what it leaves."""
    event: Event | None = done.result()
    if event is not None:
        event.synchronize()


def host_catches_up() -> None:
    """In a lane of copies: let its thread itself wait for what its stream waits for, before it uses
    memory that the device may have written."""
    mine = _thread.here
    if mine is not None and mine.ready is not None:
        mine.ready.synchronize()


def here() -> Here | None:
    """What the calling thread is to a device; None where there are no streams."""
    return _thread.here


def leaves_open(lane: Lane, copy: Future[Any]) -> None:
    """Note a copy whose memory others may use when a graph is over."""
    if _thread.here is not None:
        _thread.here.open[lane] = copy


def pinned_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory of the host for a tensor, or for one of another dtype."""
    if _thread.here is None:
        return torch.empty_like(tensor, dtype=dtype, device=HOST)
    return _thread.here.streams.pinned_like(tensor, dtype)


def rest() -> None:
    """Wait for the streams of all lanes: behind a step that failed, whose memory nobody holds."""
    for streams in list(_made.values()):
        for stream in streams.made():
            with contextlib.suppress(RuntimeError):  # of the device itself: one is on its way up
                stream.synchronize()
