"""`fxzero estimate --mesh`: replicas and pipelines, by closed formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from examples.models import gpt_bench
from fxzero.cli.app import app
from fxzero.cost.cluster import load_cluster
from fxzero.errors import ConfigError
from fxzero.graph import Phase
from fxzero.inspect.estimate import Estimate, estimate
from fxzero.inspect.estimate_rows import PipelineEstimate
from fxzero.inspect.mesh import MeshShape
from fxzero.inspect.pipeline import as_pipeline, micro_step_of
from fxzero.inspect.targets import Target
from fxzero.inspect.zero_inside import ZeroInside
from fxzero.pipeline.schedules import table_of
from tests.inspect.test_pipeline import unet
from tests.stepping import chain_of
from tests.tiers import exhaustive, in_two_tiers


def call(command: str, *arguments: str) -> Result:
    """Run a command, wide enough not to wrap."""
    return CliRunner().invoke(app, [command, *arguments], env={"COLUMNS": "200"})


def of(build: Callable[[], Any], *meshes: str, **settings: Any) -> Estimate:
    """The estimate of a function's model on some meshes."""
    return estimate(
        Target("here", build), meshes=[MeshShape.parse(mesh) for mesh in meshes], **settings
    )


def never() -> Any:
    """A model that nobody may ask for."""
    raise AssertionError("it was captured")


def cluster(folder: Path, **changed: str) -> str:
    """A file with the laptop's figures but for some: of nodes, memory, links between nodes."""
    text = (resources.files("fxzero.conf") / "cluster" / "laptop.yaml").read_text()
    lines = {
        "devices_per_node": "devices_per_node: 2",
        "memory_bytes": "memory_bytes: 1.2e+10",
        "inter": "inter: {bytes_per_s: 1.17e+8",
    }
    for key, value in changed.items():
        assert lines[key] in text
        text = text.replace(lines[key], f"{lines[key].rpartition(' ')[0]} {value}", 1)
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_what_is_written_is_a_mesh() -> None:
    """By the names of `fxzero.shard`'s axes, and back."""
    for text, ranks, sizes in (
        ("replicate=2,shard=4", 8, (2, 4)),
        ("pipeline=4,shard=2", 8, (2,)),
        ("pipeline=4", 4, (1,)),
        ("pipeline=4,replicate=2", 8, (2, 1)),
        ("pipeline=2,replicate=3,shard=4", 24, (3, 4)),
        ("shard=8", 8, (8,)),
    ):
        mesh = MeshShape.parse(text)
        assert (str(mesh), len(mesh), mesh.sizes) == (text, ranks, sizes)
        assert mesh.is_pipeline == text.startswith("pipeline")


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(None)])
def test_states_are_shared_by_the_inner_axis(dtype: torch.dtype | None) -> None:
    """P parameters over the four ranks of a copy, not over all eight."""
    p, n = 3 * 64 * 64, 4
    found = of(
        chain_of(3, 64), "replicate=2,shard=4", world_size=8, param_dtype=dtype, cluster="laptop"
    )
    sums = {
        None: {0: 16 * p, 1: 8 * p + 12 * p // n, 2: 4 * p + 16 * p // n, 3: 16 * p // n},
        torch.bfloat16: {0: 16 * p, 1: 4 * p + 12 * p // n, 2: 2 * p + 16 * p // n, 3: 16 * p // n},
    }[dtype]
    stages = found.meshes["replicate=2,shard=4"].stages
    assert {z: s.model_state_bytes for z, s in stages.items()} == sums


@pytest.mark.parametrize(
    ("r", "s", "micro_batches"), [(2, 4, 2), *exhaustive((2, 4, 1), (4, 2, 1), (4, 2, 2))]
)
def test_gradients_travel_over_both_axes(r: int, s: int, micro_batches: int) -> None:
    """Gathers and reduce-scatters of all bytes inside, an all-reduce of a part across: at stage 1
    once a step, at stage 2 of each micro-batch. At stage 0 both axes replicate."""
    b = 4 * 3 * 64 * 64
    mesh = f"replicate={r},shard={s}"
    found = of(
        chain_of(3, 64, 8),
        mesh,
        world_size=8,
        stages=[0, 1, 2],
        micro_batches=micro_batches,
        clip_grad_norm=None,
        cluster="laptop",
    )
    inside, across = b * (s - 1) // s, 2 * (b // s) * (r - 1) // r
    stages = found.meshes[mesh].stages
    assert stages[0].traffic_bytes == 2 * inside + 2 * b * (r - 1) // r
    assert stages[1].traffic_bytes == 2 * inside + across
    assert stages[2].traffic_bytes == inside + micro_batches * (inside + across)
    assert found.stages[1].traffic_bytes == 2 * b * 7 // 8


def test_one_replica_is_the_flat_group() -> None:
    """To the last figure, at every stage."""
    found = of(
        chain_of(2, 64, 8),
        "replicate=1,shard=8",
        world_size=8,
        micro_batches=2,
        cluster="laptop",
    )
    assert found.meshes["replicate=1,shard=8"].stages == found.stages
    assert found.meshes["replicate=1,shard=8"].batches == 8


def test_replicas_on_other_nodes_share_their_link(tmp_path: Path) -> None:
    """Nodes of four, between which 100 kB/s go and nothing else counts: four parts of a copy are
    all-reduced over two nodes at once, 2 · 4 · (B/4)/2 bytes of each node."""
    path = cluster(tmp_path, devices_per_node="4", inter="1.0e+5")
    settings: dict[str, Any] = {"world_size": 8, "stages": [1], "clip_grad_norm": None}
    mesh = "replicate=2,shard=4"
    b = 4 * 3 * 512 * 512
    found = of(chain_of(3, 512), mesh, cluster=path, **settings)
    assert found.meshes[mesh].stages[1].step_ms == pytest.approx(1e3 * b / 1e5, rel=0.02)
    inside = of(chain_of(3, 512), mesh, cluster="dgx_h100", **settings).meshes[mesh].stages[1]
    assert inside.step_ms < 2, "eight ranks are one node there"


PIPELINE = "pipeline=4,shard=2"
ON_H100 = {"cost": {"cluster": "dgx_h100"}}


def piped(build: Callable[[], Any], mesh: str = PIPELINE, **settings: Any) -> PipelineEstimate:
    """One stage of a pipeline."""
    settings = {"world_size": 8, "stages": [3], "micro_batches": 4, **settings}
    (stage,) = of(build, mesh, **settings).meshes[mesh].stages.values()
    assert isinstance(stage, PipelineEstimate)
    return stage


@pytest.mark.parametrize(
    ("zero", "dtype"), in_two_tiers([*product(range(4), [None, torch.bfloat16])])
)
def test_states_of_all_stages_are_the_models(zero: int, dtype: torch.dtype | None) -> None:
    """On the ranks of a stage, summed up along the pipeline: what a flat group of as many has."""
    settings: dict[str, Any] = {"zero": zero, "param_dtype": dtype, "world_size": 2}
    step = micro_step_of(unet, micro_batches=4, options=ON_H100, **settings)
    report = as_pipeline(step, table_of("1f1b", 4, 4))
    p, n = 8 * (512 * 512 + 512), 2
    sums = {
        None: {0: 16 * p, 1: 8 * p + 12 * p // n, 2: 4 * p + 16 * p // n, 3: 16 * p // n},
        torch.bfloat16: {0: 16 * p, 1: 4 * p + 12 * p // n, 2: 2 * p + 16 * p // n, 3: 16 * p // n},
    }[dtype]
    assert sum(states.num_bytes for states in report.states) == sums[zero]
    for peak, kinds in zip(report.peak_bytes, report.bytes_by_kind, strict=True):
        assert sum(kinds.values()) == peak


def test_memory_is_that_of_the_fullest_ranks() -> None:
    """Of the pipeline that `fxzero inspect --mesh` shows."""
    step = micro_step_of(unet, micro_batches=4, world_size=2, zero=3, options=ON_H100)
    report = as_pipeline(step, table_of("1f1b", 4, 4))
    fullest = piped(unet)
    assert fullest.peak_bytes == max(report.peak_bytes) > min(report.peak_bytes)
    assert fullest.model_state_bytes == report.states[fullest.place].num_bytes
    assert fullest.traffic_bytes == round(max(report.sent_bytes))


def test_messages_between_stages() -> None:
    """A U-Net's crossings are 2, 4 and 2 rows of 512 for each micro-batch, and as much comes back:
    the second rank sends 4 of them on and 2 back. At stage 0 with one rank a stage nothing else
    travels."""
    row = 1024 // 4 * 512 * 4
    alone = piped(unet, "pipeline=4,shard=1", world_size=4, stages=[0])
    assert alone.message_bytes == alone.traffic_bytes == 4 * (4 + 2) * row


@pytest.mark.parametrize(
    "mesh", ["pipeline=4,replicate=2,shard=2", *exhaustive("pipeline=4,shard=2")]
)
def test_what_a_stage_moves_inside(mesh: str) -> None:
    """At ZeRO-2 a gather a step and a reduce of every micro-batch, of the stage's parameters: the
    same for each of these stages, which have two layers."""
    shape = MeshShape.parse(mesh)
    found = piped(unet, mesh, world_size=len(shape), stages=[2])
    b = 4 * 2 * (512 * 512 + 512)
    across = 2 * (b // 2) // 2 if shape.along("replicate") == 2 else 0
    inside = b // 2 + 4 * (b // 2 + across)
    assert found.traffic_bytes - found.message_bytes == pytest.approx(inside, rel=0.01)


def test_a_pipelines_rates() -> None:
    """Four ranks read a batch together: tokens and FLOPs of two batches on eight ranks."""
    build = lambda: gpt_bench(num_layers=4)  # noqa: E731
    settings: dict[str, Any] = {"world_size": 8, "stages": [0], "micro_batches": 4}
    found = of(build, PIPELINE, "replicate=2,shard=4", cluster="laptop", **settings)
    mesh, stage = found.meshes[PIPELINE], found.meshes[PIPELINE].stages[0]
    assert isinstance(stage, PipelineEstimate)
    assert (mesh.batches, found.meshes["replicate=2,shard=4"].batches) == (2, 8)
    seconds = stage.step_ms / 1e3
    assert found.tokens == 8 * 256
    assert stage.tokens_per_s == pytest.approx(2 * found.tokens / seconds)
    assert stage.samples_per_s == pytest.approx(2 * 8 / seconds)
    peak = load_cluster("laptop").device.peak_flops["fp32"]
    assert stage.mfu == pytest.approx(2 * found.flops / (8 * seconds * peak), rel=1e-6)
    # What computes takes as long as on one rank, but for what runs beside it.
    assert 4 * stage.step_ms * (1 - stage.idle_share) > 0.8 * found.stages[0].step_ms / 1.2
    assert stage.step_ms > found.stages[0].step_ms / 4
    assert 0 < stage.idle_share < 1


def test_the_step_ends_with_the_update() -> None:
    """The replay, and then the update of the slowest rank, for whose norm all are waited for;
    without clipping each begins when it has ended."""
    step = micro_step_of(unet, micro_batches=4, world_size=2, zero=3, options=ON_H100)
    report = as_pipeline(step, table_of("1f1b", 4, 4))
    clipped, free = (piped(unet, clip_grad_norm=norm) for norm in (1.0, None))
    assert min(report.update_us) > 0
    assert clipped.step_ms == pytest.approx((report.step_us + max(report.update_us)) / 1e3)
    assert free.step_ms < clipped.step_ms
    assert clipped.exposed_ms == pytest.approx(report.exposed_us / 1e3)
    assert 0 < report.exposed_us < report.step_us


def test_ranks_are_busy_with_stages_and_with_sums_of_gradients() -> None:
    """On one rank a stage nothing travels but messages: what all ranks do is four micro-batches of
    all stages, and adding up the gradients of four."""
    step = micro_step_of(unet, micro_batches=4, world_size=1, zero=0, options=ON_H100)
    report = as_pipeline(step, table_of("1f1b", 4, 4))
    busy_us = sum(report.step_us * (1 - idle) for idle in report.idle_shares)
    sums_us = ZeroInside.of(step.capture, step.costs).casts_us[Phase.BACKWARD]
    assert sums_us > 3 * 4 * sum(1 for _ in unet()[0].parameters()), "a launch takes 4 us"
    assert busy_us == pytest.approx(4 * sum(stage.us for stage in report.found.stages) + sums_us)


def test_the_schedule_is_the_one_asked_for() -> None:
    """GPipe holds more than 1F1B; the fastest one is told by its name."""
    late, early = (piped(unet, schedule=name) for name in ("gpipe", "1f1b"))
    assert late.peak_bytes > early.peak_bytes
    fastest = piped(unet, schedule="auto")
    assert fastest.step_ms <= min(late.step_ms, early.step_ms)
    assert fastest.schedule not in ("auto", "")


@pytest.mark.parametrize(("count", "us", "bytes_per_s"), [(2, 140, 1.17e8 / 2), (4, 250, 8e8)])
def test_neighbours_on_other_nodes(
    tmp_path: Path, count: int, us: float, bytes_per_s: float
) -> None:
    """Two ranks share a stage, so the next one's are two further: on nodes of two both send to
    another node over one link, on nodes of four they stay inside."""
    path = cluster(tmp_path, devices_per_node=str(count))
    options = {"cost": {"cluster": path}}
    step = micro_step_of(unet, micro_batches=4, world_size=2, zero=0, options=options)
    for crossing in as_pipeline(step, table_of("1f1b", 4, 4)).found.crossings:
        both = crossing.num_bytes + crossing.gradient_bytes
        assert both > 0
        assert crossing.us == pytest.approx(us + 1e6 * both / bytes_per_s)


@pytest.mark.parametrize(
    ("mesh", "settings", "words"),
    [
        ("replicate=2,shard=8", {}, "has 2 x 8 = 16 ranks, and --world-size is 8"),
        ("pipeline=1,shard=8", {}, "is no pipeline: one rank has all stages"),
        (PIPELINE, {"schedule": "1f2b"}, "did you mean '1f1b'"),
        (PIPELINE, {"options": {"memory": "all_host"}}, "offload_states.share=1.* to the host"),
        ("replicate=8", {}, "no axis that states are sharded over"),
        ("shard=4,replicate=2", {}, "outermost first"),
        ("shard=2,shard=4", {}, "stand there once"),
        ("replicas=2,shard=4", {}, "did you mean 'replicate'"),
        ("replicate=2;shard=4", {}, "write the axes"),
        ("shard=0", {}, "write the axes"),
    ],
)
def test_what_cannot_be_laid_out(mesh: str, settings: dict[str, Any], words: str) -> None:
    """One sentence, before anything is captured."""
    with pytest.raises(ConfigError, match=words):
        of(never, mesh, world_size=8, **settings)


def test_a_model_that_cannot_be_cut() -> None:
    """More stages than places."""
    with pytest.raises(ConfigError, match=r"64 stages: .* Take fewer stages"):
        piped(chain_of(1, 8), "pipeline=64,shard=1", world_size=64)


TARGET = ("tests.inspect.test_meshes:wide", "--cluster", "dgx_h100", "--micro-batches", "4")


def test_the_command_and_its_json() -> None:
    """A table for each layout; the JSON has what it had, and the meshes by how they are written."""
    meshes = ("--mesh", "replicate=2,shard=4", "--mesh", PIPELINE)
    shown = call("estimate", *TARGET, *meshes, "--zero", "1", "--schedule", "gpipe")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    places = [i for i, line in enumerate(lines) if line.startswith("┃ ")]
    assert [lines[i].split()[1] for i in places] == ["shard=8", "replicate=2,shard=4", PIPELINE]
    piped_lines = "\n".join(lines[places[2] :])
    assert all(word in piped_lines for word in ("gpipe", "ranks idle", "4 ranks of each pipeline"))
    assert "ranks idle" not in "\n".join(lines[: places[2]])
    data = json.loads(call("estimate", *TARGET, *meshes, "--zero", "1", "--json").output)
    plain = json.loads(call("estimate", *TARGET, "--zero", "1", "--json").output)
    assert {**data, "meshes": {}} == plain
    assert [*data["meshes"]] == ["replicate=2,shard=4", PIPELINE]
    replicated, pipeline = data["meshes"].values()
    assert replicated["axes"] == {"replicate": 2, "shard": 4}
    own = {"schedule", "place", "message_bytes", "idle_share"}
    assert replicated["stages"]["1"].keys() == data["stages"]["1"].keys()
    assert pipeline["stages"]["1"].keys() == data["stages"]["1"].keys() | own
    assert pipeline["stages"]["1"]["schedule"] == "1f1b"


def test_what_fits_on_a_mesh_fits(tmp_path: Path) -> None:
    """The exit code is of all layouts together."""
    peaks = of(wide, PIPELINE, world_size=8, stages=[0], cluster="laptop")
    flat, cut = peaks.stages[0].peak_bytes, peaks.meshes[PIPELINE].stages[0].peak_bytes
    assert cut < flat
    command = ("estimate", "tests.inspect.test_meshes:wide", "--zero", "0", "--mesh", PIPELINE)
    for memory, code in ((flat - 1, 0), (cut, 0), (cut - 1, 1)):
        path = cluster(tmp_path, memory_bytes=str(memory))
        result = call(*command, "--cluster", path, "--json")
        assert result.exit_code == code, result.output
        assert json.loads(result.output)["stages"]["0"]["fits"] is False
    shown = call(*command, "--cluster", path)
    assert "do not fit" in " ".join(shown.output.split()) or "fit, and" in shown.output


def wide() -> Any:
    """Layers whose states are most of what is held."""
    return chain_of(4, 256)()


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("estimate", "--mesh 2x4", "Name the axes: pipeline=2,shard=4 or replicate=2,shard=4"),
        ("estimate", "--mesh pipeline=3,shard=2", "has 3 x 2 = 6 ranks, and --world-size is 8"),
        ("estimate", "--mesh shard=8 --mesh shard=8", "stands there twice"),
        ("estimate", "--schedule zb_h1", "--schedule has a meaning only with --mesh"),
        ("estimate", "--mesh replicate=2,shard=4 --schedule zb_h1", "of a pipeline"),
        ("inspect", "--mesh replicate=2,shard=4 --world-size 16", "has 8 ranks, --world-size 16"),
        ("inspect", "--mesh pipeline=2,shard=4", "--mesh has a meaning only with --step"),
    ],
)
def test_wrong_use(command: str, arguments: str, words: str) -> None:
    """Exit code 2, and a sentence, before anything is captured."""
    result = call(command, "tests.inspect.test_meshes:never", *arguments.split())
    assert result.exit_code == 2
    assert words in " ".join(result.output.split()), result.output


def test_inspect_reads_the_same_notation() -> None:
    """Of a pipeline its short form's; of replicas the graph that they run."""
    chain = ("tests.inspect.test_meshes:wide", "--cluster", "dgx_h100", "--json")
    step = ("--step", "--micro-batches", "4")
    short, long = (
        json.loads(call("inspect", *chain, *step, "--mesh", mesh).output)["pipeline"]
        for mesh in ("4x2", PIPELINE)
    )
    assert short == long
    data = json.loads(call("inspect", *chain, "--mesh", "replicate=2,shard=4").output)
    reduces = {(t["operator"], t["num_ranks"]) for t in data["transfers"] if t["lane"] == "reduce"}
    assert reduces == {("reduce_scatter", 4), ("all_reduce", 2)}
