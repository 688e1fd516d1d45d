"""`fxzero estimate`: sums done by hand, peaks that torch allocates, formulas of others."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import fxzero
from examples.benchmarks.measure import allocated_peak_bytes
from examples.models import gpt_bench
from fxzero.cli.app import app
from fxzero.cli.tables import print_estimate
from fxzero.cost.cluster import load_cluster
from fxzero.errors import CaptureError, ConfigError, FxZeroWarning
from fxzero.inspect.estimate import estimate
from fxzero.inspect.estimate_rows import Estimate, MeshEstimate, PipelineEstimate, StageEstimate
from fxzero.inspect.formulas import deepspeed_rows, paper_bytes
from fxzero.inspect.targets import Target, load
from tests.parity.harness import Pools
from tests.stepping import chain_of
from tests.tiers import exhaustive

LIMIT = 0.002
"""How far off an estimated peak may be: by some hundred bytes of numbers that torch allocates."""


def call(*arguments: str) -> Result:
    """Run the command, wide enough not to wrap."""
    return CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "200"})


def of(build: Callable[[], Any], **settings: Any) -> Estimate:
    """The estimate of a function's model."""
    return estimate(Target("here", build), **settings)


@pytest.mark.exhaustive
def test_a_trillion_parameters_on_a_thousand_ranks() -> None:
    """A shallow one of the same width: model states are 16 P/N to the byte, and every rank sends
    up to 3 P in stage 3: two gathers and a reduce, of two bytes each."""
    target = load("gpt-1t")

    def shallow() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"n_layer": 2, "n_embd": 25600, "n_head": 160, "vocab_size": 51200}
        return GPT2LMHeadModel(GPT2Config(**shape, n_positions=2048, resid_pdrop=0, embd_pdrop=0))

    assert target.param_dtype is torch.bfloat16
    assert target.seq_len == 2048
    found = of(shallow, world_size=1024, stages=[3], param_dtype=torch.bfloat16)
    (stage,) = found.stages.values()
    p = found.num_parameters
    assert stage.model_state_bytes == 16 * p // 1024
    assert (stage.states.parameter_bytes, stage.states.optimizer_bytes) == (p // 256, p // 128)
    # Some parameters are kept from forward to backward: one gather of them less.
    others = 1023 / 1024
    assert (2 + 2) * p * others <= stage.traffic_bytes <= (2 + 2 + 2) * p * others + 64


def test_stages_in_parameters() -> None:
    """What the module's table says, in both precisions, of dimensions that divide."""
    p, n = 3 * 64 * 64, 8
    for dtype, sums in (
        (None, {0: 16 * p, 1: 8 * p + 12 * p // n, 2: 4 * p + 16 * p // n, 3: 16 * p // n}),
        (
            torch.bfloat16,
            {0: 16 * p, 1: 4 * p + 12 * p // n, 2: 2 * p + 16 * p // n, 3: 16 * p // n},
        ),
    ):
        found = of(chain_of(3, 64), world_size=n, param_dtype=dtype, cluster="laptop")
        assert {z: s.model_state_bytes for z, s in found.stages.items()} == sums


def test_frozen_parameters_have_no_gradient_and_no_moments() -> None:
    """A model of which half is trained."""

    def build() -> Any:
        model, batch = chain_of(2, 64)()
        next(model.parameters()).requires_grad_(False)
        return model, batch

    found = of(build, world_size=8, stages=[3])
    states = found.stages[3].states
    part = 64 * 64 * 4 // 8
    assert states.parameter_bytes == 2 * part
    assert (states.gradient_bytes, states.optimizer_bytes) == (part, 2 * part)


class _Tower(nn.Module):
    """A part that this forward does not read, frozen or not: ranks hold it all the same."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.read = nn.Linear(96, 96)
        self.tower = nn.Linear(96, 1000, bias=False).requires_grad_(trained)
        self.again = self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        """(B, 96) → scalar."""
        return self.read(x).square().mean()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_forward_does_not_read_is_held(zero: int, trained: bool) -> None:
    """No gradient and no moments of it; its part at each stage that shares anything."""
    found = of(lambda: (_Tower(trained), torch.randn(2, 96)), world_size=2, stages=[zero])
    stage = found.stages[zero]
    ranks = 2 if zero else 1
    read, tower = 4 * (96 * 96 + 96), 4 * 96 * 1000 // ranks
    held = read // ranks + tower
    assert stage.states.parameter_bytes == held + (read if zero == 1 else 0)
    assert stage.states.optimizer_bytes == 2 * read // ranks
    assert stage.bytes_by_kind["parameters"] == held
    assert stage.peak_bytes == sum(stage.bytes_by_kind.values())


def test_blocks_of_a_matrix_are_no_more_states() -> None:
    """Of a matrix that is gathered by columns its parts are counted once."""
    build = lambda: (nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)), torch.randn(4, 64))  # noqa: E731
    blocks = {"tile_linear": {"max_bytes": 16384}}
    whole, tiled = (
        of(build, world_size=4, stages=[3], cluster="laptop", options=options).stages[3]
        for options in ({}, blocks)
    )
    assert tiled.step_ms > whole.step_ms
    assert tiled.states == whole.states


class _Complex(nn.Module):
    """A complex parameter, of which torch has no fused update, before a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.zeros(96, 96, dtype=torch.complex64))
        self.real = nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 96) → scalar."""
        return self.real((x.to(self.mixed.dtype) @ self.mixed).abs()).square().mean()


@pytest.mark.parametrize("zero", [0, 3])
def test_what_the_optimizer_updates_by_itself_has_state_too(zero: int) -> None:
    target = Target("complex", _Complex)
    found = estimate(
        target,
        world_size=2,
        stages=[zero],
        inputs="x=float32[B,96]",
        batch_size=2,
        cluster="laptop",
    )
    stage = found.stages[zero]
    ranks = 2 if zero == 3 else 1
    assert stage.states.optimizer_bytes == 2 * (8 * 96 * 96 + 4 * (96 * 96 + 96)) // ranks
    counts = 3 * 4  # of the steps of three parameters, which are no model states
    assert stage.bytes_by_kind["optimizer_state"] == stage.states.optimizer_bytes + counts
    assert stage.peak_bytes >= stage.states.optimizer_bytes + stage.states.parameter_bytes


def test_memory_that_nobody_knows_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxzero.schedule.storage.memory_of_own_step", lambda update: None)
    with pytest.raises(CaptureError, match=r"AdamW_step does not run on tensors without values"):
        estimate(Target("complex", _Complex), world_size=2, inputs="x=float32[B,96]", batch_size=2)


def test_time_traffic_and_share_of_the_peak() -> None:
    """Figures follow from each other, and micro-batches count all of a step's products."""
    build = lambda: gpt_bench(num_layers=2)  # noqa: E731
    one, eight = (  # of which the fourth stands for four
        of(build, world_size=4, stages=[3], batch_size=8, micro_batches=k, cluster="laptop")
        for k in (1, 8)
    )
    assert one.flops == pytest.approx(eight.flops, rel=1e-9)
    tokens, p = 8 * 256, one.num_parameters
    assert one.tokens == tokens
    assert 6 * (p - 256 * 512) * tokens < one.flops < 8 * p * tokens
    peak = load_cluster("laptop").device.peak_flops["fp32"]
    for found in (one, eight):
        stage = found.stages[3]
        seconds = stage.step_ms / 1e3
        assert stage.mfu == pytest.approx(found.flops / seconds / peak)
        assert stage.tokens_per_s == pytest.approx(4 * tokens / seconds)
        assert stage.samples_per_s == pytest.approx(4 * 8 / seconds)
        assert 0 < stage.mfu < 1
        assert sum(stage.bytes_by_kind.values()) == stage.peak_bytes


def test_repeated_operators_are_no_more_work_of_the_model() -> None:
    """Within a budget that repeats, MFU is of the same FLOPs, and the step takes longer."""
    build = lambda: gpt_bench(num_layers=2)  # noqa: E731
    settings: dict[str, Any] = {"world_size": 2, "stages": [3], "cluster": "laptop"}
    plain = of(build, batch_size=8, **settings)
    least = of(build, batch_size=8, options={"recompute": {"policy": "full"}}, **settings)
    assert least.flops == pytest.approx(plain.flops, rel=1e-9)
    assert least.stages[3].step_ms > plain.stages[3].step_ms
    assert least.stages[3].peak_bytes < plain.stages[3].peak_bytes


class Convolutions(nn.Module):
    """Images to classes, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 64, 3, padding=1, stride=2)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """(B, 3, H, W) and (B,) to a loss."""
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.second(x)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


class Wide(nn.Module):
    """Weights that are more than what they work on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1024) to a loss."""
        return self.layers(x).square().mean()


def tiny_llama() -> nn.Module:
    """transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, vocab_size=2048))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "gpt": (
        lambda: gpt_bench(num_layers=4, hidden=256, num_heads=4),
        lambda: {n: torch.randint(1024, (4, 256)) for n in ("tokens", "targets")},
    ),
    "llama": (
        tiny_llama,
        lambda: {n: torch.randint(2048, (4, 256)) for n in ("input_ids", "labels")},
    ),
    "convolutions": (
        Convolutions,
        lambda: {"x": torch.randn(8, 3, 64, 64), "labels": torch.randint(10, (8,))},
    ),
    "wide": (Wide, lambda: {"x": torch.randn(64, 1024)}),
}
OPTIONS = {"gather_ahead": {"enabled": False}}
"""What a step before has started would be alive, but allocated before the profiler looked."""


def measured_bytes(name: str, zero: int) -> int:
    """What a step on this rank allocates at most, and what it holds throughout."""
    torch.manual_seed(0)
    build, batch_of = MODELS[name]
    model = fxzero.shard(build(), zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = fxzero.compile_step(model, optimizer, clip_grad_norm=1.0, options=OPTIONS)
    batch = batch_of()
    for _ in range(3):
        step(**batch)
    measured = min(allocated_peak_bytes(lambda: step(**batch)) for _ in range(5))
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    held = [*model.parameters(), *model.buffers(), *states, *batch.values()]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in held]
    return measured + sum(t.untyped_storage().nbytes() for t in local)


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("llama", 3),
        ("wide", 0),
        *exhaustive(
            ("gpt", 0),
            ("gpt", 3),
            ("llama", 0),
            ("convolutions", 0),
            ("convolutions", 3),
            ("wide", 3),
        ),
    ],
)
def test_peaks_are_those_that_are_measured(ranks: Pools, name: str, zero: int) -> None:
    """Two ranks: parameters, state and batch included."""
    build, batch_of = MODELS[name]
    found = of(
        lambda: (build(), batch_of()),
        world_size=2,
        stages=[zero],
        cluster="laptop",
        options=OPTIONS,
    )
    measured = max(ranks(2).run(measured_bytes, name, zero))
    assert found.stages[zero].peak_bytes == pytest.approx(measured, rel=LIMIT)


@pytest.mark.parametrize(("zero", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_table_of_the_zero_paper(zero: int, expected: float) -> None:
    """Figure 1: 7.5 billion parameters on 64 devices, in GB."""
    assert paper_bytes(zero, 7.5e9, 64) / 1e9 == pytest.approx(expected, abs=0.05)


def test_deepspeeds_estimators() -> None:
    """10⁹ parameters, a largest layer of 10⁸, two nodes of 8 devices, in units of 10⁸ bytes: the
    sums of ``estimate_zero2_model_states_mem_needs`` and ``…zero3…`` of DeepSpeed 0.19 by hand."""
    rows = deepspeed_rows(1e9, 1e8, 8, 2)
    assert [(r.device_bytes / 1e8, r.host_bytes / 1e8) for r in rows] == [
        (20, 640 * 1.5),
        (20 + 180 / 16, 320 * 1.5),
        (4, 90 * 1.5),
        (4 + 20 / 16, 80 * 1.5),
        (4 + 180 / 16, 32 * 1.5),
        (4, 320 * 1.5),
        (4 + 20 / 16, 320 * 1.5),
        (4 + 180 / 16, 320 * 1.5),
    ]


def test_the_command_and_its_json() -> None:
    """The table has a column a stage, the JSON what the documentation names."""
    target = ("tests.targets:dict_batches", "--cluster", "laptop")
    shown = call(*target, "--world-size", "2")
    assert shown.exit_code == 0, shown.output
    assert all(f"ZeRO-{zero}" in shown.output for zero in range(4))
    assert "x=float32[2,8]" in shown.output
    result = call(*target, "--zero", "3", "--zero", "1", "--json")
    data = json.loads(result.output)
    assert [*data["stages"]] == ["1", "3"]
    stage = data["stages"]["3"]
    assert {"model_state_bytes", "peak_bytes", "traffic_bytes", "step_ms"} <= stage.keys()
    assert stage["model_state_bytes"] == 16 * 64 // 8
    assert all(math.isfinite(v) for v in stage.values() if isinstance(v, float))


def test_a_target_is_shown_as_it_was_written() -> None:
    """Rich would read ``:llama:`` as a picture."""
    console = Console(width=200, file=io.StringIO())
    found = of(chain_of(2), world_size=2, stages=[3], cluster="laptop")
    print_estimate(console, replace(found, target="hf:llama"))
    assert console.file.getvalue().startswith("hf:llama: ")  # type: ignore[attr-defined]


def test_formulas_on_the_command_line() -> None:
    """Three significant digits, as the paper has them."""
    result = call("--params", "7.5e9", "--world-size", "64")
    assert result.exit_code == 0
    assert all(figure in result.output for figure in ("31.4", "16.6", "1.88"))
    of_both = call(
        *("--params", "7.5e9", "--world-size", "64", "--json"),
        *("--deepspeed", "--largest-layer", "1e8"),
    )
    data = json.loads(of_both.output)
    assert data["stages"]["3"]["model_state_bytes"] == 16 * 7.5e9 / 64
    assert len(data["deepspeed"]) == 8


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    """By the exit code too, with what would help."""
    text = (resources.files("fxzero.conf") / "cluster" / "laptop.yaml").read_text()
    for memory, help in (("1.0e+3", "Model states alone do not fit"), ("1.2e+5", "ZeRO-3 fit")):
        file = tmp_path / "small.yaml"
        file.write_text(text.replace("memory_bytes: 1.2e+10", f"memory_bytes: {memory}", 1))
        target = ("tests.inspect.test_estimate:long_rows", "--cluster", str(file))
        result = call(*target, "--world-size", "2")
        assert result.exit_code == 1, result.output
        assert help in result.output


def test_it_fits_to_the_byte(tmp_path: Path) -> None:
    """The peak, and not what is there throughout."""
    text = (resources.files("fxzero.conf") / "cluster" / "laptop.yaml").read_text()
    settings: dict[str, Any] = {"world_size": 2, "stages": [3]}
    peak = of(long_rows, cluster="laptop", **settings).stages[3].peak_bytes
    for memory in (peak, peak - 1):
        file = tmp_path / f"{memory}.yaml"
        file.write_text(text.replace("memory_bytes: 1.2e+10", f"memory_bytes: {memory}", 1))
        assert of(long_rows, cluster=str(file), **settings).stages[3].fits is (memory == peak)


def long_rows() -> Any:
    """Few weights, and much that they work on."""
    return chain_of(2, 64, 4096)()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name a model, or its number"),
        (("gpt-lite", "--params", "1e9"), "one of both"),
        (("--params", "1e9", "--batch", "3"), "--batch-size has a meaning only with a model"),
        (("gpt-lite", "--deepspeed"), "--deepspeed has a meaning only with --params"),
        (("--params", "1e9", "--deepspeed"), "needs --largest-layer"),
        (
            ("--params", "1e9", "--deepspeed", "--largest-layer", "2e9"),
            "--largest-layer 2e+09 is more than all of --params 1e+09",
        ),
        (("--params", "inf"), "must be a number"),
        (("--params", "nan"), "greater than or equal to 1"),
        (
            ("--params", "1e9", "--deepspeed", "--largest-layer", "1", "--world-size", "12"),
            "is not a whole number of nodes",
        ),
        (("gpt-light",), "did you mean 'gpt-lite'?"),
        (("gpt-lite", "--cluster", "dgx_h10"), "did you mean 'dgx_h100'?"),
        (("tests.targets:breaks",), "this model says no"),
        (
            ("tests.targets:tensor_input", "--options", '{"cost": {"model": "measured"}}'),
            "cost.model='measured' needs real ranks",
        ),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], words: str) -> None:
    """One sentence, before anything takes time, and an exit code."""
    result = call(*arguments)
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.output.split()), result.output


def test_a_model_that_is_several_graphs_is_refused() -> None:
    """What it costs would be the sum of what nobody schedules together."""

    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            torch._dynamo.graph_break()
            return self.layer(y).sum()

    warning = pytest.warns(FxZeroWarning, match="several graphs")
    with warning, pytest.raises(CaptureError, match="is 2 graphs"):
        of(lambda: (Breaking(), (torch.empty(2, 8),)), world_size=2, stages=[3])


def test_a_step_that_falls_back_to_the_loop_is_refused() -> None:
    """Its graph has no update, and what the optimizer holds is not in it."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x).square().mean()

    with (
        pytest.warns(FxZeroWarning),
        pytest.raises(CaptureError, match="is not one graph, as the warning says"),
    ):
        of(lambda: (Counting(), torch.randn(4, 8)), world_size=2, stages=[3], cluster="laptop")


def test_the_documentation_names_every_key() -> None:
    """Of the JSON, no more and no fewer."""
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    table = page.split("## JSON")[1].split("Exit codes")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    named = {word for cell in first for word in re.findall(r"`(\w+)`", cell)}
    kinds = (Estimate, StageEstimate, MeshEstimate, PipelineEstimate)
    assert named == {f.name for kind in kinds for f in fields(kind)}


def test_a_cluster_of_the_options_own_is_not_overruled() -> None:
    """Whose figures would it be?"""
    with pytest.raises(ConfigError, match="differ"):
        of(chain_of(2), world_size=2, cluster="laptop", options={"cost": {"cluster": "dgx2"}})
