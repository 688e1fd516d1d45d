"""Collectives, and lists of numbers, that somebody makes by hand of shards' norms."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from tests.parity.harness import Pools


def _trained(zero: int) -> nn.Module:
    torch.manual_seed(0)
    model = fxzero.shard(nn.Linear(8, 4), zero)
    model(torch.ones(2, 8)).sum().backward()
    return model


def reduced(zero: int) -> tuple[float, ...]:
    """Job: sums over the ranks of what each has, and the gradient's own square."""
    weight = _trained(zero).weight
    with torch.no_grad():
        of_weight, plain = weight.square().sum(), torch.tensor(float(dist.get_rank()))
        mixed = plain + weight.grad.square().sum()
    whole = of_weight.item(), mixed.item()
    dist.all_reduce(of_weight)
    dist.all_reduce(mixed)
    both = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(both, weight.grad.norm())
    assert both[0] == both[1]
    return (*whole, of_weight.item(), mixed.item())


def refused(zero: int) -> str:
    """Job: what is said of a gradient whose rows somebody would add up."""
    weight = _trained(zero).weight
    before = weight.grad.full_tensor().clone()
    with pytest.raises(fxzero.ShardingError) as caught:
        dist.all_reduce(weight.grad)
    assert torch.equal(weight.grad.full_tensor(), before)
    return str(caught.value)


def listed(zero: int) -> list[list[float]]:
    """Job: norms in a list, as Lightning's ``grad_norm`` makes one."""
    grads = [p.grad for p in _trained(zero).parameters() if p.grad is not None]
    return [
        torch.tensor([grad.norm() for grad in grads]).tolist(),
        torch.as_tensor([grad.detach().norm() for grad in grads]).tolist(),
        [float(grad.full_tensor().norm()) for grad in grads],
    ]


@pytest.mark.parametrize("zero", [1, 3])
def test_what_every_rank_has_is_reduced_as_torch_does(ranks: Pools, zero: int) -> None:
    """It was left as it is, without a word."""
    first, second = ranks(2).run(reduced, zero)
    assert first[2] == pytest.approx(first[0] + second[0])
    assert first[3] == pytest.approx(first[1] + second[1])
    assert second[1] == pytest.approx(first[1] + 1)
    assert first[2:] == second[2:]


def test_rows_are_refused(ranks: Pools) -> None:
    """With the call that is right; nothing has changed."""
    for said in ranks(2).run(refused, 3):
        assert "all_reduce was given a tensor of shape (4, 8)" in said
        assert "Gradients are reduced already" in said


@pytest.mark.parametrize("zero", [1, 3])
def test_norms_in_a_list(ranks: Pools, zero: int) -> None:
    """Are those of whole gradients."""
    for found, detached, wanted in ranks(2).run(listed, zero):
        assert found == pytest.approx(wanted)
        assert detached == pytest.approx(wanted)
