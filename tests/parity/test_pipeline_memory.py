"""Stages of a pipeline within a memory budget, and with what they hold on the host or on disk."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from examples.benchmarks.measure import allocated_peak_bytes
from examples.models import gpt_bench
from fxzero.compiler.compilation import Compilation
from fxzero.cost import FixedCosts
from fxzero.errors import BatchError, ConfigError, RanksDisagreeError
from fxzero.graph import Lane
from fxzero.schedule.simulate import simulate_memory
from tests.parity.harness import Pools
from tests.parity.test_pipeline import Case, in_stages
from tests.tiers import exhaustive
from tests.tracing import observed

SLACK = 16 << 10
"""Bytes that may be measured above a budget: saved tensors below 4 KiB."""
EAGER = {"lower_regions": {"backend": "eager"}, "gather_ahead": {"enabled": False}}


SELDOM = mock.patch.dict(os.environ, FXZERO_VERIFY="ends")
"""To verify every level that is tried takes long."""


@dataclass(frozen=True)
class Small:
    """A GPT in two stages of one layer each."""

    schedule: str = "1f1b"
    zero: int = 0
    micro_batches: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> tuple[Callable[[], Tensor], nn.Module, torch.optim.Optimizer]:
        """A step, which trains on the same batch again and again; its model and optimizer."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = gpt_bench(num_layers=2, hidden=64, num_heads=4, block_size=64)
        batch = model.example_inputs(8)
        shape = (2,) if dist.get_world_size() == 2 else (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "shard")[: len(shape)])
        stages: dict[str, Any] = {"positions": 0, "blocks.0": 0, "blocks.1": 1, "norm": 1}
        if self.schedule == "interleaved":
            stages = {"positions": 0, "blocks.0": 1, "blocks.1": 2, "norm": 3}
        stages["tokens"] = (0, max(stages.values()))
        fxzero.shard(model, self.zero, mesh=mesh, stages=stages, schedule=self.schedule)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = fxzero.compile_step(
            model,
            optimizer,
            micro_batches=self.micro_batches,
            options={**EAGER, **self.options},
        )
        return lambda: step(*batch).loss, model, optimizer

    def but(self, **options: Any) -> Small:
        """The same with other options."""
        return replace(self, options={**self.options, **options})


@dataclass
class Trained:
    """What two steps came to on this rank, and what a third took."""

    values: list[Tensor]
    simulated_bytes: int
    measured_bytes: int


def trained(small: Small) -> Trained:
    step, model, optimizer = small.make()
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    with observed(keep):
        losses = [step().clone() for _ in range(2)]
    graph = found[-1].joint
    assert graph is not None
    memory = simulate_memory(graph, fuses=False)
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    parts = [getattr(t, "_local_tensor", t).detach().clone() for t in tensors]
    measured = min(allocated_peak_bytes(step) for _ in range(2)) + memory.resident_bytes
    return Trained([*losses, *parts], memory.peak_bytes, measured)


def within_budgets(small: Small) -> list[str]:
    """Job: train without a budget, with the least, and with one between; what was wrong."""
    torch.set_num_threads(1)
    with SELDOM:
        return _within_budgets(small)


def _within_budgets(small: Small) -> list[str]:
    free = trained(small)
    with pytest.raises(ConfigError, match="is the least that was found") as caught:
        trained(small.but(memory_budget=1))
    (least,) = map(int, re.findall(r"\((\d+) bytes\) is the least", str(caught.value)))
    wrong = []
    has_several_in_flight = dist.get_rank() < dist.get_world_size() // 2
    if not least < (0.9 if has_several_in_flight else 1.0) * free.simulated_bytes:
        wrong.append(f"the least is {least} of {free.simulated_bytes}")
    for budget in ((least + free.simulated_bytes) // 2, least):
        found = trained(small.but(memory_budget=budget))
        if not all(map(torch.equal, found.values, free.values)):
            wrong.append(f"{budget}: other numbers")
        if found.simulated_bytes > budget:
            wrong.append(f"{budget}: {found.simulated_bytes} bytes were simulated")
        if found.measured_bytes > budget + SLACK:
            wrong.append(f"{budget}: {found.measured_bytes} bytes were measured")
    return wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["zb_h1", "1f1b"])
@pytest.mark.parametrize("world", [2])
def test_each_stage_fits_its_budget(world: int, schedule: str, ranks: Pools) -> None:
    """Each with as many micro-steps in flight as it has: the first one repeats more."""
    assert ranks(world).run(within_budgets, Small(schedule)) == [[], []]


@pytest.mark.parametrize("world", exhaustive(4))
def test_with_parameters_that_are_gathered(world: int, ranks: Pools) -> None:
    assert ranks(world).run(within_budgets, Small("interleaved", zero=3)) == [[]] * 4


def with_too_little() -> tuple[str, float]:
    """Job: the message of a budget in which the first stage does not fit, and a step without."""
    small = Small(micro_batches=2)
    least = []
    for budget in (1, None):
        if budget is None:  # between the two
            every: list[Any] = [None] * 2
            dist.all_gather_object(every, least[0])
            budget = (every[0] + every[1]) // 2
        step, *_ = small.but(memory_budget=budget).make()
        with pytest.raises((ConfigError, RanksDisagreeError)) as caught, SELDOM:
            step()
        least += map(int, re.findall(r"\((\d+) bytes\) is the least", str(caught.value))[:1])
    step, *_ = small.make()
    return f"{caught.type.__name__}: {caught.value}", float(step())


@pytest.mark.parametrize("world", [2])
def test_a_stage_that_does_not_fit_stops_all(world: int, ranks: Pools) -> None:
    """At once: nobody waits for it; and what comes next meets as if nothing had been."""
    (one, loss), (other, same) = ranks(world).run(with_too_little)
    assert loss == same
    said = sorted([one, other])
    assert said[0].startswith("RanksDisagreeError"), said
    assert "others could not compile theirs" in said[0]
    assert "is the least that was found" in said[0]
    assert said[1].startswith("TooSmallError"), said


def failing(rank: int) -> tuple[list[str], float]:
    """Job: what ranks say of a compiler that fails on one of them, twice, and a step after it."""
    step, *_ = Small().make()
    fails = mock.patch("fxzero.step.train_step.compile_graph", side_effect=RuntimeError("no disk"))
    said = []
    with fails if dist.get_rank() == rank else contextlib.nullcontext():
        for _ in range(2):
            with pytest.raises(Exception, match="no disk") as caught:
                step()
            said.append(caught.type.__name__)
    return said, float(step())


@pytest.mark.parametrize("rank", [0, *exhaustive(1)])
@pytest.mark.parametrize("world", [2])
def test_a_rank_that_fails_alone(world: int, rank: int, ranks: Pools) -> None:
    """The others say what it has said, each time; then the same step trains."""
    answers = ranks(world).run(failing, rank)
    assert answers[rank][0] == ["BackendCompilerFailed"] * 2
    assert answers[1 - rank][0] == ["RanksDisagreeError"] * 2
    assert answers[0][1] == answers[1][1]


def without_a_batch(rank: int) -> tuple[str, float]:
    """Job: what ranks say of a first batch that one of them does not take, and a step after it."""
    step, model, _ = Small().make()
    tokens, targets = model.example_inputs(8)  # type: ignore[operator]
    compiled = inspect.getclosurevars(step).nonlocals["step"]
    rows = 7 if dist.get_rank() == rank else 8
    with pytest.raises((BatchError, RanksDisagreeError)) as caught:
        compiled(tokens[:rows], targets[:rows])
    return f"{caught.type.__name__}: {caught.value}", float(step())


@pytest.mark.parametrize("world", [2])
def test_a_rank_that_does_not_take_its_first_batch(world: int, ranks: Pools) -> None:
    (said, loss), (other, same) = ranks(world).run(without_a_batch, 1)
    assert said.startswith("RanksDisagreeError: rank 1 of this pipeline does not begin its step")
    assert other.startswith("BatchError")
    assert loss == same


QUICK = FixedCosts(compute=10.0, latency_us=1.0)
"""Copies that take less than any operator: all that is saved may go."""
VALUES = {"offload_activations": {"share": 1.0, "min_bytes": 1}}


def held_elsewhere(case: Case) -> list[int]:
    """Job: parity, as in any case of stages; copies of saved values that went to the host."""
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    quick = mock.patch("fxzero.cost.settings.CostSettings.make", return_value=QUICK)
    with observed(keep), quick:
        in_stages(case)
    graph = found[-1].joint
    assert graph is not None
    made = (t for t in graph.transfers(name=Lane.D2H.value))
    return [t.stamp.micro_step for t in made if t.stamp.made_by == "offload_activations"]


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case(schedule="zb_h1", clip=0.1, options={"memory": "all_host", **VALUES})),
        (2, Case("added", options={"memory": "infinity", **VALUES})),
        *exhaustive(
            (4, Case(schedule="interleaved", zero=3, options={"memory": "infinity", **VALUES})),
            (2, Case(schedule="gpipe", options=VALUES)),
            (2, Case(schedule="zbv", options={"memory": "l2l", **VALUES})),
            (2, Case("conv", options={"memory": "all_host", **VALUES})),
            (2, Case("t5", clip=0.1, options={"memory": "states_host", **VALUES})),
            (2, Case("unet", frozen="d", options={"memory": "all_host", **VALUES})),
            (4, Case(places=4, options={"memory": "infinity", **VALUES})),
            (4, Case(zero=1, inner="replicate", options={"memory": "all_host", **VALUES})),
        ),
    ],
)
def test_what_stages_hold_elsewhere(world: int, case: Case, ranks: Pools) -> None:
    """Copies of several micro-steps are on the host at once."""
    moved = ranks(world).run(held_elsewhere, case)
    assert {*range(case.micro_batches)} <= {step for rank in moved for step in rank}


class Inside(nn.Module):
    """The activations of one layer overflow where its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h[:3]:
            x = torch.tanh(layer(x))
        return (self.h[3](x) * 4.0).pow(2).mean()


def half_precision(options: Mapping[str, Any]) -> list[float]:
    """Job: eight steps in fp16 in stages, as they would be in one process; the scales."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Inside()
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline",))
    fxzero.shard(model, mesh=mesh, stages={f"h.{i}": i // 2 for i in range(4)})
    precision = fxzero.Precision(torch.float16, torch.float32, hysteresis=1, initial_scale_power=19)
    scales = []
    steps = []
    for each, more in ((model, options), (alone, {})):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
        steps.append(
            fxzero.compile_step(
                each,
                optimizer,
                micro_batches=4,
                clip_grad_norm=0.1,
                precision=precision,
                options={**EAGER, **more},
            )
        )
    for number in range(8):
        batch = torch.randn(16, 16, generator=torch.Generator().manual_seed(number))
        mine, theirs = (step(batch) for step in steps)
        assert mine.skipped == theirs.skipped
        assert torch.equal(mine.loss, theirs.loss)
        assert [step.loss_scale.value for step in steps].count(steps[0].loss_scale.value) == 2
        scales.append(steps[0].loss_scale.value)
        for (name, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            part, whole = (getattr(t, "_local_tensor", t) for t in (own, other))
            if part.numel():
                assert torch.allclose(part, whole, rtol=1e-5, atol=1e-6), name
    return scales


@pytest.mark.parametrize("options", [{"memory": "all_host"}, *exhaustive({})])
@pytest.mark.parametrize("world", [2])
def test_what_overflows_in_one_stage_is_skipped_by_all(
    world: int, options: Mapping[str, Any], ranks: Pools
) -> None:
    """Gradients that do not fit fp16 under the first scales; then they do, and are clipped."""
    scales, others = ranks(world).run(half_precision, options)
    assert scales == others
    assert scales[-1] < scales[0] < 2.0**19
    assert scales[-1] == scales[-2]
