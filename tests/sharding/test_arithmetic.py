"""What optimizers compute goes to DTensor directly where nothing else is to be heeded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import fxzero
from fxzero.inspect.capture import fake_ranks
from fxzero.sharding.sharded_value import ShardedValue, is_arithmetic
from tests.work import calls


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """Four ranks in one process; no gradients are recorded, as in an optimizer."""
    with fake_ranks(4), torch.no_grad():
        yield


def shards(count: int = 1) -> list[Tensor]:
    """Parameters of one layout."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count)))
    return list(fxzero.shard(model, zero=3).parameters())


def laid_out(like: Tensor, placement: object) -> DTensor:
    """A value over the mesh of another one."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(torch.ones(2, 8), like.device_mesh, [placement], run_check=False)  # type: ignore[list-item]


def test_what_is_arithmetic() -> None:
    """Shards that lie alike, numbers, and counts of steps."""
    (weight,) = shards()
    gradient = laid_out(weight, Shard(0))
    assert is_arithmetic(torch.Tensor.add_, (weight, gradient), {"alpha": -0.1})
    assert is_arithmetic(torch.Tensor.mul_, (weight, 0.9), {})
    assert is_arithmetic(torch._foreach_addcdiv_, ([weight], [gradient], [gradient], [0.1]), {})
    assert is_arithmetic(torch._foreach_div, ([weight], [torch.tensor(3.0)]), {})


@pytest.mark.parametrize("placement", [Partial(), Replicate(), Shard(1)])
def test_values_that_lie_otherwise_are_not(placement: object) -> None:
    """Ranks would add up, or take, what does not belong together."""
    (weight,) = shards()
    other = laid_out(weight, placement)
    assert not is_arithmetic(torch.Tensor.add_, (weight, other), {})
    assert not is_arithmetic(torch._foreach_add_, ([weight, weight], [weight, other]), {})
    if placement == Partial():
        assert not is_arithmetic(torch.Tensor.sqrt, (other,), {})


def test_what_else_is_not() -> None:
    """Plain tensors, other functions, copies that stand for views, and what autograd records."""
    (weight,) = shards()
    gradient = laid_out(weight, Shard(0))
    assert not is_arithmetic(torch.Tensor.add_, (weight, torch.ones(8, 8)), {})
    assert not is_arithmetic(torch.Tensor.add, (gradient,), {"other": torch.ones(8, 8)})
    assert not is_arithmetic(torch.Tensor.sum, (gradient,), {})
    assert not is_arithmetic(torch.Tensor.add_, (torch.ones(2), 1.0), {})
    assert not is_arithmetic(torch.Tensor.lerp_, (torch.tensor(1.0), gradient, 0.1), {})
    assert not is_arithmetic(torch._foreach_mul_, ([weight, torch.tensor(1.0)], 0.1), {})
    assert not is_arithmetic(torch._foreach_mul_, ([], 0.1), {})
    part = weight.data[1:3]
    assert not is_arithmetic(torch.Tensor.mul_, (part, 0.5), {})
    with torch.enable_grad():
        assert not is_arithmetic(torch.Tensor.add, (gradient, 1.0), {})


def test_its_results_are_of_all_ranks_when_read() -> None:
    """Also where a parameter's own class was asked."""
    (weight,) = shards()
    assert type(weight.mul(2.0)) is ShardedValue
    assert all(type(value) is ShardedValue for value in torch._foreach_mul([weight], 2.0))
    assert weight.mul_(1.0) is weight


def test_an_update_makes_few_calls() -> None:
    """Some thousand a parameter, DTensor's own included; it was more than twice as many."""
    parameters = shards(20)
    for parameter in parameters:
        parameter.grad = laid_out(parameter, Shard(0))
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for _ in range(3):
        optimizer.step()
    assert calls(optimizer.step) < 1200 * len(parameters)


def test_a_layout_is_kept() -> None:
    """It is one object for life; a file knows it as torch's own."""
    (weight,) = shards()
    assert isinstance(weight, DTensor)
    layout = weight._spec
    assert copy.deepcopy(layout) is layout
    assert layout == copy.copy(layout)
    plain, _ = layout.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    assert plain is DTensorSpec
    assert layout != laid_out(weight, Shard(1))._spec
