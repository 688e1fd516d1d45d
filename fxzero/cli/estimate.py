"""``fxzero estimate``: what training a model takes and holds, for all ZeRO stages side by side."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from fxzero.cli import tables
from fxzero.cli.arguments import (
    DEFAULT_WORLD_SIZE,
    MOST_RANKS,
    TARGET_HELP,
    BatchOption,
    InputsOption,
    OptionsOption,
    ParamDtypeOption,
    ReduceDtypeOption,
    ScheduleOption,
    SeqLenOption,
    TracebackOption,
    check_companions,
    dtype_of,
    meshes_of,
    settings_of,
)
from fxzero.cli.failures import as_sentences
from fxzero.cli.terminal import console
from fxzero.errors import ConfigError
from fxzero.inspect.estimate import EVERY_STAGE
from fxzero.inspect.estimate import estimate as estimate_of
from fxzero.inspect.formulas import deepspeed_rows, paper_bytes
from fxzero.inspect.targets import load

DEFAULT_CLUSTER = "dgx_h100"


def estimate(
    target: Annotated[str | None, typer.Argument(help=TARGET_HELP)] = None,
    *,
    world_size: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Ranks; none of them is started.")
    ] = DEFAULT_WORLD_SIZE,
    zero: Annotated[
        list[int] | None,
        typer.Option(min=0, max=3, help="A ZeRO stage, several times for several. Default: all."),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="Machine to decide and simulate for: a name in conf/cluster (dgx_h100, laptop, "
            "…), or a YAML file with the same keys."
        ),
    ] = DEFAULT_CLUSTER,
    batch_size: BatchOption = None,
    seq_len: SeqLenOption = None,
    inputs: InputsOption = None,
    micro_batches: Annotated[
        int, typer.Option(min=1, max=1024, help="Equal parts that each rank's batch is split in.")
    ] = 1,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            help="Another layout of the ranks, several times for several: replicate=2,shard=4 "
            "(copies of the states, each over some ranks), pipeline=4,shard=2 (a pipeline, each "
            "stage over some ranks), or all three axes. As fxzero.shard(mesh=…) names them, "
            "outermost first."
        ),
    ] = None,
    schedule: ScheduleOption = "1f1b",
    clip_grad_norm: Annotated[
        float, typer.Option(min=0.0, help="The norm that gradients are clipped to; 0 does not.")
    ] = 1.0,
    param_dtype: ParamDtypeOption = None,
    reduce_dtype: ReduceDtypeOption = None,
    options: OptionsOption = "{}",
    params: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Instead of a model, a number of parameters (7.5e9): model states alone, by the "
            "formulas of the ZeRO paper.",
        ),
    ] = None,
    deepspeed: Annotated[
        bool,
        typer.Option(
            "--deepspeed",
            help="With --params: what DeepSpeed's two estimators say, on --gpus-per-node.",
        ),
    ] = False,
    largest_layer: Annotated[
        float | None,
        typer.Option(min=0, help="With --deepspeed, needed: parameters of the largest layer."),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="With --deepspeed: ranks on each node.")
    ] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON; `docs/estimate.md` says what it has.")
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """Say what training a model takes and holds: memory, traffic, time, for all ZeRO stages.

    The whole step with AdamW is captured and compiled for ranks that are not there, on tensors that
    have no memory, and its graph is simulated. Exit code 1: no stage that was asked for fits, on no
    mesh.

    Examples:

    fxzero estimate llama3-8b --world-size 16

    fxzero estimate train.py:build --world-size 64 --zero 2 --zero 3 --cluster dgx_a100 --batch 4

    fxzero estimate llama3-8b --world-size 64 --micro-batches 16 --mesh pipeline=8,shard=8

    fxzero estimate hf:path/to/config.json --seq-len 4096 --options '{"memory_budget": "auto"}'

    fxzero estimate --params 7.5e9 --world-size 64
    """
    out = console()
    with as_sentences(traceback):
        of_formula = params is not None
        meshes = meshes_of(mesh or [], world_size)
        is_pipeline = any(shape.is_pipeline for shape in meshes)
        check_companions(
            {
                "--deepspeed": (deepspeed, "--params", of_formula),
                "--largest-layer": (largest_layer is not None, "--deepspeed", deepspeed),
                "--schedule": (schedule != "1f1b", "--mesh, of a pipeline", is_pipeline),
                "--gpus-per-node": (gpus_per_node != 8, "--deepspeed", deepspeed),
                **{
                    name: (used, "a model", not of_formula)
                    for name, used in {
                        "--batch-size": batch_size is not None,
                        "--seq-len": seq_len is not None,
                        "--inputs": inputs is not None,
                        "--micro-batches": micro_batches != 1,
                        "--mesh": bool(mesh),
                        "--clip-grad-norm": clip_grad_norm != 1.0,
                        "--cluster": cluster != DEFAULT_CLUSTER,
                        "--param-dtype": param_dtype is not None,
                        "--reduce-dtype": reduce_dtype is not None,
                        "--options": options != "{}",
                    }.items()
                },
            }
        )
        stages = sorted(set(zero)) if zero else list(EVERY_STAGE)
        if (target is None) is not of_formula:
            raise ConfigError("name a model, or its number of parameters by --params: one of both")
        if params is not None:
            if not math.isfinite(params):
                raise ConfigError(f"--params {params} must be a number that a model can have")
            if deepspeed and largest_layer is None:
                raise ConfigError(
                    "--deepspeed needs --largest-layer: parameters of the largest layer, which "
                    "ZeRO-3 gathers whole"
                )
            if largest_layer is not None and largest_layer > params:
                raise ConfigError(
                    f"--largest-layer {largest_layer:g} is more than all of --params {params:g}"
                )
            if deepspeed and world_size % gpus_per_node:
                raise ConfigError(
                    f"--world-size {world_size} is not a whole number of nodes of --gpus-per-node "
                    f"{gpus_per_node}"
                )
            _print_formulas(
                params, world_size, stages, deepspeed, largest_layer, gpus_per_node, as_json
            )
            return
        assert target is not None
        found = estimate_of(
            load(target),
            world_size=world_size,
            stages=stages,
            meshes=meshes,
            schedule=schedule,
            cluster=cluster,
            batch_size=batch_size,
            seq_len=seq_len,
            inputs=inputs,
            micro_batches=micro_batches,
            clip_grad_norm=clip_grad_norm or None,
            param_dtype=dtype_of(param_dtype),
            reduce_dtype=dtype_of(reduce_dtype),
            options=settings_of(options, cluster, keep_text=False),
        )
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
        else:
            tables.print_estimate(out, found)
        if not found.fits:
            raise typer.Exit(1)


def _print_formulas(
    params: float,
    world_size: int,
    stages: list[int],
    deepspeed: bool,
    largest_layer: float | None,
    gpus_per_node: int,
    as_json: bool,
) -> None:
    """Model states by formulas."""
    paper = {zero: paper_bytes(zero, params, world_size) for zero in stages}
    rows = []
    if deepspeed:
        num_nodes = world_size // gpus_per_node
        rows = deepspeed_rows(params, largest_layer or 0.0, gpus_per_node, num_nodes)
    if as_json:
        data: dict[str, Any] = {
            "num_parameters": params,
            "world_size": world_size,
            "stages": {str(zero): {"model_state_bytes": round(b)} for zero, b in paper.items()},
        }
        if deepspeed:
            data["deepspeed"] = [vars(row) for row in rows]
        typer.echo(json.dumps(data, indent=1))
        return
    tables.print_formulas(console(), params, world_size, paper, rows)
