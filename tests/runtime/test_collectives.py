"""What collectives over gloo leave behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fxzero.runtime.collectives import (
    all_reduce,
    exchange,
    gather,
    join,
    join_exchange,
    join_sum,
)
from fxzero.runtime.point_to_point import SMALL_BYTES
from tests.parity.harness import Pools


def summed(is_own: bool) -> tuple[list[float], int]:
    """Job: means over ranks, and the bytes of memory that what was sent still has."""
    assert dist.group.WORLD is not None
    sent = [torch.full((1000,), float(dist.get_rank() + i)) for i in range(3)]
    flight = all_reduce(sent, dist.group.WORLD.group_name, [is_own] * 3)
    means = join_sum(flight, dist.get_world_size())
    assert not flight.tensors
    handled = flight.handles
    assert len(handled) == 3
    held = [part for handle in handled for part in handle.result()]
    return [float(mean.mean()) for mean in means], sum(t.untyped_storage().nbytes() for t in held)


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("world", [2])
def test_a_joined_sum_is_nobody_elses(world: int, is_own: bool, ranks: Pools) -> None:
    """Its handle stays alive for a while, and the sum's memory does not with it."""
    for means, held_bytes in ranks(world).run(summed, is_own):
        assert means == [0.5, 1.5, 2.5]
        assert held_bytes == 0


SHAPES = [
    ((4, 3), torch.float32),  # small ones of two dtypes
    ((3,), torch.float64),
    ((SMALL_BYTES // 4 + 1, 2), torch.float32),  # a large one between them
    ((0, 5), torch.float32),
    ((2,), torch.float64),
    ((SMALL_BYTES // 4,), torch.float32),
    ((7,), torch.bfloat16),  # small, and alone of its dtype
]
"""This rank's part of each tensor."""


def part_of(rank: int, index: int) -> torch.Tensor:
    shape, dtype = SHAPES[index]
    generator = torch.Generator().manual_seed(10 * rank + index)
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def swapped(world: int) -> list[int]:
    """Job: gather and exchange parts of many sizes; how many messages either one was."""
    assert dist.group.WORLD is not None
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    every = range(len(SHAPES))
    flight = gather([part_of(rank, i) for i in every], world, name)
    counts = [len(flight.handles)]
    for index, full in enumerate(join(flight)):
        assert torch.equal(full, torch.cat([part_of(r, index) for r in range(world)])), index
    # Of rank r, what it sends to rank s is its part times s + 1.
    fulls = [torch.cat([part_of(rank, i) * (s + 1) for s in range(world)]) for i in every]
    flight = exchange(fulls, world, name, [True] * len(fulls))
    counts.append(len(flight.handles))
    for index, mean in enumerate(join_exchange(flight, world)):
        total = part_of(0, index) * (rank + 1)
        for r in range(1, world):  # in the order of the ranks, bit by bit
            total = total + part_of(r, index) * (rank + 1)
        assert torch.equal(mean, total / world), index
        storages = mean.untyped_storage().nbytes()
        assert storages == mean.nbytes  # its own, which whoever reads it last may free
    return counts


@pytest.mark.parametrize("world", [2, 3])
def test_small_tensors_of_a_dtype_are_one_message(world: int, ranks: Pools) -> None:
    """To and from each rank: two packs, and what is large, empty, or alone of its dtype."""
    for counts in ranks(world).run(swapped, world):
        assert counts == [2 * (world - 1) * (2 + 3)] * 2
