"""What the rank with the largest parts of all parameters holds, said by any of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxzero.compiler.largest_parts import take_largest_parts
from fxzero.schedule.simulate import Memory, simulate_memory
from tests.stepping import step_graph


class Uneven(nn.Module):
    """No width divides by the ranks, and of the scale most ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 37), nn.Linear(37, 7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 13) to a scalar."""
        return (self.down(self.up(x).tanh()) * self.scale).square().mean()


def memory_of(rank: int, zero: int, mesh_shape: tuple[int, ...], *, largest: bool) -> Memory:
    """What a step of two micro-batches holds on one of four ranks."""
    graph = step_graph(
        lambda: (Uneven(), (torch.randn(8, 13),)),
        zero=zero,
        world_size=4,
        rank=rank,
        mesh_shape=mesh_shape,
        micro_batches=2,
    )
    if largest:
        take_largest_parts(graph)
    return simulate_memory(graph, fuses=False)


@pytest.mark.parametrize(
    ("zero", "mesh_shape", "rank"), [(2, (2, 2), 1), (3, (2, 2), 3), (3, (4,), 3)]
)
def test_any_rank_says_what_the_largest_parts_take(
    zero: int, mesh_shape: tuple[int, ...], rank: int
) -> None:
    """At every moment, whatever the ranks replicate: gradients that wait for other replicas too."""
    first = memory_of(0, zero, mesh_shape, largest=False)
    assert memory_of(0, zero, mesh_shape, largest=True) == first
    assert memory_of(rank, zero, mesh_shape, largest=False) != first
    assert memory_of(rank, zero, mesh_shape, largest=True) == first
