"""Lanes beside compute, on CPU a thread each: what one is given it does in that order.

    compute  ··A··B··C··            h2d, d2h     copies between a device and its host
    d2h         aaa bbb             host         updates of what is in the host's memory
    host            uuu vvv         read, write  what comes from a disk, and goes there

Whoever waits for work of another lane waits where it needs it: a lane for a lane by being given
that wait as work (as a CUDA stream waits for an event), compute by `join`. Torch's kernels let go
of the interpreter, so that lanes run beside compute and beside each other.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from fxzero._compat import below_autograd
from fxzero.graph.stamps import Lane

_Work = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """The thread of a lane.

    Once something has failed, all that comes behind it fails alike, until `drain`: it may need what
    was not done. The thread is a daemon, so that others may go on with steps when the main one has
    ended.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._queue: SimpleQueue[_Work] = SimpleQueue()
        self.failed: BaseException | None = None
        name = f"fxzero-{lane.value}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, work: Callable[[], Any], num_bytes: int = 0, bytes_per_s: float = 0.0
    ) -> Future[Any]:
        """Do something behind all that was submitted before.

        Args:
            num_bytes: what it moves.
            bytes_per_s: what it is held back to; 0 for as fast as it goes.
        """
        least_s = num_bytes / bytes_per_s if bytes_per_s else 0.0
        num_threads = torch.get_num_threads()
        done: Future[Any] = Future()
        self._queue.put((done, lambda: _done(work, least_s, num_threads)))
        return done

    def _run(self) -> None:
        while True:
            done, work = self._queue.get()
            try:
                if self.failed is not None:
                    raise self.failed
                result = work()
            except BaseException as error:
                self.failed = error
                done.set_exception(error)
            else:
                done.set_result(result)
            del done, work  # while it waits for more it keeps nothing alive

    def rest(self) -> None:
        """Wait until there is nothing to do, and forget that something has failed."""
        over = threading.Event()
        done: Future[Any] = Future()
        done.add_done_callback(lambda _: over.set())
        self._queue.put((done, lambda: None))
        while not over.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # one is on its way up already
                over.wait()
        self.failed = None


def _done(work: Callable[[], Any], least_s: float, num_threads: int) -> Any:
    """Work as the thread that asked for it would: below autograd, on as many cores."""
    begin = time.perf_counter()
    if torch.get_num_threads() != num_threads:  # a thread keeps the number that it began with
        torch.set_num_threads(num_threads)
    with torch.no_grad(), below_autograd():
        result = work()
    left_s = least_s - (time.perf_counter() - begin)
    if left_s > 0:
        time.sleep(left_s)
    return result


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


atexit.register(drain)


def _forget_threads() -> None:
    """A forked process has none of them, and may have taken over a lock that somebody held."""
    global _making
    _making = threading.Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
