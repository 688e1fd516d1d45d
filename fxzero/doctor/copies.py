"""How fast bytes go between a device, its host and a disk: the figures
of a `HostSpec` and a `DiskSpec`.

The disk is read and written as steps do: a scratch file without a name, past the page cache, in
chunks, with several requests on their way. Whatever happens, nothing of it is left.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from fxzero.cost.cluster import HostSpec
from fxzero.cost.resources import host_bytes
from fxzero.cost.timing import median_us
from fxzero.disk.scratch import BLOCK, DiskSettings, ScratchFile, pages
from fxzero.errors import FxZeroWarning
from fxzero.runtime.pinned import block

COPIED_BYTES = 64 << 20
DISK_BYTES = 256 << 20
DISK_LIMIT_S = 1.5
"""For all writes, and for all reads."""
NUM_REQUESTS = 50


@dataclass(frozen=True)
class Ways:
    """Between a device and its host's memory."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_us: float


def measure_ways(device: torch.device) -> Ways:
    """Copy to a device and from it. On a CPU both are one memory, and a copy is a thread's.

    Raises:
        HostMemoryError: the system does not let memory be pinned.
    """
    if device.type == "cuda":
        return _ways_of_gpu(device)
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    rate = source.nbytes / median_us(lambda: target.copy_(source), "cpu") * 1e6
    with ThreadPoolExecutor(1) as lane:
        latency_us = median_us(lambda: lane.submit(int).result(), "cpu", runs=200)
    return Ways(rate, rate, latency_us)


def host_spec(ways: Ways, update_bytes_per_s: float) -> HostSpec:
    """The host's share of one device."""
    return HostSpec(
        ways.up_bytes_per_s,
        ways.down_bytes_per_s,
        ways.latency_us,
        update_bytes_per_s,
        host_bytes(),
    )


class _Owner:
    """Whose pinned block it is."""


def _ways_of_gpu(device: torch.device) -> Ways:
    owner = _Owner()
    there = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    here = block(owner, COPIED_BYTES, device, "what is copied", "free some memory")
    up_us = median_us(lambda: there.copy_(here, non_blocking=True), "cuda")
    down_us = median_us(lambda: here.copy_(there, non_blocking=True), "cuda")
    few_there, few_here = there[:64], here[:64]
    few_us = median_us(lambda: few_there.copy_(few_here, non_blocking=True), "cuda", runs=50)
    return Ways(COPIED_BYTES / up_us * 1e6, COPIED_BYTES / down_us * 1e6, few_us)


class Scratch:
    """A scratch file in a folder, and what it takes to read and write it.

    Args:
        num_ranks: ranks of this host, which share the disk.

    Raises:
        DiskError: no file can be made there, or it has no room.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
        self.num_bytes = max(free / num_ranks, 1.0)
        """For one device."""
        settings = DiskSettings()
        chunk = settings.chunk_bytes
        self._num_chunks = max(min(DISK_BYTES, int(free / num_ranks / 2)) // chunk, 1)
        with warnings.catch_warnings():  # that it is not direct is a line of the doctor's
            warnings.simplefilter("ignore", FxZeroWarning)
            self._file = ScratchFile(folder, self._num_chunks * chunk)
        self.is_direct = self._file.is_direct
        """Whether bytes go past the page cache."""
        self._buffers = [pages(chunk) for _ in range(settings.depth)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(1 << 16) * (chunk >> 16)

    def write_bytes_per_s(self) -> float:
        """Write it once; first of all, since what was never written is not read from a disk."""
        return _rate(self._file.write, self._buffers, self._num_chunks)

    def read_bytes_per_s(self) -> float:
        """Read it once."""
        return _rate(self._file.read, self._buffers, self._num_chunks)

    def latency_us(self) -> float:
        """Of reading one block, here and there."""
        few = pages(BLOCK)
        blocks = self._file.num_bytes // BLOCK
        places = iter(i * 7919 % blocks * BLOCK for i in range(NUM_REQUESTS + 1))
        return median_us(lambda: self._file.read(next(places), few), "cpu", runs=NUM_REQUESTS)


def _rate(
    move: Callable[[int, memoryview], None], buffers: list[memoryview], num_chunks: int
) -> float:
    """Bytes a second of a file's chunks, of as many of them as there is time for."""
    chunk = len(buffers[0])
    begin = time.perf_counter()

    def one_of(worker: int) -> int:
        moved = 0
        for i in range(worker, num_chunks, len(buffers)):
            if moved and time.perf_counter() - begin > DISK_LIMIT_S:
                break
            move(i * chunk, buffers[worker])
            moved += chunk
        return moved

    with ThreadPoolExecutor(len(buffers)) as workers:
        total = sum(workers.map(one_of, range(len(buffers))))
    return total / (time.perf_counter() - begin)
