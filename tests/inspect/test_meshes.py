"""`fxzero estimate --mesh`: replicas and pipelines, by closed formulas and against the flat group."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from examples.models import gpt_bench
from fxzero.cli.app import app
from fxzero.cost.cluster import load_cluster
from fxzero.errors import ConfigError
from fxzero.inspect.estimate import Estimate, estimate
from fxzero.inspect.estimate_rows import PipelineEstimate
from fxzero.inspect.mesh import MeshShape
from fxzero.inspect.pipeline import as_pipeline, micro_step_of
from fxzero.inspect.targets import Target
from fxzero.pipeline.schedules import table_of
from tests.inspect.test_pipeline import unet
from tests.stepping import chain_of

MEASURED = "--mesh has"


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


def cluster(tmp_path: Path, **changed: str) -> str:
    """A file with the laptop's figures, and some of others."""
    text = (resources.files("fxzero.conf") / "cluster" / "laptop.yaml").read_text()
    known = {
        "devices_per_node": "devices_per_node: 2",
        "memory_bytes": "memory_bytes: 1.2e+10",
        "inter": "inter: {bytes_per_s: 1.17e+8",
    }
    for key, value in changed.items():
        line = known[key]
        assert line in text
        text = text.replace(line, line[: -len(line.split(" ")[-1])] + value, 1)
    path = tmp_path / "mine.yaml"
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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
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


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("r", "s"), [(2, 4), (4, 2)])
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
        lambda: gpt_bench(num_layers=2), "replicate=1,shard=8", world_size=8, micro_batches=2
    )
    assert found.meshes["replicate=1,shard=8"].stages == found.stages
    assert found.meshes["replicate=1,shard=8"].batches == 8


def test_the_outer_axis_takes_the_slower_link(tmp_path: Path) -> None:
    """Over links between nodes of four that are a thousandth as fast, what stays in a node takes no
    longer, and what leaves it does; eight copies' parts share a node's link."""
    build = lambda: gpt_bench(num_layers=2)  # noqa: E731
    fast = cluster(tmp_path, devices_per_node="4")
    settings: dict[str, Any] = {"world_size": 8, "stages": [3]}
    meshes = "replicate=2,shard=4", "replicate=4,shard=2"
    step_ms = {}
    for name, path in (("fast", fast), ("slow", cluster(tmp_path, devices_per_node="4", inter="{bytes_per_s: 1.17e+5"))):
        found = of(build, *meshes, cluster=path, **settings)
        step_ms[name] = {m: found.meshes[m].stages[3].step_ms for m in meshes}
        step_ms[name]["flat"] = found.stages[3].step_ms
    p_bytes = 4 * gpt_bench(num_layers=2).num_parameters() if False else None
    assert p_bytes is None
    slow = step_ms["slow"]
    assert slow["replicate=2,shard=4"] < slow["flat"]
