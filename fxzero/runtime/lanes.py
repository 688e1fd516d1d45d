"""Lanes beside compute, a thread each: what one is given it does in that order.

    compute  ··A··B··C··            h2d, d2h     copies between a device and its host
    d2h         aaa bbb             host         updates of what is in the host's memory
    host            uuu vvv         read, write  what comes from a disk, and goes there

**Work that a lane is given at some point of a step sees all that compute has waited for up to that
point.** Where the device is a CPU that is so because what compute has called is done. A GPU is
behind the thread that launches: there `submit` records an event, and the work begins behind it, in
the lanes of copies on a stream of their own, in the others, whose work is the host's, once the
thread has waited. It is what `fxzero.graph.lanes` builds on, which proves from the order of nodes
that nothing races.

Whoever waits for work of another lane waits where it needs it: a lane for a lane by being given
that wait as work, compute by `wait_for`, which lets streams wait for events and threads for each
other (`fxzero.runtime.streams`). Torch's kernels let go of the interpreter, so that lanes run
beside compute and beside each other.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from fxzero._compat import below_autograd
from fxzero.graph.stamps import Lane
from fxzero.runtime import streams


@dataclass(frozen=True)
class _Task:
    """Work that a lane was given."""

    done: Future[Any]
    work: Callable[[], Any]
    least_s: float
    """What it takes at least."""
    num_threads: int
    """On how many cores it runs: a thread keeps the number that it began with."""
    ready: streams.Ready | None
    """What it begins behind, on a device that has streams."""

    def run(self, lane: Lane) -> Any:
        """Do it, as the thread that asked for it would: below autograd, on as many cores."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        with torch.no_grad(), below_autograd():
            if self.ready is None:
                return self._held_back(self.work)
            with streams.behind(self.ready, lane) as here:
                if here.stream is None:
                    return self._held_back(self.work)
                if self.least_s:  # what is held back is held back from when it runs
                    streams.host_catches_up()
                    return self._held_back(lambda: self._launched(here, and_wait=True))
                return self._launched(here)

    def _launched(self, here: streams.Here, *, and_wait: bool = False) -> streams.Event:
        """Give a stream what it has to do; an event behind it."""
        self.work()
        event = here.record()
        if and_wait:
            event.synchronize()
        return event

    def _held_back(self, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        left_s = self.least_s - (time.perf_counter() - begin)
        if left_s > 0:
            time.sleep(left_s)
        return result


class Worker:
    """The thread of a lane.

    Once something has failed, all that comes behind it fails alike, until `drain`: it may need what
    was not done. The thread is a daemon, so that others may go on with steps when the main one has
    ended.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._queue: SimpleQueue[_Task] = SimpleQueue()
        self.failed: BaseException | None = None
        name = f"fxzero-{lane.value}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, work: Callable[[], Any], num_bytes: int = 0, bytes_per_s: float = 0.0
    ) -> Future[Any]:
        """Do something behind all that was submitted before, and behind what compute has launched.

        Args:
            num_bytes: what it moves.
            bytes_per_s: what it is held back to; 0 for as fast as it goes.

        Returns:
            What the work returns; of a lane with a stream, an event behind it, for `wait_for`.
        """
        least_s = num_bytes / bytes_per_s if bytes_per_s else 0.0
        task = _Task(Future(), work, least_s, torch.get_num_threads(), streams.ready())
        self._queue.put(task)
        return task.done

    def _run(self) -> None:
        while True:
            task = self._queue.get()
            try:
                if self.failed is not None:
                    raise self.failed
                result = task.run(self.lane)
            except BaseException as error:
                self.failed = error
                task.done.set_exception(error)
            else:
                task.done.set_result(result)
                del result
            del task  # while it waits for more it keeps nothing alive

    def rest(self) -> None:
        """Wait until there is nothing to do, and forget that something has failed."""
        over = threading.Event()
        task = _Task(Future(), lambda: None, 0.0, torch.get_num_threads(), None)
        task.done.add_done_callback(lambda _: over.set())
        self._queue.put(task)
        while not over.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # one is on its way up already
                over.wait()
        self.failed = None


_workers: dict[Lane, Worker] = {}
_making = threading.Lock()


def worker(lane: Lane) -> Worker:
    """The thread of a lane of this process, made when it is first asked for."""
    found = _workers.get(lane)
    if found is None:
        with _making:
            found = _workers.get(lane)
            if found is None:
                found = _workers[lane] = Worker(lane)
    return found


before_drain: list[Callable[[], None]] = []
"""Called when a step has failed halfway, before lanes are waited for: ends what would wait for work
that nobody will give them."""


def drain() -> None:
    """Wait until no lane has anything to do: behind a step that failed halfway, and at the end of
    the process, whose threads end wherever they are. An interrupt does not end it."""
    for end in before_drain:
        end()
    for lane in (Lane.D2H, Lane.READ, Lane.HOST, Lane.WRITE, Lane.H2D):
        if lane in _workers:
            _workers[lane].rest()
    streams.rest()


atexit.register(drain)


def _forget_threads() -> None:
    """A forked process has none of them, and may have taken over a lock that somebody held."""
    global _making
    _making = threading.Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
