"""What collectives take, and what they take away from compute, measured by all ranks of a group.

α           one of 4 KiB
β           several of 8 MiB in flight together: a burst that buffers swallow says nothing of
            the link
the host    what a loop of matrix products loses to those

Ranks on CPUs have nothing but their cores to move bytes with, which compute, too, in a step: beside
a loop of products collectives take up to twice as long as alone, unless a link is slower than that.
Their β is of those.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
TENSORS = 16
"""Of a bucket that shows what each of them takes."""
IN_FLIGHT = 4
"""Large collectives at a time."""
PRODUCT_WIDTH = 256
"""Of the matrices that are multiplied meanwhile."""


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
        if device_type == "cpu":
            stream_us, lost_us = _beside_products_us(kind, group)
        else:
            stream_us, _ = _stream_us(kind, MOST_BYTES, IN_FLIGHT, device_type, group)
            lost_us = _lost_us(kind, stream_us, device_type, group)
    per_byte = max(stream_us - latency_us, 0.0) / (IN_FLIGHT * MOST_BYTES)
    return CollectiveFigures(latency_us, per_byte, launch_us, lost_us / (IN_FLIGHT * MOST_BYTES))


def time_further_tensor(
    kind: TransferKind, device_type: str, group: dist.ProcessGroup | None = None
) -> float:
    """Microseconds by which a collective of small tensors takes longer for each tensor more."""
    group = group or dist.group.WORLD
    assert group is not None
    with real_tensors(), torch.no_grad():
        one_us, _ = _stream_us(kind, LEAST_BYTES, 1, device_type, group)
        many_us, _ = _stream_us(kind, LEAST_BYTES * TENSORS, 1, device_type, group, TENSORS)
    return max(many_us - one_us, 0.0) / (TENSORS - 1)


def _stream_us(
    kind: TransferKind,
    num_bytes: int,
    count: int,
    device_type: str,
    group: dist.ProcessGroup,
    num_tensors: int = 1,
) -> tuple[float, float]:
    """The time of some collectives in flight together, and of launching one."""
    start, finish = collective(kind, num_bytes, device_type, group, num_tensors)
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


def _beside_products_us(kind: TransferKind, group: dist.ProcessGroup) -> tuple[float, float]:
    """What some collectives take while a CPU's core computes, and what that loses to them."""
    start, finish = collective(kind, MOST_BYTES, "cpu", group)
    matrix = torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH)
    streams, losses = [], []
    handles: list[Any] = []  # those of a run die behind the next one: see `collectives`

    def wait_for(handles: list[Any]) -> float:
        for handle in handles:
            handle.wait()
        return time.perf_counter()

    for _ in range(RUNS):
        trim_heap()  # a step's buffers are seldom those of the transfer before
        dist.barrier(group)
        begin = time.perf_counter()
        flights = [start() for _ in range(IN_FLIGHT)]
        handles = [handle for flight in flights for handle in flight.handles]
        with ThreadPoolExecutor(1) as waits:
            ended = waits.submit(wait_for, handles)
            count = 0
            while not ended.done():
                matrix @ matrix
                count += 1
        ended.result()  # where a rank has died, this raises
        for flight in flights:
            flight.handles = []  # a message can be waited for once
            finish(flight)
        beside_s = time.perf_counter() - begin
        streams.append(ended.result() - begin)
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(count):
            matrix @ matrix
        losses.append(beside_s - (time.perf_counter() - begin))
    return median(streams) * 1e6, max(median(losses), 0.0) * 1e6


def _lost_us(
    kind: TransferKind, stream_us: float, device_type: str, group: dist.ProcessGroup
) -> float:
    """What compute loses while a stream of collectives is in flight."""
    start, finish = collective(kind, MOST_BYTES, device_type, group)
    matrix = torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, device=device_type)
    one_us = median_us(lambda: matrix @ matrix, device_type)
    count = max(int(1.5 * stream_us / one_us), 1)

    def compute_us(num_flights: int) -> float:
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
    kind: TransferKind,
    num_bytes: int,
    device_type: str,
    group: dist.ProcessGroup,
    num_tensors: int = 1,
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to start and how to join one collective of a group, as the backend will run it: of some
    equal tensors, which have so many bytes together when they are whole."""
    name, size = group.group_name, group.size()
    elements = num_bytes // num_tensors // 4 // size * size
    fulls = [torch.ones(elements, device=device_type) for _ in range(num_tensors)]
    parts = [full.chunk(size)[group.rank()].clone() for full in fulls]
    if device_type == "cpu":
        others_read = [False] * num_tensors
        if kind is TransferKind.ALL_GATHER:
            return lambda: collectives.gather(parts, size, name), collectives.join
        if kind is TransferKind.REDUCE_SCATTER:
            return (
                lambda: collectives.exchange(fulls, size, name, others_read),
                lambda flight: collectives.join_exchange(flight, size),
            )
        return (
            lambda: collectives.all_reduce(fulls, name, others_read),
            lambda flight: collectives.join_sum(flight, size),
        )
    functional = torch.ops._c10d_functional

    def finish(flights: list[Any]) -> list[Any]:
        return [functional.wait_tensor.default(flight) for flight in flights]

    if kind is TransferKind.ALL_GATHER:
        gather = functional.all_gather_into_tensor_coalesced
        return lambda: gather(parts, size, name), finish
    if kind is TransferKind.REDUCE_SCATTER:
        return lambda: functional.reduce_scatter_tensor_coalesced(fulls, "avg", size, name), finish
    return lambda: functional.all_reduce_coalesced(fulls, "avg", name), finish
