"""Models as pipelines: stages of graphs that nobody made for it, and what schedules come to."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import fxzero
from examples.models import gpt_bench, gpt_nano
from fxzero.cli.app import app
from fxzero.compiler.compilation import Compilation
from fxzero.errors import ConfigError
from fxzero.inspect.find_stages import find_holders
from fxzero.inspect.pipeline import MicroStep, PipelineReport, as_pipeline, micro_step_of, under
from fxzero.inspect.trace import pipeline_trace
from fxzero.inspect.zero_inside import ZeroInside
from fxzero.pipeline.schedules import table_of
from fxzero.pipeline.tables import TABLES, Action, Work
from fxzero.schedule.simulate import simulate_memory
from fxzero.schedule.stage_operators import Operators
from fxzero.schedule.stages import Order
from fxzero.sharding.pipeline import StagesWanted
from tests.parity.harness import Pools
from tests.stepping import chain_of
from tests.tiers import exhaustive
from tests.tracing import observed

OPTIONS = {"lower_regions": {"backend": "eager"}, "cost": {"cluster": "dgx_h100"}}
"""Links that are fast enough for pipelines of small models."""


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Eight layers with an embedding that is the head's too."""
    model = gpt_bench(num_layers=8, hidden=64, num_heads=4, block_size=32, vocab_size=128)
    return model, model.example_inputs(8)


chain = chain_of(8, 64, 8)
"""Where it does not matter what a layer does: it takes a third of the time."""


class UNet(nn.Module):
    """What goes down is read again on the way up."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(512, 512) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(512, 512) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 512) to a scalar."""
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        for layer in self.up:
            x = layer(x + kept.pop()).relu()
        return x.square().mean()


def unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """With a batch."""
    return UNet(), (torch.randn(1024, 512),)


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """An encoder and a decoder that reads it in every layer, of T5-small's shape, less wide."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=6,
        num_decoder_layers=6,
        d_model=64,
        d_ff=256,
        num_heads=4,
        d_kv=16,
        vocab_size=512,
        decoder_start_token_id=0,
    )
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


@functools.cache
def micro_step(build: Callable[[], Any], world_size: int) -> MicroStep:
    """A model's graph, four micro-batches a step."""
    zero = 3 if world_size > 1 else 0
    return micro_step_of(build, micro_batches=4, world_size=world_size, zero=zero, options=OPTIONS)


def report(
    build: Callable[[], Any], num_ranks: int = 4, schedule: str = "1f1b", world_size: int = 1
) -> PipelineReport:
    """Cut into stages."""
    table = table_of(schedule, num_ranks, 4)
    return as_pipeline(micro_step(build, world_size), table)


@pytest.mark.parametrize("build", [gpt, unet, *exhaustive(t5)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_parameter_is_in_a_stage(build: Callable[[], Any], num_ranks: int) -> None:
    """Once, but for those that several read, whose names are told."""
    found = report(build, num_ranks).found
    model = build()[0]
    every = sum(p.numel() for p in model.parameters())
    shared = {name: p.numel() for name, p in model.named_parameters() if name in found.shared}
    held = sum(stage.num_parameters for stage in found.stages)
    assert every <= held <= every + (num_ranks - 1) * sum(shared.values())
    assert bool(shared) == (held > every)


@pytest.mark.exhaustive
def test_t5_in_four_stages_is_even() -> None:
    """The slowest takes at most a tenth more than the mean."""
    found = report(t5).found
    assert found.imbalance <= 1.10
    assert found.shared == ("shared.weight",)
    assert any(stage.repeated > 10 for stage in found.stages)  # masks and positions


def test_what_is_read_later_travels_through_all_stages_between() -> None:
    """The U's first value is read last."""
    found = report(unet).found
    row = 1024 // 4 * 512 * 4
    assert [crossing.num_bytes // row for crossing in found.crossings] == [2, 4, 2]
    assert all(c.gradient_bytes == c.num_bytes for c in found.crossings)


def test_a_chain_is_cut_where_little_crosses() -> None:
    """In a GPT the batch's rows, for one micro-batch, and within a block what is added to them:
    queries, keys and values at most."""
    found = report(gpt).found
    rows_bytes = 2 * 32 * 64 * 4
    assert all(crossing.num_bytes <= 4 * rows_bytes for crossing in found.crossings)
    assert found.imbalance < 1.1


def test_the_first_stage_computes_no_gradient_of_its_input() -> None:
    """Nobody waits for it; every other one's is waited for."""
    stages = report(gpt).found.stages
    assert stages[0].input_us == 0
    assert all(stage.input_us > 0 and stage.weight_us > 0 for stage in stages[1:])


@pytest.mark.parametrize("schedule", sorted(TABLES))
def test_every_schedule(schedule: str) -> None:
    """Takes what all stages take and more, in the time of the slowest rank or more."""
    found = report(gpt, 2, schedule)
    work = sum(stage.us for stage in found.found.stages)
    assert found.step_us > 4 * work / 2
    assert all(0 < idle < 1 for idle in found.idle_shares)
    assert len(found.rank_of) == len(found.found.stages) == 2 * (2 if len(found.rank_of) > 2 else 1)
    assert found.picture.count("\n") == 1


def test_fewer_in_flight_hold_less() -> None:
    """1F1B against GPipe, whose ranks hold all four."""
    early, late = report(gpt, 4, "1f1b"), report(gpt, 4, "gpipe")
    assert early.in_flight == (4, 3, 2, 1)
    assert late.in_flight == (4, 4, 4, 4)
    assert early.peak_bytes[0] == late.peak_bytes[0]
    assert early.peak_bytes[3] < late.peak_bytes[3]


def test_stages_within_a_budget() -> None:
    """The first of four has four micro-steps in flight: it is given less of the model."""
    step = micro_step(gpt, 1)
    table = table_of("1f1b", 4, 16)
    free = as_pipeline(step, table)
    budget_bytes = int(0.8 * max(free.peak_bytes))
    bound = as_pipeline(replace(step, budget_bytes=budget_bytes), table)
    for kinds in bound.bytes_by_kind:  # temporaries come on top, as what is on its way does
        assert sum(kinds.values()) - kinds["workspace"] <= budget_bytes
    assert bound.found.stages[0].num_operators < free.found.stages[0].num_operators
    assert bound.step_us > free.step_us


def test_what_is_saved_may_be_repeated_instead() -> None:
    """A budget with room for what training holds, and for little else, is kept by a step that
    repeats; one with less is not."""
    step = micro_step(gpt, 1)
    table = table_of("1f1b", 4, 16)
    states = [4 * stage.parameter_bytes for stage in as_pipeline(step, table).found.stages]
    tight = as_pipeline(replace(step, budget_bytes=max(states)), table)
    assert max(4 * stage.parameter_bytes for stage in tight.found.stages) <= max(states)
    with pytest.raises(ConfigError, match=r"no 4 stages .* bytes or less each: .* take more"):
        as_pipeline(replace(step, budget_bytes=max(states) // 4), table)


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (3, 4)])
def test_a_model_is_sharded_within_a_budget(zero: int, shards: int) -> None:
    """Stages of equal time would not fit; where each is sharded they do."""
    model = gpt_bench(num_layers=4, hidden=64, num_heads=4, block_size=32)
    batch = model.example_inputs(2)
    free = find_holders(model, batch, StagesWanted("1f1b", 2, zero, shards, None))
    saved = find_holders(model, batch, StagesWanted("1f1b", 2, zero, shards, "2.2MiB"))
    counts = [
        sum(p.numel() for name, p in model.named_parameters() if 0 in held[name])
        for held in (free, saved)
    ]
    assert (counts[0] == counts[1]) == (zero == 3), counts
    with pytest.raises(ConfigError, match="no 2 stages"):
        find_holders(model, batch, StagesWanted("1f1b", 2, 0, 1, "300KiB"))


class Normed(nn.Module):
    """Batch norms, which the compiler takes apart and torch's own kernels do not."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.h, self.norm, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return x.pow(2).mean()


def test_no_operator_is_cut() -> None:
    """Its parameters are of one stage, however a step lowers it."""
    step = micro_step_of(
        lambda: (Normed(), (torch.randn(8, 16),)), micro_batches=1, world_size=1, zero=0
    )
    order = Order(Operators(step.graph, step.costs))
    _, ends = order.positions(4.0)
    parts = [
        (str(op.node.meta.get("original_aten")), op.node.meta.get("seq_nr")) for op in order.own
    ]
    assert len(parts) > 2 * len({*parts})  # they are taken apart
    assert len(ends) > 10
    for end in ends[1:-1]:
        assert not {*parts[:end]} & {*parts[end:]}, parts[end]


def test_shards_of_a_stage() -> None:
    """Two ranks a stage hold half of its parameters each."""
    for world_size in (1, 2):
        for stage in report(chain, world_size=world_size).found.stages:
            whole = 4 * stage.num_parameters
            assert stage.parameter_bytes == pytest.approx(whole / world_size, rel=0.02)


def test_zero_inside_of_stages_takes_time_and_memory() -> None:
    """Over a link that nothing hides: gathers of each micro-step at stage 3, reduces of each at 2,
    one of both at 1. What is whole at 0 and 1 is counted whole."""
    options = {**OPTIONS, "cost": {"cluster": "pair_1gbit"}}
    found, step_us = {}, {}
    for zero in range(4):
        step = micro_step_of(chain, micro_batches=4, world_size=2, zero=zero, options=options)
        found[zero] = as_pipeline(step, table_of("1f1b", 2, 4))
        step_us[zero] = found[zero].step_us
        inside = ZeroInside.of(step.capture, step.costs)
        states = {0: 4.0, 1: 2 + 3 / 2, 2: 1 + 4 / 2, 3: 4 / 2}[zero]
        assert inside.states == states * (2 if zero else 1)
        for place, stage in enumerate(found[zero].found.stages):
            full = 4 * stage.num_parameters
            on_way = 2 * min(inside.bucket_bytes, full) if zero >= 2 else 0
            on_way += min(3 * inside.bucket_bytes, full) if zero == 3 else 0
            kinds = found[zero].bytes_by_kind[place]
            assert kinds["activations"] == found[zero].in_flight[place] * stage.saved_bytes
            held = found[zero].peak_bytes[place] - kinds["activations"] - kinds["workspace"]
            assert held == pytest.approx(states * full + on_way, rel=0.02), (zero, place)
        stages = found[zero].found.stages
        moves_us = inside.beside(lambda action: 0.0, stages, table_of("1f1b", 2, 4))
        share = stages[1].num_parameters / inside.num_parameters
        gather_us, reduce_us = (
            share * inside.gather.cost.wire_us,
            share * inside.reduce.cost.wire_us,
        )
        for micro_step in range(4):
            first, last = micro_step == 0, micro_step == 3
            gathers = {0: 0, 1: first, 2: first, 3: 1}[zero], {3: 1}.get(zero, 0)
            reduces = 1 if zero >= 2 else last
            forward, backward = (
                moves_us(Action(1, work, micro_step)) for work in (Work.FORWARD, Work.BACKWARD)
            )
            assert forward == pytest.approx(gathers[0] * gather_us)
            assert backward == pytest.approx(gathers[1] * gather_us + reduces * reduce_us)
    assert step_us[3] > step_us[2] > step_us[1]
    assert step_us[1] == pytest.approx(step_us[0], rel=0.2)
    wire_us = {zero: step_us[zero] - step_us[1] for zero in (2, 3)}
    assert wire_us[3] > 1.5 * wire_us[2]


def test_a_trace_has_all_ranks() -> None:
    """A row each, on which actions follow each other as the replay says."""
    found = report(gpt, 2, "1f1b")
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in pipeline_trace(found.replayed, number=1):
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append(event)
    assert [len(rows[rank]) for rank in (0, 1)] == [8, 8]
    for row in rows.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] * (1 + 1e-9) for a, b in pairwise(row))
    assert max(e["ts"] + e["dur"] for row in rows.values() for e in row) == found.step_us


def test_the_fastest_schedule() -> None:
    """Of all, those with two stages on a rank too."""
    found = under("auto", micro_step(chain, 1), 2, 4)
    assert found.step_us == min(report(chain, 2, name).step_us for name in TABLES)


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    """As a file; another one's numbers are refused."""
    path = tmp_path / "mine.csv"
    TABLES["zb_h1"](2, 4).write(path)
    mine, theirs = report(gpt, 2, str(path)), report(gpt, 2, "zb_h1")
    assert mine.step_us == theirs.step_us
    with pytest.raises(ConfigError, match="is for 2 ranks and 4 micro-batches, and there are 3"):
        report(gpt, 3, str(path))


def test_what_cannot_be() -> None:
    """A sentence each, before anything is compiled where that can be."""
    with pytest.raises(ConfigError, match=r"schedule='1f2b': did you mean '1f1b'.*x\.csv"):
        report(gpt, 2, "1f2b")
    with pytest.raises(ConfigError, match=r"200 stages: the graph has .* Take fewer stages"):
        report(unet, 200)


COMMAND = "inspect examples.models:gpt_nano --step --micro-batches 4 --mesh 2x2".split()


def test_the_command() -> None:
    """Shows stages and schedule, and the same as JSON."""
    text = CliRunner().invoke(app, [*COMMAND, "--schedule", "zb_h1"], catch_exceptions=False)
    assert text.exit_code == 0, text.output
    assert "held by several stages: tokens.weight" in text.output
    assert "rank 1: idle" in text.output
    assert "\nrank 1 |" in text.output
    found = CliRunner().invoke(app, [*COMMAND, "--json"], catch_exceptions=False)
    data = json.loads(found.output)["pipeline"]
    assert data["schedule"] == "1f1b"
    assert sum(s["num_parameters"] for s in data["found"]["stages"]) > 842_496
    assert data["imbalance"] < 1.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh 2x2", "--mesh has a meaning only with --step"),
        ("--step --schedule zbv", "--schedule has a meaning only with --mesh"),
        ("--step --mesh 2", "--mesh 2: write pipeline ranks x ranks of each stage, as in 4x2"),
        ("--step --mesh 2x2 --world-size 16", "--mesh 2x2 has 4 ranks, --world-size 16"),
        ("--step --mesh 2x2 --rank 3", "rank 3 is not in a world of 2 ranks"),
    ],
)
def test_wrong_use_of_the_command(arguments: str, message: str) -> None:
    """Exit code 2, and a sentence."""
    command = ["inspect", "examples.models:gpt_nano", *arguments.split()]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 2
    assert message in found.output


def test_gpt_nano_has_the_parameters_that_are_said() -> None:
    """Of the command's test."""
    assert sum(p.numel() for p in gpt_nano().parameters()) == 842_496


@pytest.mark.exhaustive
def test_a_trillion_parameters_on_a_thousand_ranks() -> None:
    """Decided and simulated in one process, in less than three minutes and six GiB."""
    arguments = "--step --micro-batches 64 --batch-size 64 --mesh 16x64 --cluster dgx_h100"
    command = ["inspect", "examples.models:gpt_1t", *arguments.split(), "--json"]
    begin_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fxzero", *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    data = json.loads(process.stdout.read())["pipeline"]
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    assert time.perf_counter() - begin_s < 180
    assert usage.ru_maxrss * 1024 < 6 << 30
    assert (data["num_ranks"], len(data["found"]["stages"])) == (16, 16)
    assert data["imbalance"] < 1.1
    assert sum(stage["num_parameters"] for stage in data["found"]["stages"]) > 1e12


BY_DEFAULT = {"lower_regions": OPTIONS["lower_regions"]}
"""By the costs that `fxzero.shard` cuts stages by."""


def peak_of_a_rank(schedule: str) -> int:
    """Job: the simulated peak of this rank's own step, as it is compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    model, (inputs, targets) = wide_gpt()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline",))
    fxzero.shard(model, 0, mesh=mesh, example_inputs=(inputs[:4], targets[:4]), schedule=schedule)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {**BY_DEFAULT, "gather_ahead": {"enabled": False}}
    step = fxzero.compile_step(model, optimizer, micro_batches=4, options=options)
    with observed(keep):
        step(inputs, targets)
    assert found[-1].joint is not None
    return simulate_memory(found[-1].joint, fuses=False).peak_bytes


def wide_gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A GPT of which activations and temporaries are most, and four micro-batches."""
    model = gpt_bench(num_layers=4, hidden=128, num_heads=4, block_size=128)
    return model, model.example_inputs(16)


@pytest.mark.parametrize("schedule", ["1f1b", *exhaustive("interleaved", "zb_h1")])
def test_peaks_are_those_of_the_ranks_own_steps(ranks: Pools, schedule: str) -> None:
    """Of stages that exist in name alone: temporaries and messages among them."""
    measured = ranks(2).run(peak_of_a_rank, schedule)
    step = micro_step_of(wide_gpt, micro_batches=4, world_size=1, zero=0, options=BY_DEFAULT)
    report = under(schedule, step, 2, 4)
    assert list(report.peak_bytes) == pytest.approx(measured, rel=0.06)
    assert min(kinds["workspace"] for kinds in report.bytes_by_kind) > 1 << 20


class Deep(nn.Module):
    """Layers with a loss behind each: of so small ones a loss takes as long as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(B, 6), (B, 1) to a loss."""
        loss = x.new_zeros(())
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x).tanh()
            loss = loss + nn.functional.mse_loss(head(x), y)
        return loss


@pytest.mark.parametrize("num_stages", [2, 4])
def test_no_stage_is_without_a_parameter(num_stages: int) -> None:
    """Where there are enough layers: it was refused, as a stage had the last loss alone."""
    batch = torch.randn(2, 6), torch.randn(2, 1)
    found = find_holders(Deep(), batch, StagesWanted("1f1b", num_stages, 0, 1, None))
    assert {stage for held in found.values() for stage in held} == set(range(num_stages))
    assert all(len(held) == 1 for held in found.values())
