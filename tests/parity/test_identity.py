"""A parameter is one thing, whoever holds it: its numbers, its ``.data``, what hangs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from tests.parity.harness import Pools
from tests.parity.sharded import FLOAT64, TIGHT, all_stages, on_two_ranks
from tests.parity.test_refusals import OPTIONS, rows, small
from tests.parity.training import assert_same, full_parameters

sharded_stages = pytest.mark.parametrize("zero", [1, 3])


def numbers(model: nn.Module) -> Tensor:
    """What people log of parameters and gradients, as Python numbers."""
    found: list[float] = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found += [float(parameter.norm()), parameter.abs().max().item(), float(parameter.sum())]
        found += [float(parameter.data.norm()), parameter.data.mean().item()]
        found += [parameter.grad.norm().item(), float(parameter.grad.data.norm())]
    return torch.tensor(found, dtype=FLOAT64)


@on_two_ranks
@all_stages
def test_numbers_are_of_all_ranks(ranks: Pools, world: int, zero: int) -> None:
    """``float()`` of a norm is not this rank's own part, with and without autograd."""
    ranks(world).run(compare_numbers, zero)


def compare_numbers(zero: int) -> None:
    """Job."""
    model, reference = fxzero.shard(small(), zero=zero), small()
    batch, mine = rows()
    model(mine).square().mean().backward()
    reference(batch).square().mean().backward()
    assert_same({"numbers": numbers(model)}, {"numbers": numbers(reference)}, TIGHT)
    with torch.no_grad():
        assert_same({"numbers": numbers(model)}, {"numbers": numbers(reference)}, TIGHT)


@on_two_ranks
@all_stages
def test_data_is_swapped_and_swapped_back(ranks: Pools, world: int, zero: int) -> None:
    """An average is evaluated in the place of the weights, which then come back."""
    ranks(world).run(swap, zero)


def swap(zero: int) -> None:
    """Job."""
    model = fxzero.shard(small(), zero=zero)
    batch, _ = rows()
    before, kept = full_parameters(model), [p.data for p in model.parameters()]
    expected = model(batch)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    assert not torch.allclose(model(batch), expected)
    halves = {name: value * 0.5 for name, value in before.items() if value is not None}
    assert_same(full_parameters(model), halves, TIGHT)
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data
    assert_same(full_parameters(model), before, rtol=0)
    assert torch.equal(model(batch), expected)


def _hook(model: nn.Module) -> Any:
    return model[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index, union-attr, operator]


def _view(model: nn.Module) -> Any:
    return model[0].weight.t()  # type: ignore[index, union-attr, operator]


@on_two_ranks
@sharded_stages
@pytest.mark.parametrize(("hang", "message"), [(_hook, "gradient hook"), (_view, "is kept")])
def test_what_hangs_on_a_full_parameter_is_refused(
    ranks: Pools, world: int, hang: Callable[[nn.Module], Any], message: str, zero: int
) -> None:
    """It would go on with old values, and take gradients that nobody reads."""
    ranks(world).run(shard_with_something, hang, message, zero)


def shard_with_something(hang: Callable[[nn.Module], Any], message: str, zero: int) -> None:
    """Job."""
    model = small()
    kept = hang(model)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(fxzero.ShardingError, match=message):
        fxzero.shard(model, zero=zero)
    assert [id(p) for p in model.parameters()] == before
    del kept


class Counts(nn.Module):
    """Counts what it sees, in a buffer that depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.zeros(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        """(B, 4) to a scalar."""
        with torch.no_grad():
            (self.first if rank == 0 else self.second).add_(1)
        return self.linear(x).square().mean()


@on_two_ranks
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_that_write_to_other_buffers_do_not_mix_them(
    ranks: Pools, world: int, zero: int
) -> None:
    """All ranks end with rank 0's values of every buffer."""
    for first, second in ranks(world).run(count, zero):
        assert first == [3.0, 3.0, 3.0]
        assert second == [0.0, 0.0, 0.0]


def count(zero: int) -> tuple[list[float], list[float]]:
    """Job: the buffers after three forwards."""
    torch.manual_seed(0)
    model = fxzero.shard(Counts().to(FLOAT64), zero=zero)
    for _ in range(3):
        model(rows()[1], dist.get_rank()).backward()
    return model.get_buffer("first").tolist(), model.get_buffer("second").tolist()


@on_two_ranks
@all_stages
def test_inference_mode(ranks: Pools, world: int, zero: int) -> None:
    """Uncompiled evaluation, where nobody counts versions."""
    ranks(world).run(evaluate, zero)


def evaluate(zero: int) -> None:
    """Job."""
    model, reference = fxzero.shard(small(), zero=zero), small()
    with torch.inference_mode():
        assert_same({"y": model(rows()[0])}, {"y": reference(rows()[0])}, TIGHT)


@on_two_ranks
@sharded_stages
def test_a_teacher_that_nobody_sharded(ranks: Pools, world: int, zero: int) -> None:
    """``teacher.add_(student)`` gets the student in full."""
    ranks(world).run(teach, zero)


def teach(zero: int) -> None:
    """Job."""
    teacher, reference = small(seed=1), small(seed=1)
    student, plain = fxzero.shard(small(), zero=zero), small()
    for mine, other in ((teacher, student), (reference, plain)):
        for average, parameter in zip(mine.parameters(), other.parameters(), strict=True):
            average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
    assert_same(full_parameters(teacher), full_parameters(reference), TIGHT)


@on_two_ranks
@sharded_stages
def test_a_list_of_parameters_from_before_shard(ranks: Pools, world: int, zero: int) -> None:
    """An optimizer over it updates the parameters of today, in a compiled step too."""
    ranks(world).run(optimize_an_old_list, zero)


def optimize_an_old_list(zero: int) -> None:
    """Job."""
    model, reference = small(), small()
    old = list(model.parameters())
    fxzero.shard(model, zero=zero)
    optimizer = torch.optim.AdamW(old, 1e-2)

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return output.square().mean()

    step = fxzero.compile_step(model, optimizer, loss, options=OPTIONS)
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2)
    for seed in range(3):
        batch, mine = rows(seed)
        step(mine, mine)
        loss(reference(batch), batch).backward()
        theirs.step()
        theirs.zero_grad()
    assert_same(full_parameters(model), full_parameters(reference), TIGHT)


@on_two_ranks
@sharded_stages
def test_an_optimizer_from_before_shard_has_the_parameters_of_today(
    ranks: Pools, world: int, zero: int
) -> None:
    """Those themselves, not what stands for them: who asks whether a parameter is an optimizer's,
    or looks up its state, compares objects."""
    ranks(world).run(compare_objects, zero)


def compare_objects(zero: int) -> None:
    """Job: by ``is``, in the groups and in the state."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    fxzero.shard(model, zero=zero)
    (group,) = optimizer.param_groups
    assert len(group["params"]) == len(list(model.parameters()))
    for of_group, parameter in zip(group["params"], model.parameters(), strict=True):
        assert of_group is parameter
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(optimizer.state[parameter] for parameter in model.parameters())


class Tagged(nn.Parameter):
    """A parameter of a class of its own."""


@on_two_ranks
@all_stages
def test_what_people_note_on_parameters(ranks: Pools, world: int, zero: int) -> None:
    """Attributes stay; what a shard cannot be is refused, and the model stays as it was."""
    ranks(world).run(note_on_parameters, zero)


def note_on_parameters(zero: int) -> None:
    """Job."""
    model = small()
    model[0].weight._no_weight_decay = True
    fxzero.shard(model, zero=zero)
    assert [hasattr(p, "_no_weight_decay") for p in model.parameters()] == [True] + [False] * 3
    counter = small()
    counter.register_parameter("count", nn.Parameter(torch.zeros(3).long(), requires_grad=False))
    counter.register_parameter("on", nn.Parameter(torch.ones(3).bool(), requires_grad=False))
    fxzero.shard(counter, zero=zero)(rows()[1]).sum().backward()
    with pytest.raises(fxzero.ShardingError, match="has no shape yet"):
        fxzero.shard(nn.Sequential(nn.LazyLinear(3)), zero=zero)
    if zero == 0:
        return
    watching = small()
    watching.register_buffer("seen", watching[0].weight.data)
    with pytest.raises(fxzero.ShardingError, match="in the same memory"):
        fxzero.shard(watching, zero=zero)
    tagged, shared, halves = small(), small(), small()
    tagged[0].weight = Tagged(tagged[0].weight)
    shared[2].bias.data = shared[0].weight.data.view(-1)[:3]
    both = torch.randn(6, 8, dtype=FLOAT64)
    halves[0].weight, halves[0].other = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])
    for refused, words in ((tagged, r"0\.weight is a Tagged"), (shared, "in the same memory")):
        before = [id(p) for p in refused.parameters()]
        with pytest.raises(fxzero.ShardingError, match=words):
            fxzero.shard(refused, zero=zero)
        assert [id(p) for p in refused.parameters()] == before
    fxzero.shard(halves, zero=zero)  # neighbours in memory, and no more


@on_two_ranks
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_forward_that_was_set_on_the_module(ranks: Pools, world: int, compile_it: bool) -> None:
    """Buffers are rank 0's after it, and inputs are cast before it."""
    ranks(world).run(set_forward, compile_it)


def set_forward(compile_it: bool) -> None:
    """Job."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    plain = model.forward
    model.forward = lambda x: plain(x) * 2  # type: ignore[method-assign]
    fxzero.shard(model, zero=0, param_dtype=torch.bfloat16)
    forward: Any = torch.compile(model, backend="fxzero", options=OPTIONS) if compile_it else model
    forward(torch.randn(3, 4) + dist.get_rank()).sum().backward()
    mean = model[1].running_mean
    both = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mean)
    assert torch.equal(both[0], both[1])
