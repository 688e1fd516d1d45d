"""Captures that know nothing of each other, in processes beside one another.

    this process ──fork──► stage 0, then stage 2        Python, one core each
                 └─fork──► stage 1, then stage 3   ──►  figures, in order

A capture is Python from begin to end, and a process has one core for that. Forked ones have all
that was imported and defined, a model's factory among it, which could not be sent. What is forked
has none of the other threads, and waits forever for a lock that one of them holds: it is done where
there are none, as in the `fxzero` command, and elsewhere one capture follows the other.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxzero._compat import collecting_only_new_objects
from fxzero.cost.resources import available_bytes, cores
from fxzero.errors import CaptureError
from fxzero.inspect.targets.calls import raised_at

T = TypeVar("T")

_BYTES = 6 << 30
"""Of free memory for each process: half as much again as the largest preset may take."""

_tasks: Sequence[Callable[[], Any]] = ()
"""Of the processes that are forked now."""


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What some functions return, in order. What they change in this process, or in another one of
    them, is of no matter to them.

    Raises:
        Exception: what the first of those raises that fail.
    """
    count = min(len(tasks), _num_processes())
    if count > 1:
        try:
            return _in_processes(tasks, count)
        except BrokenProcessPool:  # one was killed: there was no memory for two
            pass
    return [task() for task in tasks]


def _num_processes() -> int:
    """How many processes there is room for, beside one another."""
    has_begun = dist.is_initialized() or torch.cuda.is_initialized()
    if sys.platform != "linux" or has_begun:  # elsewhere a fork is unsafe, or there is none
        return 1
    if threading.active_count() > 1 or multiprocessing.current_process().daemon:
        return 1
    return min(cores(), available_bytes() // _BYTES)


def _in_processes(tasks: Sequence[Callable[[], T]], count: int) -> list[T]:
    global _tasks
    _tasks = tasks
    try:
        with (
            collecting_only_new_objects(),
            ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin) as pool,
        ):
            futures = [pool.submit(_run, number) for number in range(len(tasks))]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise
    finally:
        _tasks = ()


def _begin() -> None:
    """Begin a process: it ends with whoever is interrupted, and starts no threads, of which the one
    that was forked may have had some."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)


def _run(number: int) -> Any:
    try:
        return _tasks[number]()
    except Exception as error:
        raise _sendable(error) from error


def _sendable(error: Exception) -> Exception:
    """An error that another process can read: itself, or one of its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CaptureError(f"{type(error).__name__} at {raised_at(error)}: {error}")
    return error
