"""Whatever is kept, gathered early or joined late: the same gradients and parameters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from tests.parity.harness import Pools
from tests.tiers import exhaustive, in_two_tiers

DOORS = ("step", "loop")
EAGER = {"backend": "eager"}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all kept": {"prefetch": {"budget_bytes": 1 << 30}, "cost": {"cluster": "pair_1gbit"}},
    "least": {"prefetch": {"distance": 0, "reduce_distance": 0}},
    "by layer": {"bucket": {"min_bytes": 0}, "cost": {"cluster": "pair_1gbit"}},
    "measured": {"cost": {"model": "measured"}},
}


class Net(nn.Module):
    """Tied ends, a block that is used twice, rows that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 23), nn.Tanh(), nn.Linear(23, 10))
            for _ in range(3)
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, self.blocks[0]]:
            x = x + block(x)
        logits = x @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(step: int, rank: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(31 * step + rank)
    drawn = torch.randint(13, (rows, 7), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def eager(world: int, steps: int, rows: list[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        losses = [model(*tokens(step, rank, rows[rank])) for rank in range(world)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def trains(options: dict[str, Any], door: str, rows: list[int]) -> None:
    """Three steps; parameters against one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxzero.shard(Net().double(), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = {**options, "lower_regions": EAGER}
    if door == "step":
        call = fxzero.compile_step(model, optimizer, options=options)
        for step in range(3):
            call(*tokens(step, rank, rows[rank]))
    else:
        compiled = torch.compile(model, backend="fxzero", options=options)
        for step in range(3):
            loss = compiled(*tokens(step, rank, rows[rank]))
            loss.backward(retain_graph=True)
            first = [p.grad.full_tensor().clone() for p in model.parameters()]
            for p in model.parameters():
                p.grad = None
            loss.backward()  # reads again what the first one read
            for p, before in zip(model.parameters(), first, strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), before, rtol=0, atol=0)
            optimizer.step()
            optimizer.zero_grad()
    expected = eager(world, 3, rows)
    for name, parameter in model.named_parameters():
        theirs = expected[name.removeprefix("_orig_mod.")]
        atol = 1e-12 * float(theirs.abs().max())
        torch.testing.assert_close(parameter.full_tensor().detach(), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(("name", "door"), in_two_tiers([*itertools.product(OPTIONS, DOORS)]))
def test_every_schedule_trains_alike(ranks: Pools, name: str, door: str) -> None:
    """Both doors, float64."""
    ranks(2).run(trains, OPTIONS[name], door, [4, 4])


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("door", ["step", *exhaustive("loop")])
def test_ranks_with_other_batches_decide_alike(ranks: Pools, world: int, door: str) -> None:
    """Costs differ, the order of collectives does not: the first rank to decide decides for all."""
    options = {"bucket": {"min_bytes": 0}, "cost": {"cluster": "pair_1gbit"}}
    ranks(world).run(trains, options, door, [2, 9, 64])


class WithStatistics(nn.Module):
    """Its norm's parameters have gradients of another dtype than they are reduced in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 6) to (B, 3)."""
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.mark.parametrize(
    ("zero", "doors"), [(3, ("loop",)), *exhaustive((3, DOORS), (0, DOORS), (1, DOORS))]
)
def test_casts_inside_of_regions(ranks: Pools, zero: int, doors: tuple[str, ...]) -> None:
    """What passes cast fuses with what it is computed from: on Inductor, in both doors."""
    ranks(2).run(train_in_low_precision, zero, doors)


def train_in_low_precision(zero: int, doors: tuple[str, ...]) -> None:
    """Job: Inductor's regions next to torch's own kernels, to the rounding of bfloat16."""
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    found = []
    for options in ({}, {"lower_regions": EAGER}):
        for door in doors:
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = fxzero.shard(WithStatistics(), zero=zero, param_dtype=torch.bfloat16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss_fn = nn.functional.mse_loss
            if door == "step":
                fxzero.compile_step(model, optimizer, loss_fn, options=options)(x, y)
            else:
                compiled = torch.compile(model, backend="fxzero", options=options)
                loss_fn(compiled(x).float(), y).backward()
                optimizer.step()
            found.append([p.detach() for p in model.parameters()])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            mine, theirs = (getattr(p, "_local_tensor", p) for p in (a, b))
            # The rate, times a rounding to bfloat16 on either side of gradients below 2.
            assert torch.allclose(mine, theirs, rtol=0, atol=0.1 * 2 * 2 * 2**-8)
