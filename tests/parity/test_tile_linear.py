"""Weights that travel in blocks of columns: the numbers of the eager loop, through both doors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from examples.benchmarks.measure import allocated_peak_bytes
from fxzero.compiler.compilation import Compilation
from fxzero.schedule.simulate import simulate_memory
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES
from tests.parity.test_step import Case, trains_as_the_eager_loop
from tests.parity.training import (
    RTOL,
    assert_same,
    build,
    full_parameters,
    make_batch,
    rows_of_rank,
    train,
)
from tests.tiers import exhaustive
from tests.tracing import observed


def tiled_step(case: Case) -> None:
    """Job: a whole step next to the eager loop; some weights are in blocks."""
    found: list[Compilation] = []
    with observed(found.append):
        trains_as_the_eager_loop(case)
    decisions = [c.context.decisions.made["tile_linear"] for c in found]
    assert all(decision.weights for decision in decisions)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, None, "sgd", tile_bytes=1024),
        *exhaustive(
            Case(3, 1, 0.1, dtype=torch.float32, tile_bytes=512, memory="all_host"),
            Case(3, 2, 0.1, example="odd_shapes", tile_bytes=200),
            Case(3, 4, 0.1, tile_bytes=1024),
        ),
    ],
    ids=["tied", "host", "uneven", "micro-batches"],
)
def test_a_step(ranks: Pools, case: Case) -> None:
    """Losses, norms, parameters and optimizer state."""
    ranks(2).run(tiled_step, case)


class Huge(nn.Module):
    """A weight that is far larger than the others, and both the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 1024)
        self.middle = nn.Sequential(nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 1024))
        self.head = nn.Linear(1024, 4096, bias=False)
        nn.init.normal_(self.embedding.weight, std=1024**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows,) → scalar."""
        return self.head(self.middle(self.embedding(tokens)).relu()).square().mean()


WEIGHT = 1024 * 4096 * 4
"""Its bytes, in float32."""
BLOCK = WEIGHT // 16
RATE = 50.0
"""The loss is a mean over outputs that are small: every parameter moves by more than a hundredth of
its largest element, and rounding grows in none of them."""


def simulated_and_measured(door: str, regions: str, max_bytes: int) -> tuple[int, int]:
    """Job: the peaks of a step, inputs included; in three steps it learns what the same model
    learns that is in one piece."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Huge()
    reference = copy.deepcopy(model)
    fxzero.shard(model, zero=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=True)
    options = {
        "lower_regions": {"backend": regions},
        "gather_ahead": {"enabled": False},
        "tile_linear": {"max_bytes": max_bytes},
    }
    x = torch.arange(8)
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    with observed(keep):
        if door == "step":
            compiled = fxzero.compile_step(model, optimizer, options=options)

            def step() -> None:
                compiled(x)
        else:
            forward = torch.compile(model, backend="fxzero", options=options)

            def step() -> None:
                forward(x).backward()
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(3):
            step()
    descent = torch.optim.SGD(reference.parameters(), lr=RATE)
    for _ in range(3):
        reference(x).backward()
        descent.step()
        descent.zero_grad()
    assert_same(full_parameters(model), full_parameters(reference), RTOL[torch.float32])
    del reference, descent
    (graph,) = [c.joint for c in found if c.joint is not None]
    memory = simulate_memory(graph, fuses=regions == "inductor")
    measured = min(allocated_peak_bytes(step) for _ in range(3))
    return memory.peak_bytes, measured + memory.resident_bytes


@pytest.mark.parametrize(
    ("door", "regions"),
    [
        ("step", "eager"),
        ("loop", "eager"),
        *exhaustive(("step", "inductor")),
    ],
)
def test_the_peak_falls_by_the_weight(ranks: Pools, door: str, regions: str) -> None:
    """What is left is this rank's half of the weight and of its gradient, and a few blocks; the
    simulation counts what torch allocates."""
    for simulated, measured in ranks(2).run(simulated_and_measured, door, regions, BLOCK):
        assert simulated == pytest.approx(measured, rel=0.05)
        assert max(simulated, measured) < WEIGHT + 4 * BLOCK


def test_the_peak_without_blocks(ranks: Pools) -> None:
    """By more than the weight above that: the full weight, or the full gradient and what another
    rank has sent of it, is there at once."""
    for simulated, measured in ranks(2).run(simulated_and_measured, "loop", "eager", 0):
        assert min(simulated, measured) > 2 * WEIGHT + 4 * BLOCK


def loop_like_the_reference(options: dict[str, Any], dtype: torch.dtype, **shard: Any) -> None:
    """Job: the ordinary loop, compiled, next to the same in one process."""
    torch._dynamo.reset()
    example = EXAMPLES["gpt"]
    every = [make_batch(example, dtype, seed) for seed in range(2)]
    model = fxzero.shard(build(example, dtype), zero=3, **shard)
    found: list[Compilation] = []
    with observed(found.append):
        compiled = torch.compile(
            model,
            backend="fxzero",
            options={"lower_regions": {"backend": "eager"}, **options},
        )
        ours = train(compiled, example.loss, map(rows_of_rank, every))
    (decision,) = (c.context.decisions.made["tile_linear"] for c in found)
    assert len(decision.weights) > 1
    theirs = train(build(example, dtype), example.loss, every)
    if shard:  # in 16 bits: a block that is missing, or elsewhere, is an error of the size of all
        assert_same(ours.gradients, theirs.gradients, 0.05)
        return
    assert_same(ours.losses, theirs.losses, RTOL[dtype])
    assert_same(ours.gradients, theirs.gradients, RTOL[dtype])
    assert_same(ours.parameters, theirs.parameters, RTOL[dtype])
    assert_same(ours.optimizer_state, theirs.optimizer_state, RTOL[dtype])


@pytest.mark.parametrize(
    ("options", "dtype", "shard"),
    [
        ({"tile_linear": {"max_bytes": 1024}}, torch.float64, {}),
        *exhaustive(
            ({"tile_linear": {"max_bytes": 256}}, torch.float32, {"param_dtype": torch.bfloat16}),
            (
                {"tile_linear": {"max_bytes": 1024}, "recompute": {"policy": "full"}},
                torch.float64,
                {},
            ),
        ),
    ],
    ids=["float64", "bf16", "recompute"],
)
def test_the_ordinary_loop(
    ranks: Pools, options: dict[str, Any], dtype: torch.dtype, shard: dict[str, Any]
) -> None:
    """Losses, gradients, parameters and optimizer state, of matrices and of tied weights."""
    ranks(2).run(loop_like_the_reference, options, dtype, **shard)
