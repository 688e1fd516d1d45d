"""What an optimizer must not do alone: train what nobody reduces, or replicas that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxzero
from tests.parity.harness import Pools
from tests.parity.sharded import FLOAT64, TIGHT, all_stages, first_and_last_stage, on_two_ranks
from tests.parity.test_refusals import OPTIONS, rows, small
from tests.parity.training import assert_same, full_parameters


class Wrapped(nn.Module):
    """A body that somebody shards, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()
        self.head = nn.Linear(3, 2).to(FLOAT64)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        return self.head(self.body(x)).square().mean()


def add_a_head(zero: int) -> nn.Module:
    """A head that comes after `shard`."""
    model = Wrapped()
    head, model.head = model.head, nn.Identity()
    fxzero.shard(model, zero=zero)
    model.head = head
    return model


def shard_the_body(zero: int) -> nn.Module:
    """A head around what is sharded."""
    model = Wrapped()
    fxzero.shard(model.body, zero=zero)
    return model


def add_an_adapter(zero: int) -> nn.Module:
    """A parameter registered after `shard`."""
    model = fxzero.shard(Wrapped(), zero=zero)
    model.register_parameter("bias", nn.Parameter(torch.zeros(2, dtype=FLOAT64)))
    return model


@on_two_ranks
@all_stages
@pytest.mark.parametrize("make", [add_a_head, shard_the_body, add_an_adapter])
def test_what_shard_has_not_seen_is_refused(
    ranks: Pools, world: int, zero: int, make: Callable[[int], nn.Module]
) -> None:
    """Before anything is updated, in the ordinary loop and in a compiled step."""
    ranks(world).run(train_a_stranger, zero, make)


def train_a_stranger(zero: int, make: Callable[[int], nn.Module]) -> None:
    """Job."""
    model = make(zero)
    optimizer = torch.optim.AdamW(model.parameters())
    before = full_parameters(model)
    model(rows()[1]).backward()
    with pytest.raises(fxzero.ShardingError, match=r"AdamW updates .* has not seen"):
        optimizer.step()
    assert_same(full_parameters(model), before, 0.0)
    optimizer.zero_grad()
    with pytest.raises(fxzero.ShardingError, match=r"AdamW updates .* has not seen"):
        fxzero.compile_step(model, optimizer, options=OPTIONS)


@on_two_ranks
@first_and_last_stage
def test_the_ways_out(ranks: Pools, world: int, zero: int) -> None:
    """A module of its own may be sharded on its own; DDP reduces its own; frozen is not trained."""
    ranks(world).run(go_out, zero)


def go_out(zero: int) -> None:
    """Job."""
    torch.manual_seed(0)
    reference = Wrapped()
    batch, mine = rows()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    reference(batch).backward()
    optimizer.step()
    ways: Iterable[Callable[[nn.Module], nn.Module]] = (
        lambda head: fxzero.shard(head, zero=0),
        DistributedDataParallel,
    )
    for way in ways:
        torch.manual_seed(0)
        model = shard_the_body(zero)
        model.head = way(model.head)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(mine).backward()
        optimizer.step()
        found = {n.replace("head.module", "head"): p for n, p in full_parameters(model).items()}
        assert_same(found, full_parameters(reference), TIGHT)
    model = shard_the_body(zero)
    model.head.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(mine).backward()
    optimizer.step()
    model.head.requires_grad_(True)
    model(mine).backward()
    with pytest.raises(fxzero.ShardingError, match="has not seen"):
        optimizer.step()


@on_two_ranks
def test_a_criterion_with_parameters(ranks: Pools, world: int) -> None:
    """It is no part of the model."""
    ranks(world).run(learn_a_temperature)


def learn_a_temperature() -> None:
    """Job."""
    model = fxzero.shard(small(), zero=3)
    temperature = nn.Parameter(torch.ones((), dtype=FLOAT64))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    (model(rows()[1]).square().mean() * temperature).backward()
    with pytest.raises(fxzero.ShardingError, match=r"1 parameters \(of shape \(\)\)"):
        optimizer.step()


@on_two_ranks
@pytest.mark.parametrize("door", ["eager", "step"])
def test_replicas_that_differ(ranks: Pools, world: int, door: str) -> None:
    """Ranks seeded differently, weights initialised anew: found before the first step."""
    for message in ranks(world).run(drift_apart, door):
        assert "0.weight differs between ranks 0 and 1 before step 1 of SGD" in message


def drift_apart(door: str) -> str:
    """Job: what is said."""
    model = fxzero.shard(small(), zero=0)
    torch.manual_seed(dist.get_rank())
    nn.init.xavier_uniform_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mine = rows()[1]

    def train() -> None:
        if door == "step":
            step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=OPTIONS)
            step(mine, torch.zeros(4, 3, dtype=FLOAT64))
        model(mine).sum().backward()
        optimizer.step()

    with pytest.raises(fxzero.ShardingError) as caught:
        train()
    return str(caught.value)


@on_two_ranks
def test_replicas_that_drift_later(ranks: Pools, world: int) -> None:
    """Noise on every step, one rank's own: found before the tenth. Rounding is no drift."""
    ranks(world).run(drift_later)


def drift_later() -> None:
    """Job."""
    for dtype in (torch.float32, torch.bfloat16):
        model = fxzero.shard(small().to(dtype), zero=0)
        optimizer = torch.optim.AdamW(model.parameters())
        mine = rows()[1].to(dtype)
        for step in range(1, 11):
            model(mine).square().mean().backward()
            if step == 5:
                for parameter in model.parameters():  # what another machine might round otherwise
                    parameter.data *= 1 + dist.get_rank() * torch.finfo(dtype).eps / 2
            optimizer.step()
            optimizer.zero_grad()
    model = fxzero.shard(small(), zero=0)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())

    def train_with_noise() -> None:
        model(rows()[1]).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.add_(torch.randn(6, 4, dtype=FLOAT64), alpha=1e-3)

    for _ in range(9):
        train_with_noise()
    with pytest.raises(fxzero.ShardingError, match="differs between ranks 0 and 1 before step 10"):
        train_with_noise()


@on_two_ranks
@all_stages
def test_what_one_rank_does_alone(ranks: Pools, world: int, zero: int) -> None:
    """A learning rate of its own, or a write below ``if rank == 0``; not a replica's swap."""
    ranks(world).run(do_alone, zero)


def do_alone(zero: int) -> None:
    """Job."""
    for words in (
        "lr of group 0 is 0.1 on rank 0 and 0.05 on rank 1",
        "0.weight (was written|differs)",
    ):
        model = fxzero.shard(small(), zero=zero)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(rows()[1]).sum().backward()
        if words.startswith("lr"):
            optimizer.param_groups[0]["lr"] /= 1 + dist.get_rank()
        elif dist.get_rank() == 0:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        with pytest.raises(fxzero.ShardingError, match=words):
            optimizer.step()
    replicated = fxzero.shard(small(), zero=0)
    optimizer = torch.optim.SGD(replicated.parameters(), 0.1)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for parameter in replicated.parameters():
                kept = parameter.clone()
                parameter.zero_()
                parameter.copy_(kept)
    replicated(rows()[1]).sum().backward()
    optimizer.step()
