"""Lanes beside compute, on CPU a thread each: what one is given it does in that order.

    compute  ··A··B··C··            h2d, d2h   copies between a device and its host
    d2h         aaa bbb             host       updates of what is in the host's memory
    host            uuu vvv

Whoever waits for work of another lane waits where it needs it: a lane for a lane by being given
that wait as work (as a CUDA stream waits for an event), compute by `join`. Torch's kernels let go
of the interpreter, so that lanes run beside compute and beside each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fxzero._compat import below_autograd
from fxzero.graph.stamps import Lane


class Worker:
    """The thread of a lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"fxzero-{lane.value}")

    def submit(
        self, work: Callable[[], Any], num_bytes: int = 0, bytes_per_s: float = 0.0
    ) -> Future[Any]:
        """Do something behind all that was submitted before.

        Args:
            num_bytes: what it moves.
            bytes_per_s: what it is held back to; 0 for as fast as it goes.
        """
        least_s = num_bytes / bytes_per_s if bytes_per_s else 0.0
        return self._pool.submit(_done, work, least_s, torch.get_num_threads())


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
            found = _workers.setdefault(lane, Worker(lane))
    return found


def drain() -> None:
    """Wait until no lane has anything to do: behind a step that failed halfway."""
    for lane in (Lane.H2D, Lane.D2H, Lane.HOST):  # each may wait for one before it
        if lane in _workers:
            _workers[lane].submit(lambda: None).result()
