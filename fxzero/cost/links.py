"""What collectives take, and what they take away from compute, measured by all ranks of a group.

α           one of 4 KiB
β           several of 8 MiB in flight together: a burst that buffers swallow says nothing of
            the link
the host    what a loop of matrix products loses to those
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fxzero._compat import real_tensors, trim_heap
from fxzero.cost.timing import RUNS, median_us, synchronize
from fxzero.runtime import collectives
from fxzero.transfer import TransferKind

LEAST_BYTES, MOST_BYTES = 1 << 12, 8 << 20
"""Full bytes of the collectives that show latency, and bandwidth."""
IN_FLIGHT = 4
"""Large collectives at a time."""


@dataclass(frozen=True)
class CollectiveFigures:
    """One kind of collective, by its full bytes."""

    latency_us: float
    us_per_byte: float
    host_us: float
    """Compute time that the host loses by each one."""
    host_us_per_byte: float


def time_collective(
    kind: TransferKind, device_type: str, group: dist.ProcessGroup | None = None
) -> CollectiveFigures:
    """Measure a kind of collective. All ranks of a group call it; several groups may at once.

    Args:
        group: all ranks by default.
    """
    group = group or dist.group.WORLD
    assert group is not None
    with real_tensors(), torch.no_grad():
        latency_us, launch_us = _stream_us(kind, LEAST_BYTES, 1, device_type, group)
        stream_us, _ = _stream_us(kind, MOST_BYTES, IN_FLIGHT, device_type, group)
        lost_us = _lost_us(kind, stream_us, device_type, group)
    per_byte = max(stream_us - latency_us, 0.0) / (IN_FLIGHT * MOST_BYTES)
    return CollectiveFigures(latency_us, per_byte, launch_us, lost_us / (IN_FLIGHT * MOST_BYTES))


def _stream_us(
    kind: TransferKind, num_bytes: int, count: int, device_type: str, group: dist.ProcessGroup
) -> tuple[float, float]:
    """The time of some collectives in flight together, and of launching one."""
    start, finish = collective(kind, num_bytes, device_type, group)
    walls, launches = [], []
    for _ in range(1 + (RUNS if count > 1 else 10 * RUNS)):
        dist.barrier(group)
        synchronize(device_type)
        begin = time.perf_counter()
        flights = [start() for _ in range(count)]
        launches.append((time.perf_counter() - begin) / count)
        for flight in flights:
            finish(flight)
        synchronize(device_type)
        walls.append(time.perf_counter() - begin)
    return median(walls[1:]) * 1e6, median(launches[1:]) * 1e6


def _lost_us(
    kind: TransferKind, stream_us: float, device_type: str, group: dist.ProcessGroup
) -> float:
    """What compute loses while a stream of collectives is in flight."""
    start, finish = collective(kind, MOST_BYTES, device_type, group)
    matrix = torch.randn(256, 256, device=device_type)
    one_us = median_us(lambda: matrix @ matrix, device_type)
    count = max(int(1.5 * stream_us / one_us), 1)

    def compute_us(num_flights: int) -> float:
        trim_heap()  # a step's buffers are seldom those of the transfer before
        dist.barrier(group)
        synchronize(device_type)
        begin = time.perf_counter()
        flights = [start() for _ in range(num_flights)]
        for _ in range(count):
            matrix @ matrix
        synchronize(device_type)
        for flight in flights:
            finish(flight)
        return (time.perf_counter() - begin) * 1e6

    beside, alone = zip(*((compute_us(IN_FLIGHT), compute_us(0)) for _ in range(RUNS)), strict=True)
    return max(min(beside) - min(alone), 0.0)  # what disturbs a run is not the transfers' doing


def collective(
    kind: TransferKind, num_bytes: int, device_type: str, group: dist.ProcessGroup
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to start and how to join one collective of a group, as the backend will run it."""
    name, size = group.group_name, group.size()
    full = torch.ones(num_bytes // 4 // size * size, device=device_type)
    part = full.chunk(size)[group.rank()].clone()
    if device_type == "cpu":
        if kind is TransferKind.ALL_GATHER:
            return lambda: collectives.gather([part], size, name), collectives.join
        if kind is TransferKind.REDUCE_SCATTER:
            return (
                lambda: collectives.exchange([full], size, name, [False]),
                lambda flight: collectives.join_exchange(flight, size),
            )
        return (
            lambda: collectives.all_reduce([full], name, [False]),
            lambda flight: collectives.join_sum(flight, size),
        )
    functional = torch.ops._c10d_functional
    wait = functional.wait_tensor.default
    if kind is TransferKind.ALL_GATHER:
        return lambda: functional.all_gather_into_tensor(part, size, name), wait
    if kind is TransferKind.REDUCE_SCATTER:
        return lambda: functional.reduce_scatter_tensor(full, "avg", size, name), wait
    return lambda: functional.all_reduce(full, "avg", name), wait
