"""How much a function does, in figures that a busy machine does not change."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(action: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called meanwhile in this thread."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count - 1  # the last one is that of `sys.setprofile`


def growth(small: Callable[[], object], large: Callable[[], object], repeats: int = 5) -> float:
    """How many times the CPU seconds of one action another one takes.

    The least of several turns of each, taken alternately: what else runs only adds to them.
    """
    least = [float("inf"), float("inf")]
    for _ in range(repeats):
        for which, action in enumerate((small, large)):
            gc.collect()
            start = time.process_time()
            action()
            least[which] = min(least[which], time.process_time() - start)
    return least[1] / least[0]
