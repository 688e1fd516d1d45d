"""What `shard` and `no_sync` do about states of affairs that a loop alone does not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxzero
from tests.parity.harness import Pools
from tests.parity.sharded import FLOAT64, TIGHT, all_stages, on_two_ranks
from tests.parity.training import assert_same, full_gradients, full_parameters

OPTIONS = {"lower_regions": {"backend": "eager"}}


def small(seed: int = 0) -> nn.Module:
    """(B, 4) to (B, 3)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(FLOAT64)


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    """A batch, and this rank's half of it."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(8, 4, generator=generator, dtype=FLOAT64)
    return batch, batch.chunk(dist.get_world_size())[dist.get_rank()]


@on_two_ranks
@pytest.mark.parametrize("zero", [1, 3])
def test_an_optimizer_that_has_stepped_is_refused(ranks: Pools, world: int, zero: int) -> None:
    """Its state is that of full parameters; the model stays as it was."""
    ranks(world).run(shard_late, zero)


def shard_late(zero: int) -> None:
    """Job."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    model(rows()[0]).sum().backward()
    optimizer.step()
    before = [id(p) for p in model.parameters()]
    with pytest.raises(fxzero.ShardingError, match=r"holds state of 0\.weight already"):
        fxzero.shard(model, zero=zero)
    assert [id(p) for p in model.parameters()] == before
    fxzero.shard(small(), zero=zero)  # nothing is left behind


@on_two_ranks
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("compile_it", [False, True])
def test_zeroing_in_place_forgets_what_no_sync_kept(
    ranks: Pools, world: int, zero: int, compile_it: bool
) -> None:
    """``zero_grad(set_to_none=False)`` discards a micro-batch, as None does."""
    ranks(world).run(discard_a_micro_batch, zero, compile_it)


def discard_a_micro_batch(zero: int, compile_it: bool) -> None:
    """Job: three rounds, of which each begins with a micro-batch that is thrown away."""
    model, reference = fxzero.shard(small(), zero=zero), small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    forward: Any = model
    if compile_it:
        forward = torch.compile(model, backend="fxzero", options=OPTIONS)
    for seed in range(3):
        thrown, kept, last = rows(seed), rows(seed + 10), rows(seed + 20)
        reference.zero_grad()
        (reference(kept[0]).square().mean() + reference(last[0]).square().mean()).backward()
        with fxzero.no_sync(model):
            forward(thrown[1]).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)
        with fxzero.no_sync(model), pytest.warns(fxzero.FxZeroWarning, match="are dropped"):
            forward(kept[1]).square().mean().backward()
        forward(last[1]).square().mean().backward()
        assert_same(full_gradients(model), full_gradients(reference), TIGHT)
        optimizer.zero_grad(set_to_none=False)


class Block(nn.Module):
    """A layer of the user's own: Dynamo leaves torch's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to (B, 4)."""
        return self.linear(x)


class WithLstm(nn.Module):
    """A recurrent layer that Dynamo leaves to Python, between two that it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to (B, 3)."""
        return self.last(self.recur(torch.tanh(self.first(x))))

    @torch.compiler.disable
    def recur(self, x: Tensor) -> Tensor:
        """(B, 4) to (B, 4)."""
        return self.lstm(x[:, None])[0][:, 0]


@on_two_ranks
@pytest.mark.parametrize("how", ["whole", "layer by layer"])
def test_what_nobody_sharded_or_compiled_is_reduced(ranks: Pools, world: int, how: str) -> None:
    """Plain data parallelism holds for the parts that run eagerly, too."""
    ranks(world).run(train_unsharded, how)


def train_unsharded(how: str) -> None:
    """Job."""
    torch.manual_seed(0)
    model = WithLstm().to(FLOAT64)
    torch.manual_seed(0)
    reference = WithLstm().to(FLOAT64)
    forward: Any = model
    if how == "whole":
        forward = torch.compile(model, backend="fxzero", options=OPTIONS)
    else:
        model.first.compile(backend="fxzero", options=OPTIONS)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    for seed in range(3):
        batch, mine = rows(seed)
        forward(mine).square().mean().backward()
        reference(batch).square().mean().backward()
        assert_same(full_gradients(model), full_gradients(reference), TIGHT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_parameters(model), full_parameters(reference), TIGHT)


class Normalised(nn.Module):
    """BatchNorm whose statistics differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        return self.last(self.norm(x)).square().mean()


@on_two_ranks
@all_stages
@pytest.mark.parametrize("door", ["eager", "compile", "step"])
def test_buffers_are_those_of_ddp(ranks: Pools, world: int, zero: int, door: str) -> None:
    """Losses, parameters and, at evaluation, running statistics."""
    ranks(world).run(train_with_statistics, zero, door)


def train_with_statistics(zero: int, door: str) -> None:
    """Job."""
    torch.manual_seed(0)
    model = fxzero.shard(Normalised().to(FLOAT64), zero=zero)
    torch.manual_seed(0)
    plain = Normalised().to(FLOAT64)
    reference = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    theirs = torch.optim.SGD(reference.parameters(), 0.1)
    forward: Any = model
    if door == "compile":
        forward = torch.compile(model, backend="fxzero", options=OPTIONS)
    step = fxzero.compile_step(model, optimizer, options=OPTIONS) if door == "step" else None
    for seed in range(3):
        _, mine = rows(seed)
        if step is not None:
            step(mine)
        else:
            forward(mine).backward()
            optimizer.step()
            optimizer.zero_grad()
        reference(mine).backward()
        theirs.step()
        theirs.zero_grad()
    reference(rows(7)[1])  # DDP broadcasts at the beginning of a forward
    if step is not None:
        model.eval()
        plain.eval()
    else:
        forward(rows(7)[1])
    before = full_parameters(plain)
    assert_same(full_parameters(model), before, TIGHT)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, statistics)
    assert_same(gathered[1], gathered[0], rtol=0)


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size()


@on_two_ranks
def test_every_rank_may_keep_its_own_buffers(ranks: Pools, world: int) -> None:
    """``broadcast_buffers=False``."""
    first, second = ranks(world).run(own_statistics)
    assert first != second


def own_statistics() -> list[float]:
    """Job."""
    torch.manual_seed(0)
    model = fxzero.shard(Normalised().to(FLOAT64), zero=3, broadcast_buffers=False)
    model(rows()[1]).backward()
    statistics: list[float] = model.get_buffer("norm.running_mean").tolist()
    return statistics


class ScalarFirst(nn.Module):
    """A 0-d parameter stands before the sharded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        return (self.linear(x) * self.scale).square().mean()


@on_two_ranks
@all_stages
def test_a_gradient_scaler_skips_on_all_ranks(ranks: Pools, world: int, zero: int) -> None:
    """An infinity in the last rank's rows alone."""
    for skipped in ranks(world).run(scale_with_an_infinity, zero):
        assert skipped


def scale_with_an_infinity(zero: int) -> bool:
    """Job: whether the step was skipped."""
    torch.manual_seed(0)
    model = fxzero.shard(ScalarFirst(), zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full_parameters(model)
    scaler.scale(model(torch.ones(2, 4))).backward()
    grad = model.linear.weight.grad
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    if dist.get_rank() == 1 or zero == 0:
        local[-1, -1] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(full_parameters(model), before, rtol=0)
    return True
