"""Random models keep their meaning under every pass, at every stage, on several ranks.

A model is a small random DAG: linear layers, some used twice, rectifiers, skips. Its
joint graphs, one per rank, run in lockstep before the passes and after each, on whole
numbers that float64 adds exactly: nothing may differ by a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxzero.compiler.run import run_passes
from fxzero.graph import StepGraph
from fxzero.passes import Bucket, Context, Fact, Pass, Prefetch
from tests import simulated_ranks, tracing
from tests.tiers import exhaustive
from tests.tracing import up_to

WIDTH = 5
BATCH = 3


@dataclass(frozen=True)
class Instruction:
    """``values.append(op(values[left], values[right]))``."""

    op: str
    left: int
    right: int
    layer: int


class Program(nn.Module):
    """A model that follows instructions; what nobody reads is added to the loss."""

    def __init__(self, instructions: tuple[Instruction, ...], bias: bool, frozen: bool) -> None:
        super().__init__()
        self.instructions = instructions
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64) for _ in range(3)
        )
        if frozen:
            self.layers[2].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """(BATCH, WIDTH) → scalar."""
        values = [self.layers[0](x)]
        for step in self.instructions:
            left = values[step.left % len(values)]
            right = values[step.right % len(values)]
            if step.op == "linear":
                values.append(self.layers[step.layer](left))
            elif step.op == "relu":
                values.append(left.relu())
            else:
                values.append(left + right)
        total = values[0]
        for value in values[1:]:
            total = total + value
        return (total * self.scale).sum()


instructions = st.builds(
    Instruction,
    op=st.sampled_from(["linear", "linear", "relu", "add"]),
    left=st.integers(0, 5),
    right=st.integers(0, 5),
    layer=st.integers(0, 2),
)
programs = st.tuples(st.lists(instructions, max_size=6).map(tuple), st.booleans(), st.booleans())


@functools.cache
def build_of(program: tuple[tuple[Instruction, ...], bool, bool]) -> tracing.Build:
    """Equal programs give one factory, which is traced once."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
        return Program(*program), (inputs,)

    return build


def graphs_of(build: tracing.Build, zero: int, world_size: int) -> list[StepGraph]:
    """The joint graph of each rank."""
    return [
        tracing.trace(build, zero=zero, world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]


def assert_equal(actual: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], name: str) -> None:
    """All outputs of all ranks, bit by bit; NaN, which marks a wrong read, equals nothing."""
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(b, Tensor):
                assert torch.equal(a, b), f"after {name}: output {position} of rank {rank}"
            else:
                assert a is b


few = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # an example takes a second: a smaller one is not worth minutes
    suppress_health_check=list(HealthCheck),
)


@few
@given(program=programs, zero=st.sampled_from([0, 1, 3, 3]), distance=st.integers(0, 3))
@pytest.mark.parametrize("passes", [tracing.OUTLINED, tracing.JOINT], ids=["outline", "operators"])
@pytest.mark.parametrize("world_size", [2, *exhaustive(4)])
def test_every_pass_keeps_the_meaning(
    world_size: int, passes: Sequence[Pass], program: Any, zero: int, distance: int
) -> None:
    """Four ranks give the last one a shard of no rows: 5 rows are 2 + 2 + 1 + 0."""
    graphs = graphs_of(build_of(program), zero, world_size)
    inputs = simulated_ranks.random_inputs(graphs)
    expected = simulated_ranks.run(graphs, inputs)
    facts: frozenset[Fact] = frozenset()
    own = (Prefetch(distance, distance), Bucket(cap_bytes=256, min_bytes=0))
    for step in up_to("prefetch", *own, passes=passes):
        for graph in graphs:
            run_passes([step], graph, Context(), given=facts)
        facts |= step.provides
        assert_equal(simulated_ranks.run(graphs, inputs), expected, step.name)
