"""What collectives over gloo leave behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fxzero.runtime.collectives import all_reduce, join_sum
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
