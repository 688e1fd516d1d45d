"""What people do besides in accelerate's loop: averages, two models that train in turn, meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import fxzero
from fxzero.integrations.whole import whole
from tests.integrations.accelerate_runs import Loop, as_launched, make
from tests.parity.harness import Pools


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(64, 4, generator=generator), torch.randn(64, 6, generator=generator)
    )


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}


def averaged(zero: int | None) -> dict[str, Tensor]:
    """Job: an exponential average, whose BatchNorm then sees all data again."""
    with as_launched():
        torch.manual_seed(0)
        accelerator = make(Loop(zero=zero, accumulate=1))
        model = _generator()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(), 4))
        if zero is not None:
            fxzero.shard(average.module, zero)
        for x, y in loader:
            accelerator.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))
        update_bn(loader, average)
        return _state(average.module)


class Sometimes(nn.Module):
    """With a layer that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        """Six numbers of each four."""
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.some(hidden) if use else hidden)


def used_at_first(zero: int | None) -> dict[str, Tensor]:
    """Job: of two micro-batches the first alone uses a layer."""
    with as_launched():
        torch.manual_seed(0)
        ddp = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
        accelerator = make(Loop(zero=zero, accumulate=2, args=ddp if zero is None else {}))
        model = Sometimes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(), 4))
        for index, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(((model(x, index % 2 == 0) - y) ** 2).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return _state(accelerator.unwrap_model(model))


def in_turn(zero: int | None) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
    """Job: a generator and a discriminator, with an optimizer each."""
    with as_launched():
        torch.manual_seed(0)
        accelerator = make(Loop(zero=zero, accumulate=2))
        # Without buffers: DDP of torch 2.11 writes to them in a second forward, and fails.
        made, judge = (
            nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 6)),
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
        )
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-4) for m in (made, judge)]
        made, judge, *rest, loader = accelerator.prepare(
            made, judge, *optimizers, DataLoader(_data(), 4)
        )
        losses = []
        for x, y in loader:
            with accelerator.accumulate(made, judge):
                fake = made(x)
                of_judge = (judge(y) ** 2).mean() - judge(fake.detach()).mean()
                accelerator.backward(of_judge)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(judge.parameters(), 1.0)
                rest[1].step()
                rest[1].zero_grad()
                of_maker = judge(made(x)).mean() + (fake**2).mean()
                accelerator.backward(of_maker)
                rest[0].step()
                for optimizer in rest:
                    optimizer.zero_grad()
            both = torch.stack([of_judge.detach(), of_maker.detach()])
            losses.append(accelerator.gather(both).tolist())
        return losses, _state(accelerator.unwrap_model(made)), accelerator.get_state_dict(judge)


def gathered(zero: int | None) -> list[Tensor]:
    """Job: what people gather of gradients, to log it."""
    with as_launched():
        torch.manual_seed(0)
        accelerator = make(Loop(zero=zero, accumulate=1))
        model, loader = accelerator.prepare(nn.Linear(4, 6), DataLoader(_data(), 4))
        x, y = next(iter(loader))
        accelerator.backward(((model(x) - y) ** 2).mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        weight = accelerator.unwrap_model(model).weight
        both = accelerator.gather((norm, {"gradient": weight.grad}))
        return [
            both[0],
            both[1]["gradient"],
            accelerator.gather_for_metrics(weight.grad.norm().detach()),
            accelerator.reduce(weight.grad, "mean"),
        ]


def on_meta() -> list[Tensor]:
    """Job: what each rank says that a model made without memory has become."""
    with as_launched():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 3))
        torch.manual_seed(dist.get_rank())
        model = make(Loop(zero=3, accumulate=1)).prepare(model)
        weight = whole(model[0].weight.detach())
        found = [torch.zeros(3, 4) for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.tensor(weight.tolist()))
        return found


@pytest.mark.parametrize("zero", [1, 3])
def test_an_average_is_that_of_ddp(ranks: Pools, zero: int) -> None:
    """With the statistics that `update_bn` collects."""
    wanted, found = (ranks(2).run(averaged, z)[0] for z in (None, zero))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_what_only_an_earlier_micro_batch_uses(ranks: Pools) -> None:
    """Is trained as under DDP, which reduces it with the last one."""
    wanted, found = (ranks(2).run(used_at_first, z)[0] for z in (None, 1))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [1, 3])
def test_two_models_that_train_in_turn(ranks: Pools, zero: int) -> None:
    """One through the other, each with its own optimizer, accumulated."""
    wanted, found = (ranks(2).run(in_turn, z)[0] for z in (None, zero))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]))
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)


def test_what_is_gathered_of_gradients_is_plain(ranks: Pools) -> None:
    """And whole, on each rank, as under DDP."""
    wanted, found = (ranks(2).run(gathered, z) for z in (None, 3))
    for theirs, ours in zip(wanted, found, strict=True):
        for value, other in zip(ours, theirs, strict=True):
            assert type(value) is Tensor
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_a_model_made_without_memory(ranks: Pools) -> None:
    """Is filled by its own initialisation, the same on all ranks."""
    first, second = ranks(2).run(on_meta)[0]
    assert torch.equal(first, second)
    assert 0.01 < first.abs().max() <= 0.5
