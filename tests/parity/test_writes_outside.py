"""What people write to shards outside of a forward, and through parts of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxzero
from tests.parity.harness import Pools
from tests.parity.sharded import FLOAT64, TIGHT
from tests.parity.training import assert_same, full, full_parameters
from tests.tiers import exhaustive

ONES = torch.ones(5, 4, dtype=FLOAT64)


def _each_row(rows: Any) -> None:
    for index, row in enumerate(rows):
        row.mul_(index)


def _swap(w: Tensor) -> None:
    first = w[0].clone()
    w[0] = w[4]
    w[4] = first


def _nested(w: Tensor) -> Tensor:
    part = w.data[1:4][1]
    part[2] = 7
    return part


def _seen_later(w: Tensor) -> Tensor:
    whole = w.detach()
    row = whole[1]
    whole.fill_(2)
    return row.sum()


def _assign_gradient(w: Tensor) -> None:
    w.grad = ONES.clone()


def _subtract(w: Tensor) -> None:
    w.data -= 0.1 * w.grad


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a row of .data": lambda w: w.data[3].zero_(),
    "rows": lambda w: w[1:3].zero_(),
    "rows of .data, initialised": lambda w: nn.init.uniform_(w.data[2:]),
    "a chunk": lambda w: w.chunk(2)[0].zero_(),
    "one element": lambda w: w.data.view(-1).__setitem__(3, 5),
    "rows of a gradient": lambda w: w.grad[:2].zero_(),
    "identity": nn.init.eye_,
    "identity in .data": lambda w: nn.init.eye_(w.data),
    "orthogonal": nn.init.orthogonal_,
    "truncated": nn.init.trunc_normal_,
    "truncated rows": lambda w: nn.init.trunc_normal_(w.data[1:], std=0.02),
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "row after row": lambda w: _each_row(w.data),
    "column after column": lambda w: _each_row(w.data.unbind(1)),
    "noise on a gradient": lambda w: w.grad.normal_(),
    "noise like a gradient": lambda w: torch.randn_like(w.grad),
    "dropout of a gradient": lambda w: F.dropout(w.grad),
    "dropout in place": lambda w: F.dropout(w.grad, 0.5, True, True),
    "noise on rows": lambda w: w[:2].normal_(),
    "noise on detach": lambda w: w.detach().normal_(),
    "a plain mask": lambda w: w.grad.mul_(torch.arange(20.0).reshape(5, 4)),
    "a plain gradient": _assign_gradient,
    "foreach with a plain tensor": lambda w: torch._foreach_lerp_([w], [ONES], 0.5),
    "diagonal": lambda w: w.data.fill_diagonal_(3),
    "triangle": lambda w: w.data.tril_(),
    "norms of rows": lambda w: w.data.renorm_(2, 0, 0.1),
    "what was read before": _seen_later,
    "a part of a part": _nested,
    "by index": lambda w: w.data.__setitem__(torch.tensor([0, 3]), 1.0),
    "a mask makes copies": lambda w: w.data[w.data > 0].zero_(),
    "index_fill_": lambda w: w.data.index_fill_(0, torch.tensor([0, 4]), 9.0),
    "index_copy_": lambda w: w.data.index_copy_(0, torch.tensor([0, 4]), ONES[:2]),
    "scatter_": lambda w: w.data.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 3.0),
    "masked_fill_": lambda w: w.data.masked_fill_(ONES.tril().bool(), 3.0),
    "-= a gradient": _subtract,
    "+= a row of a gradient": lambda w: w.data[2].add_(w.grad[2], alpha=0.5),
    "flattened": lambda w: w.data.flatten()[7:9].fill_(3),
    "diagonal of the transposed": lambda w: w.data.t().diagonal().fill_(2),
    "a row of .T": lambda w: w.data.T[1].fill_(2),
    "swapped rows": _swap,
    "out=": lambda w: torch.mul(w.detach(), 2.0, out=w.data),
    "a deep copy": copy.deepcopy,
    "cumsum": lambda w: w.detach().cumsum(0),
    "norms of a list": lambda w: sum(float(n) for n in torch._foreach_norm([w.grad, w.grad[0]])),
    "largest of a list": lambda w: sum(float(n) for n in torch._foreach_max([w.grad, w.grad])),
    "clipped by the largest": lambda w: nn.utils.clip_grad_norm_([w], 0.1, norm_type=float("inf")),
    "norm of all": lambda w: nn.utils.get_total_norm([w.grad], float("inf")),
}


@pytest.mark.parametrize("world", [2, *exhaustive(4)])
def test_a_write_reaches_the_shards(ranks: Pools, world: int) -> None:
    """Four ranks share five rows: the last has none."""
    for found in ranks(world).run(write_everything):
        assert not found


def write_everything() -> list[str]:
    """Job: what differs from the same done to full parameters."""
    return [f"{name}: {text}" for name, do in WRITES.items() if (text := differs(do))]


def differs(do: Callable[[Tensor], Any]) -> str:
    """What differs after something was done to a weight: it, its gradient or what is returned."""
    results = []
    for zero in (None, 3):
        torch.manual_seed(0)
        model = nn.Linear(4, 5).to(FLOAT64)
        if zero is not None:
            fxzero.shard(model, zero=zero)
        model(ONES.cumsum(0)).square().mean().backward()
        torch.manual_seed(0 if zero is None else 10 * dist.get_rank())
        with torch.no_grad():
            results.append((do(model.weight), model.weight.detach(), model.weight.grad))
    for what, expected, found in zip(("result", "weight", "gradient"), *results, strict=True):
        if isinstance(expected, Tensor) and expected.dim() == 0:
            expected, found = float(expected), float(found)
        if isinstance(expected, Tensor) and not torch.allclose(full(found), expected, 1e-12, 0):
            return f"{what} {full(found)} instead of {expected}"
        if isinstance(expected, float) and found != pytest.approx(expected, rel=1e-12):
            return f"{what} {found} instead of {expected}"
    return ""


@pytest.mark.parametrize("world", [2])
def test_what_cannot_be_written_is_refused(ranks: Pools, world: int) -> None:
    """With what to do instead."""
    ranks(world).run(refuse_writes)


def refuse_writes() -> None:
    """Job."""
    model = fxzero.shard(nn.Linear(4, 5), zero=3)
    with pytest.raises(fxzero.ShardingError, match=r"part of weight .* torch\.no_grad\(\)"):
        nn.init.zeros_(model.weight[2:])
    with pytest.raises(fxzero.ShardingError, match=r"t_ would give .* another shape"):
        model.weight.data.t_()


@pytest.mark.parametrize("world", [2])
def test_gradients_that_autograd_returns(ranks: Pools, world: int) -> None:
    """``torch.autograd.grad`` of parameters gives shards, whose norms are of all ranks."""
    ranks(world).run(ask_autograd)


def ask_autograd() -> None:
    """Job."""
    torch.manual_seed(0)
    reference = nn.Linear(4, 5).to(FLOAT64)
    torch.manual_seed(0)
    model = fxzero.shard(nn.Linear(4, 5).to(FLOAT64), zero=3)
    found, expected = (
        torch.autograd.grad(trained(ONES).square().mean(), list(trained.parameters()))
        for trained in (model, reference)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert float(ours.norm()) == pytest.approx(float(theirs.norm()), rel=1e-12)
        assert torch.allclose(full(ours), theirs, 1e-12, 0)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_ignored_parameters_share_an_optimizer(ranks: Pools, world: int, kernel: str) -> None:
    """Lists that mix shards and plain tensors: clipping, averages, AdamW."""
    ranks(world).run(mix_lists, kernel)


def mix_lists(kernel: str) -> None:
    """Job."""
    found: list[dict[str, Tensor]] = []
    for zero in (None, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(FLOAT64)
        if zero is not None:
            fxzero.shard(model, zero=zero, ignored=list(model[1].parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), **{kernel: True})
        average = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            model(ONES.cumsum(0)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 0.1)
        found.append(full_parameters(model))
        found[-1]["norm"] = torch.tensor(float(norm), dtype=FLOAT64)
        found[-1] |= {f"average {i}": full(a) for i, a in enumerate(average)}
    assert_same(found[1], found[0], TIGHT)


@pytest.mark.parametrize("world", [2])
def test_plain_state_beside_shards(ranks: Pools, world: int) -> None:
    """As a full checkpoint leaves it for parameters without dims, and averages made by hand."""
    ranks(world).run(use_plain_state)


class Scaled(nn.Module):
    """A parameter without dims, and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=FLOAT64))
        self.layer = nn.Linear(4, 5).to(FLOAT64)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to (B, 5)."""
        return self.layer(x) * self.scale


def use_plain_state() -> None:
    """Job."""
    found: list[dict[str, Tensor]] = []
    for zero in (None, 3):
        torch.manual_seed(0)
        model = Scaled()
        if zero is not None:
            fxzero.shard(model, zero=zero)
        optimizer = torch.optim.AdamW(model.parameters())
        averages = {n: torch.zeros(p.shape, dtype=FLOAT64) for n, p in model.named_parameters()}
        for _ in range(3):
            model(ONES.cumsum(0)).square().mean().backward()
            optimizer.step()
            for name, parameter in model.named_parameters():
                averages[name].lerp_(parameter.detach(), 0.1)
                averages[name].mul_(0.9).add_(parameter.data, alpha=0.1)
                averages[name].addcmul_(parameter.grad, parameter.grad)
                parameter.grad = torch.ones(parameter.shape, dtype=FLOAT64)
                for key in ("exp_avg", "exp_avg_sq"):
                    kept = optimizer.state[parameter]
                    kept[key] = full(kept[key]).clone()
        found.append(full_parameters(model) | {f"average {n}": a for n, a in averages.items()})
    assert_same(found[1], found[0], TIGHT)
