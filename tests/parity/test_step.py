"""`fxzero.compile_step` against the ordinary loop, eager and unsharded, on the whole batch.

Twelve steps of two parameter groups, whose rates rise and fall: losses, learning rates,
gradient norms, parameters and optimizer state after the last one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fxzero
from fxzero.runtime.optimizers import is_patched
from tests.pairwise import pairwise
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES, Batch, Example
from tests.parity.training import (
    RTOL,
    Tensors,
    assert_same,
    build,
    full_optimizer_state,
    full_parameters,
    make_batch,
    mean_over_ranks,
    rows_of_rank,
)
from tests.tiers import exhaustive, in_two_tiers

ROWS = 16
"""Divisible by four ranks of four micro-batches."""
STEPS = 12
"""Ten of them warm up: the last rates fall."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain_sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "dampened": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
    "foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
}


@dataclass(frozen=True)
class Case:
    """One way to train one model."""

    zero: int
    micro_batches: int = 1
    clip: float | None = None
    optimizer: str = "adamw"
    example: str = "gpt"
    dtype: torch.dtype = torch.float64
    lowering: str = "eager"
    force: str = ""
    """Our own kernels, as `lower_kernels.force` names them."""
    mesh: tuple[int, ...] = ()
    tile_bytes: int = 0
    """Weights above it travel in blocks: `tile_linear.max_bytes`."""
    memory: str = "none"


@dataclass
class Run:
    """What a training run leaves behind."""

    losses: Tensors = field(default_factory=dict)
    norms: Tensors = field(default_factory=dict)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    parameters: Tensors = field(default_factory=dict)
    optimizer_state: Tensors = field(default_factory=dict)


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, **batch: Tensor) -> Tensor:
        """The mean over the rows."""
        return self.loss(self.model, batch)


def two_groups(model: nn.Module) -> Iterable[dict[str, Any]]:
    """Matrices decay, the rest does not and learns faster."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}]
    return [*groups, {"params": rest, "lr": 0.02}] if rest else groups


def warm_up(optimizer: Optimizer) -> LambdaLR:
    """A learning rate that is another one in every step."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / 10, 2.0 - step / 10))


def batches(example: Example, dtype: torch.dtype, steps: int = STEPS) -> Iterator[Batch]:
    """The steps' batches, over all ranks."""
    for seed in range(steps):
        yield make_batch(example, dtype, seed, rows=ROWS)


def compiled_run(case: Case) -> Run:
    """Train by `compile_step`."""
    example = EXAMPLES[case.example]
    mesh = init_device_mesh("cpu", case.mesh) if case.mesh else None
    model = fxzero.shard(build(example, case.dtype), zero=case.zero, mesh=mesh)
    optimizer = OPTIMIZERS[case.optimizer](two_groups(model))
    step = fxzero.compile_step(
        WithLoss(model, example.loss),
        optimizer,
        micro_batches=case.micro_batches,
        clip_grad_norm=case.clip,
        scheduler=warm_up(optimizer),
        options={
            "lower_regions": {"backend": case.lowering},
            "lower_kernels": {"force": case.force},
            "tile_linear": {"max_bytes": case.tile_bytes},
            "memory": case.memory,
        },
    )
    run = Run()
    for i, batch in enumerate(batches(example, case.dtype)):
        out = step(**rows_of_rank(batch))
        run.losses[f"step {i}"] = mean_over_ranks(out.loss)
        run.norms[f"step {i}"] = out.grad_norm
        run.rates.append(out.learning_rates)
    run.parameters = full_parameters(model)
    run.optimizer_state = full_optimizer_state(model, optimizer)
    return run


def eager_run(case: Case) -> Run:
    """Train by the loop that everybody writes, in one process on the whole batch."""
    return _eager_run(replace(case, zero=0, lowering="eager", force="", mesh=()))


@functools.cache
def _eager_run(case: Case) -> Run:
    """Once in a rank for all stages, meshes and lowerings, which say nothing to it."""
    example = EXAMPLES[case.example]
    model = build(example, case.dtype)
    optimizer = OPTIMIZERS[case.optimizer](two_groups(model))
    schedule = warm_up(optimizer)
    run = Run()
    for i, batch in enumerate(batches(example, case.dtype)):
        parts = [
            {name: value.chunk(case.micro_batches)[part] for name, value in batch.items()}
            for part in range(case.micro_batches)
        ]
        losses = []
        for part in parts:
            loss = example.loss(model, part)
            (loss / case.micro_batches).backward()
            losses.append(loss.detach())
        norm = None
        if case.clip is not None:
            norm = clip_grad_norm_(model.parameters(), case.clip)
        run.losses[f"step {i}"] = torch.stack(losses).mean()
        run.norms[f"step {i}"] = norm
        run.rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    run.parameters = full_parameters(model)
    run.optimizer_state = full_optimizer_state(model, optimizer)
    return run


def assert_same_run(actual: Run, expected: Run, rtol: float) -> None:
    """Compare all that two runs leave behind."""
    assert actual.rates == expected.rates
    assert_same(actual.losses, expected.losses, rtol)
    assert_same(actual.norms, expected.norms, rtol)
    assert_same(actual.parameters, expected.parameters, rtol)
    assert_same(actual.optimizer_state, expected.optimizer_state, rtol)


def trains_as_the_eager_loop(case: Case) -> None:
    """Job: both runs, compared."""
    assert_same_run(compiled_run(case), eager_run(case), RTOL[case.dtype])


CLIPPED, PLAIN = ("adamw", 0.1, 4), ("sgd", None, 1)
"""An optimizer, the norm to clip to, and the number of micro-batches."""


CAUGHT_BY = [(2, CLIPPED, 3), (2, PLAIN, 0), (2, PLAIN, 3), (4, PLAIN, 3)]
"""Cases by which tests/mutants catches faults."""


@pytest.mark.parametrize(
    ("world", "optimizer", "clip", "micro_batches", "zero"),
    in_two_tiers(
        [
            (world, *how, zero)
            for world, how, zero in pairwise(
                (1, 2, 4), (CLIPPED, PLAIN), (0, 1, 2, 3), always=CAUGHT_BY
            )
        ],
        always=[(world, *how, zero) for world, how, zero in CAUGHT_BY],
    ),
)
def test_float64(
    ranks: Pools, world: int, optimizer: str, clip: float | None, micro_batches: int, zero: int
) -> None:
    """No rounding to hide behind."""
    case = Case(zero, micro_batches, clip, optimizer, example="odd_shapes")
    ranks(world).run(trains_as_the_eager_loop, case)


@pytest.mark.parametrize(
    ("optimizer", "clip", "zero", "micro_batches"),
    [
        ("adamw", None, 2, 1),
        *exhaustive(("sgd", 0.1, 3, 4), ("adamw", None, 0, 4), ("sgd", 0.1, 1, 4)),
    ],
)
def test_float64_gpt(
    ranks: Pools, optimizer: str, clip: float | None, micro_batches: int, zero: int
) -> None:
    """Tied weights, several layers."""
    ranks(2).run(trains_as_the_eager_loop, Case(zero, micro_batches, clip, optimizer))


@pytest.mark.parametrize(("zero", "clip"), [(3, 0.1), *exhaustive((0, None))])
def test_our_own_update(ranks: Pools, zero: int, clip: float | None) -> None:
    """`fxzero.kernels.adamw_` in the place of torch's fused kernel."""
    ranks(2).run(trains_as_the_eager_loop, Case(zero, clip=clip, force="adamw"))


@pytest.mark.parametrize(
    ("zero", "micro_batches"), [(0, 1), *exhaustive((1, 4), (2, 4), (3, 1), (3, 4))]
)
def test_float32(ranks: Pools, zero: int, micro_batches: int) -> None:
    """The dtype that models are trained in."""
    case = Case(zero, micro_batches, 0.1, dtype=torch.float32)
    ranks(2).run(trains_as_the_eager_loop, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "zero", "micro_batches"),
    [
        *(("mlp", zero, 1) for zero in (0, 1, 2, 3)),
        *exhaustive(("gpt", 3, 4), ("gpt", 1, 4), ("gpt", 3, 1)),
    ],
)
def test_inductor(ranks: Pools, example: str, zero: int, micro_batches: int) -> None:
    """Regions compiled to C++."""
    case = Case(zero, micro_batches, 0.1, example=example, lowering="inductor")
    ranks(2).run(trains_as_the_eager_loop, case)


@pytest.mark.parametrize("optimizer", ["amsgrad", "plain_sgd", "adagrad", "dampened", "rmsprop"])
def test_other_optimizers(ranks: Pools, optimizer: str) -> None:
    """With torch's fused kernels, or by their own step."""
    ranks(2).run(trains_as_the_eager_loop, Case(3, 1, 0.1, optimizer, example="odd_shapes"))


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("zero", [3, *exhaustive(1)])
def test_on_two_axes(ranks: Pools, world: int, zero: int) -> None:
    """Reduce inside the group, all-reduce across; the norm counts each shard once."""
    case = Case(zero, 4, 0.1, example="odd_shapes", mesh=(2, 2))
    ranks(world).run(trains_as_the_eager_loop, case)


@pytest.mark.parametrize(
    ("example", "zero"),
    [
        *(("mlp", zero) for zero in (0, 1, 2, 3)),
        *exhaustive(*(("gpt", zero) for zero in (0, 1, 2, 3))),
    ],
)
def test_two_ranks_agree_bitwise_with_the_ordinary_loop(
    ranks: Pools, example: str, zero: int
) -> None:
    """The sums over ranks, and the fused updates, are those of the torch.compile door."""
    ranks(2).run(same_bits_as_the_ordinary_loop, example, zero)


def same_bits_as_the_ordinary_loop(name: str, zero: int) -> None:
    """Job: `compile_step` next to torch.compile and a fused AdamW."""
    example = EXAMPLES[name]
    options = {"lower_regions": {"backend": "eager"}}

    def prepared() -> tuple[nn.Module, Optimizer]:
        model = fxzero.shard(build(example, torch.float32), zero=zero)
        return model, torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)

    model, optimizer = prepared()
    step = fxzero.compile_step(WithLoss(model, example.loss), optimizer, options=options)
    ordinary, ordinary_optimizer = prepared()
    compiled = torch.compile(WithLoss(ordinary, example.loss), backend="fxzero", options=options)
    for batch in batches(example, torch.float32, steps=5):
        mine = rows_of_rank(batch)
        loss = compiled(**mine)
        loss.backward()
        ordinary_optimizer.step()
        ordinary_optimizer.zero_grad()
        assert torch.equal(step(**mine).loss, loss.detach())
    assert_same(full_parameters(model), full_parameters(ordinary), rtol=0)
    state = full_optimizer_state(model, optimizer)
    assert_same(state, full_optimizer_state(ordinary, ordinary_optimizer), rtol=0)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_ignored_parameters(ranks: Pools, clip: float | None) -> None:
    """They are each rank's own: updated, but in no norm that all ranks share."""
    ranks(2).run(train_beside_an_ignored_parameter, clip)


def train_beside_an_ignored_parameter(clip: float | None) -> None:
    """Job."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    own = model[1].bias
    fxzero.shard(model, zero=0, ignored=[own])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.functional.mse_loss
    options = {"lower_regions": {"backend": "eager"}}
    if clip is not None:
        with pytest.raises(fxzero.ConfigError, match=r"ignores 1\.bias"):
            fxzero.compile_step(model, optimizer, loss_fn, clip_grad_norm=clip)
        return
    step = fxzero.compile_step(model, optimizer, loss_fn, options=options)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    expected = own.detach() - 0.1 * torch.autograd.grad(loss_fn(model(x), y), [own])[0]
    step(x, y)
    assert torch.allclose(own, expected, rtol=1e-5)
    weight = model[0].weight.detach()
    assert torch.equal(weight, mean_over_ranks(weight))


def test_an_optimizer_that_cannot_take_shards(ranks: Pools) -> None:
    """It is named."""
    ranks(2).run(fail_in_the_optimizer)


class ByAddress(torch.optim.SGD):
    """Updates what it finds in memory, as an extension in C++ would."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Look for memory that a DTensor does not have."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.data_ptr() == 0:
                raise RuntimeError("a tensor without memory")


def fail_in_the_optimizer() -> None:
    """Job."""
    model = fxzero.shard(nn.Linear(4, 4), zero=3)
    optimizer = ByAddress(model.parameters())
    options = {"lower_regions": {"backend": "eager"}}
    step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=options)
    with pytest.raises(fxzero.CaptureError, match=r"ByAddress\.step\(\) failed on sharded"):
        step(torch.randn(2, 4), torch.randn(2, 4))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_parameter_with_gaps(ranks: Pools, zero: int) -> None:
    """A view of a wider tensor: fused kernels would walk through what lies between its rows."""
    ranks(2).run(trains_with_gaps, zero)


def trains_with_gaps(zero: int) -> None:
    """Job."""
    found = []
    x, y = torch.linspace(-1, 1, 12).double().view(2, 6), torch.zeros(2, 4).double()
    for compiled in (False, True):
        wide = torch.linspace(-1, 1, 32).double().view(4, 8)
        model = nn.Linear(6, 4).double()
        model.weight = nn.Parameter(wide[:, :6])
        model.bias.data.zero_()
        if compiled:
            fxzero.shard(model, zero=zero)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        if compiled:
            options = {"lower_regions": {"backend": "eager"}}
            step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=options)
        for _ in range(3):
            if compiled:
                step(x, y)
            else:
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(full_parameters(model))
    assert_same(found[1], found[0], 1e-12)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_that_somebody_replaced(ranks: Pools, zero: int) -> None:
    """``optimizer.step = mine`` runs; a scheduler's counter is no such thing."""
    ranks(2).run(replaces_the_step, zero)


def replaces_the_step(zero: int) -> None:
    """Job. What the optimizer keeps is of all ranks when read."""
    torch.manual_seed(0)
    model = fxzero.shard(nn.Linear(4, 4), zero=zero)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert not is_patched(optimizer)
    options = {"lower_regions": {"backend": "eager"}}
    step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=options)
    step(torch.ones(2, 4), torch.zeros(2, 4))
    moment = optimizer.state[model.weight]["exp_avg"]
    whole = moment.full_tensor() if zero else moment
    assert float(moment.norm()) == pytest.approx(float(whole.norm()), rel=1e-6)
    before = optimizer.step

    def clamped(*args: Any, **kwargs: Any) -> Any:
        result = before(*args, **kwargs)
        with torch.no_grad():
            model.weight.clamp_(-0.01, 0.01)
        return result

    optimizer.step = clamped  # type: ignore[method-assign]
    assert is_patched(optimizer)
    step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=options)
    step(torch.ones(2, 4), torch.zeros(2, 4))
    assert float(model.weight.detach().abs().max()) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("zero", "micro_batches", "precision"),
    in_two_tiers(
        pairwise((0, 1, 3), (1, 4), ("bf16", "fp16"), always=[(1, 1, "fp16")]),
        always=[(1, 1, "fp16")],
    ),
)
def test_low_precision(ranks: Pools, precision: str, zero: int, micro_batches: int) -> None:
    """Compute in 16 bits; masters, sums of gradients and optimizer state in 32."""
    ranks(2).run(computes_in_low_precision, precision, zero, micro_batches)


def computes_in_low_precision(precision: str, zero: int, micro_batches: int) -> None:
    """Job: against torch.compile over ``shard(param_dtype=…)``, whose parity has its own tests."""
    example = EXAMPLES["mlp"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scale = 1.0 if precision == "bf16" else 2.0**16

    def prepared(**dtypes: Any) -> tuple[nn.Module, Optimizer]:
        model = fxzero.shard(build(example, torch.float32), zero=zero, **dtypes)
        return model, torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)

    model, optimizer = prepared()
    options = {"lower_regions": {"backend": "eager"}}
    wanted = fxzero.Precision(dtype, reduce_dtype=torch.float32)
    step = fxzero.compile_step(
        WithLoss(model, example.loss),
        optimizer,
        micro_batches=micro_batches,
        precision=wanted,
        options=options,
    )
    other, other_optimizer = prepared(param_dtype=dtype, reduce_dtype=torch.float32)
    compiled = torch.compile(WithLoss(other, example.loss), backend="fxzero", options=options)
    for batch in batches(example, torch.float32, steps=5):
        mine = rows_of_rank(batch)
        losses = []
        for part in range(micro_batches):
            rows = {name: value.chunk(micro_batches)[part] for name, value in mine.items()}
            last = part == micro_batches - 1
            with nullcontext() if last or zero == 3 else fxzero.no_sync(other):
                loss = compiled(**rows)
            (loss * (scale / micro_batches)).backward()
            losses.append(loss.detach())
        for parameter in other.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / scale)
        other_optimizer.step()
        other_optimizer.zero_grad()
        out = step(**mine)
        assert torch.equal(out.loss, torch.stack(losses).mean() if len(losses) > 1 else losses[0])
        assert not out.skipped
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert_same(full_parameters(model), full_parameters(other), rtol=0)


@pytest.mark.parametrize("zero", [0, 3, *exhaustive(1, 2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Pools, zero: int) -> None:
    """Nothing changes, the scale halves as told, and training goes on."""
    ranks(2).run(skips_an_overflow, zero)


def skips_an_overflow(zero: int) -> None:
    """Job: rank 1's second batch overflows."""
    example = EXAMPLES["convnet"]
    model = fxzero.shard(build(example, torch.float32), zero=zero)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    schedule = warm_up(optimizer)
    precision = fxzero.Precision(torch.float16, hysteresis=1, initial_scale_power=8)
    step = fxzero.compile_step(
        WithLoss(model, example.loss),
        optimizer,
        precision=precision,
        scheduler=schedule,
        options={"lower_regions": {"backend": "eager"}},
    )
    assert step.loss_scale is not None
    for i, batch in enumerate(batches(example, torch.float32, steps=4)):
        mine = rows_of_rank(batch)
        bad = i == 1
        if bad and dist.get_rank() == 1:
            mine = {**mine, "y": torch.full_like(mine["y"], 6e4)}
        before = copy.deepcopy(_everything(model, optimizer))
        rate, scale = schedule.get_last_lr(), step.loss_scale.value
        out = step(**mine)
        assert out.skipped == bad
        assert step.loss_scale.value == (scale / 2 if bad else scale)
        assert (schedule.get_last_lr() == rate) == bad
        after = _everything(model, optimizer)
        if i > 0:  # the first step makes the optimizer's state
            same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert all(same) == bad


def _everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """All tensors that training changes, as this rank has them."""
    state = [v for values in optimizer.state.values() for v in values.values()]
    tensors = [*model.parameters(), *model.buffers(), *state]
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return [t.detach().clone() for t in local]


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 3])
def test_going_on_from_a_checkpoint_is_bitwise_the_same(
    ranks: Pools, tmp_path: Any, zero: int
) -> None:
    """Save in the middle in one set of processes, load in another, compare at the end."""
    expected = ranks(2).run(save_in_the_middle, zero, str(tmp_path))
    ranks(2).close()
    actual = ranks(2).run(go_on_to_the_end, zero, str(tmp_path))
    for mine, theirs in zip(actual, expected, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _prepared(zero: int) -> tuple[nn.Module, Optimizer, LambdaLR, Any]:
    example = EXAMPLES["gpt"]
    model = fxzero.shard(build(example, torch.float32), zero=zero)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    schedule = warm_up(optimizer)
    step = fxzero.compile_step(
        WithLoss(model, example.loss),
        optimizer,
        clip_grad_norm=0.1,
        scheduler=schedule,
        options={"lower_regions": {"backend": "eager"}},
    )
    return model, optimizer, schedule, step


def save_in_the_middle(zero: int, folder: str) -> list[Tensor]:
    """Job: all steps, with a checkpoint in their middle."""
    model, optimizer, schedule, step = _prepared(zero)
    for i, batch in enumerate(batches(EXAMPLES["gpt"], torch.float32)):
        if i == STEPS // 2:
            state = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
                "schedule": schedule.state_dict(),
            }
            state["schedule"].pop("lr_lambdas")
            dcp.save(state, checkpoint_id=folder)
        step(**rows_of_rank(batch))
    return _everything(model, optimizer)


def go_on_to_the_end(zero: int, folder: str) -> list[Tensor]:
    """Job: load what `save_in_the_middle` saved, and run the steps after it."""
    model, optimizer, schedule, step = _prepared(zero)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    schedule_state = schedule.state_dict()
    schedule_state.pop("lr_lambdas")
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "schedule": schedule_state,
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    schedule.load_state_dict({**state["schedule"], "lr_lambdas": [None, None]})
    for batch in list(batches(EXAMPLES["gpt"], torch.float32))[STEPS // 2 :]:
        step(**rows_of_rank(batch))
    return _everything(model, optimizer)
