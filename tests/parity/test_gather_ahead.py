"""Steps whose first gathers were started by the step before: right, whatever happens between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fxzero
from fxzero.compiler.compilation import Compilation, observers
from fxzero.runtime import collectives
from fxzero.runtime.ahead import Ahead, Take, is_same
from fxzero.runtime.collectives import InFlight
from tests.parity.harness import Pools

OPTIONS = {
    "lower_regions": {"backend": "eager"},
    "cost": {"cluster": "pair_1gbit"},  # over loop-back nothing would be started ahead
}
STEPS = 4
CHANGE_AT = 2
"""Between which two steps a parameter changes."""


class Net(nn.Module):
    """Three layers of uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def nothing(model: nn.Module) -> None:
    """The parameters stay."""


def in_place(model: nn.Module) -> None:
    """As an average of weights, or a hand-made update, would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def through_data(model: nn.Module) -> None:
    """Unseen by version counters."""
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def loaded(model: nn.Module) -> None:
    """A checkpoint."""
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def negated(model: nn.Module) -> None:
    """Signs alone, which sums of bits do not show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()


def clamped(model: nn.Module) -> None:
    """Few elements change, on some of the ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(max=0.3)


def in_one_row(model: nn.Module) -> None:
    """One rank alone sees a change."""
    weight = dict(model.named_parameters())["layers.0.weight"]
    local = _local(weight)
    if not isinstance(weight, DTensor) or dist.get_rank() == 0:
        local.data[0].zero_()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f for f in (nothing, in_place, through_data, loaded, negated, clamped, in_one_row)
}


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 9, dtype=torch.float64, generator=generator)


def train(change: str, clip: float | None) -> tuple[list[torch.Tensor], list[Ahead]]:
    """Losses and full parameters of a run in which the parameters change once."""
    torch.manual_seed(0)
    model = fxzero.shard(Net().double(), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    observers.append(keep)
    step = fxzero.compile_step(model, optimizer, clip_grad_norm=clip, options=OPTIONS)
    losses = []
    for i in range(STEPS):
        if i == CHANGE_AT:
            CHANGES[change](model)
        losses.append(step(batch(i, dist.get_rank())).loss)
    observers.remove(keep)
    (compilation,) = found
    assert compilation.joint is not None
    aheads = [n.target.ahead for n in compilation.joint.nodes() if isinstance(n.target, Take)]
    dist.all_reduce(total := torch.stack(losses))
    parameters = [p.full_tensor().detach() for p in model.parameters()]
    return [total / dist.get_world_size(), *parameters], aheads


def eager(change: str, clip: float | None, world: int) -> list[torch.Tensor]:
    """The same in one process."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for i in range(STEPS):
        if i == CHANGE_AT:
            CHANGES[change](model)
        loss = torch.stack([model(batch(i, rank)) for rank in range(world)]).mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


def is_the_eager_run(change: str, clip: float | None) -> None:
    """Compare, and see that gathers were taken, or thrown away, when they should be."""
    found, aheads = train(change, clip)
    expected = eager(change, clip, dist.get_world_size())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))
    assert aheads, "nothing was started ahead"
    stale = 0 if change == "nothing" else 1
    for ahead in aheads:
        assert (ahead.num_taken, ahead.num_stale) == (STEPS - 1 - stale, stale)


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_change_between_steps(ranks: Pools, change: str) -> None:
    """What is in flight is used if it is right, and gathered anew if it is not."""
    ranks(2).run(is_the_eager_run, change, None)


@pytest.mark.parametrize("world", [3])
def test_after_clipping(ranks: Pools, world: int) -> None:
    """All updates wait for the norm: the first gathers start before the other updates."""
    ranks(world).run(is_the_eager_run, "nothing", 0.1)


def makes_another_step_meanwhile() -> None:
    """Messages in flight of a step that is gone do not reach the next one."""
    for _ in range(3):
        found, _aheads = train("nothing", None)
        expected = eager("nothing", None, dist.get_world_size())
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        torch._dynamo.reset()


def test_a_step_that_is_dropped_with_gathers_in_flight(ranks: Pools) -> None:
    """Three steps one after the other, each dropped when its last gathers are on their way."""
    ranks(2).run(makes_another_step_meanwhile)


def test_bits() -> None:
    """NaN equals itself, minus zero is another number, and so is another order."""
    tensor = torch.tensor([1.0, float("nan"), 0.0, -2.0])
    assert is_same(tensor, tensor.clone())
    assert not is_same(tensor, tensor.flip(0))
    other = tensor.clone()
    other[2] = -0.0
    assert not is_same(tensor, other)


def nothing_sent(*shards: Any) -> Any:
    raise AssertionError("not called")


def test_nothing_in_flight_is_nothing_to_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping twice, or never having launched, does nothing."""
    joined: list[InFlight] = []
    monkeypatch.setattr(collectives, "join", joined.append)
    ahead = Ahead(nothing_sent, 2, "", 0, "w")
    ahead.drop()
    assert joined == []
    ahead.flight = flight = InFlight([], [])
    ahead.drop()
    ahead.drop()
    assert joined == [flight]
    assert ahead.flight is None
