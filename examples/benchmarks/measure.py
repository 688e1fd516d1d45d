"""Peak memory and time of one process.

Memory is a peak above a baseline taken after the imports. On Linux the kernel keeps the
peak (`VmHWM`) and forgets it when 5 is written to `/proc/self/clear_refs`. Where that is
not allowed a thread samples the resident size. On CUDA torch's allocator counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
SAMPLE_S = 0.005
Result = TypeVar("Result")


class PeakMeter(Protocol):
    """Memory now, and its peak since the last `reset`."""

    method: str

    def now_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def reset(self) -> None: ...


class KernelPeak:
    """The kernel's own record of the largest resident size."""

    method = "VmHWM of /proc/self/status, reset by writing 5 to /proc/self/clear_refs"

    def now_bytes(self) -> int:
        return self._read_bytes("VmRSS")

    def peak_bytes(self) -> int:
        return self._read_bytes("VmHWM")

    def reset(self) -> None:
        CLEAR_REFS.write_text("5")

    @staticmethod
    def _read_bytes(field: str) -> int:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024


class SampledPeak:
    """A thread that looks at the resident size: short peaks can escape it."""

    method = f"resident size sampled every {SAMPLE_S * 1e3:g} ms"

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak_bytes = self.now_bytes()
        threading.Thread(target=self._sample, daemon=True).start()

    def now_bytes(self) -> int:
        return self._process.memory_info().rss

    def peak_bytes(self) -> int:
        return max(self._peak_bytes, self.now_bytes())

    def reset(self) -> None:
        self._peak_bytes = self.now_bytes()

    def _sample(self) -> None:
        while True:
            self._peak_bytes = max(self._peak_bytes, self.now_bytes())
            time.sleep(SAMPLE_S)


class CudaPeak:
    """Bytes that torch's CUDA allocator handed out."""

    method = "torch.cuda.max_memory_allocated"

    def now_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def peak_meter(device: str) -> PeakMeter:
    """Choose the best meter that this process may use, and start it."""
    if device == "cuda":
        return CudaPeak()
    meter = KernelPeak()
    try:
        meter.reset()
        meter.peak_bytes()
    except (OSError, StopIteration):
        return SampledPeak()
    return meter


def release_free_memory() -> None:
    """Return what a compilation left behind, so that a resident size shows what is in use."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def allocated_peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator has handed out during a call, beyond those before.

    The profiler reports every allocation and release, those of compiled regions too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def held_bytes() -> int:
    """Bytes of all tensors that there are now, on any device, each storage once."""
    found: dict[int, int] = {}
    for tensor in gc.get_objects():
        with contextlib.suppress(Exception):  # fake ones have no memory
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def timed_s(device: str, call: Callable[[], Result]) -> tuple[Result, float]:
    """Run `call` to the end of its device work; return its result and seconds."""
    synchronize(device)
    start_s = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start_s


def synchronize(device: str) -> None:
    """Wait for the device, where it runs ahead of Python."""
    if device == "cuda":
        torch.cuda.synchronize()
