"""Medians of calls, with a device's work at its end: how everything here is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

RUNS = 5


def synchronize(device_type: str) -> None:
    """Wait until a device has done what it was given."""
    if device_type == "cuda":
        torch.cuda.synchronize()


def median_us(
    call: Callable[[], Any], device_type: str, *, runs: int = RUNS, limit_s: float = 0.5
) -> float:
    """The median time of a few calls, after a first one.

    Args:
        limit_s: no further call begins after it.
    """
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < runs and (not times or time.perf_counter() - begin < limit_s):
        synchronize(device_type)
        start = time.perf_counter()
        call()
        synchronize(device_type)
        times.append(time.perf_counter() - start)
    return median(times) * 1e6
