"""Whether this process moves data while its main thread waits.

By its busiest thread: each of gloo's groups has one that wakes up a hundred times a second for
nothing, a thousandth of a core, so that a dozen groups together look like work.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

_IDLE = 0.01
"""Share of a core below which a thread moves no data."""
_THREADS = Path("/proc/self/task")


class Busyness:
    """What the threads of this process have worked since this was made."""

    def __init__(self, watchers: Collection[int]) -> None:
        self._watchers = watchers
        """Native ids of threads whose own work does not count."""
        self._since = time.monotonic()
        self._before = _cpu_seconds()

    def is_idle(self) -> bool:
        """Whether no thread has moved data since."""
        now = _cpu_seconds()
        worked = max(
            (
                seconds - self._before.get(thread, 0.0)
                for thread, seconds in now.items()
                if thread not in self._watchers
            ),
            default=0.0,
        )
        return worked < _IDLE * max(time.monotonic() - self._since, 1e-9)


def _cpu_seconds() -> dict[int, float]:
    """By native thread id; on systems that do not tell, of the whole process as thread 0."""
    found = {}
    try:
        for thread in _THREADS.iterdir():
            try:
                nanoseconds = (thread / "schedstat").read_text().split()[0]
            except ProcessLookupError:  # the thread has ended meanwhile
                continue
            found[int(thread.name)] = int(nanoseconds) / 1e9
    except OSError:
        return {0: time.process_time()}
    return found
