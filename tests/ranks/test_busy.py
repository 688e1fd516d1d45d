"""What counts as work of a process whose main thread waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxzero.ranks import busy
from fxzero.ranks.busy import Busyness


@pytest.fixture
def working() -> Iterator[threading.Thread]:
    """A thread that never rests."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    over.set()
    thread.join()


@pytest.fixture
def others() -> list[int]:
    """Threads that other tests have left behind (groups, pools of workers): not what is asked."""
    threads = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
    return [thread for thread in threads if thread != threading.get_native_id()]


def test_a_process_at_rest_is_idle(others: list[int]) -> None:
    """Though it was at work before, and reads of hundreds of threads that other tests have left."""
    sum(range(1_000_000))
    busyness = Busyness(others)
    time.sleep(1 + len(others) / 50)
    assert busyness.is_idle()


def test_a_thread_at_work(others: list[int], working: threading.Thread) -> None:
    """It counts, unless it is one of the watchers.

    As this thread is here: it reads of hundreds of threads that other tests have left.
    """
    watchers = [*others, threading.get_native_id()]
    heeded, ignored = Busyness(watchers), Busyness([*watchers, working.native_id or 0])
    time.sleep(1)
    assert not heeded.is_idle()
    assert ignored.is_idle()


def test_a_system_that_does_not_tell_of_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, working: threading.Thread
) -> None:
    """The process is what can be seen there."""
    monkeypatch.setattr(busy, "_THREADS", tmp_path / "none")
    busyness = Busyness([working.native_id or 0])
    time.sleep(0.3)
    assert not busyness.is_idle()
