"""``fxzero inspect``: one model's step, compiled for any number of ranks, and what was decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fxzero.cli import tables
from fxzero.cli.arguments import (
    DEFAULT_WORLD_SIZE,
    TARGET_HELP,
    BatchOption,
    ClipOption,
    ClusterOption,
    InferenceOption,
    InputsOption,
    MicroBatchesOption,
    OffloadOption,
    OptionsOption,
    ParamDtypeOption,
    RankOption,
    ReduceDtypeOption,
    SeqLenOption,
    StepOption,
    TracebackOption,
    WorldSizeOption,
    ZeroOption,
    check_companions,
    check_file,
    check_pass,
    console,
    dtype_of,
    mesh_of,
    settings_of,
)
from fxzero.cli.capturing import Asked
from fxzero.cli.failures import as_sentences
from fxzero.inspect import Analysis, capture
from fxzero.inspect.pipeline import micro_step_of, under
from fxzero.inspect.targets import load
from fxzero.inspect.trace import write_trace
from fxzero.pipeline.schedules import AUTO, table_of


def inspect(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    zero: ZeroOption = 3,
    world_size: WorldSizeOption = DEFAULT_WORLD_SIZE,
    rank: RankOption = 0,
    batch_size: BatchOption = None,
    seq_len: SeqLenOption = None,
    inputs: InputsOption = None,
    param_dtype: ParamDtypeOption = None,
    reduce_dtype: ReduceDtypeOption = None,
    offload: OffloadOption = False,
    step: StepOption = False,
    clip_grad_norm: ClipOption = 1.0,
    micro_batches: MicroBatchesOption = 1,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="With --step: pipeline ranks x ranks that share a stage, as in 4x2: also show the "
            "model as a pipeline. Simulated; fxzero.shard(mesh=…) trains it."
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="With --mesh: gpipe, 1f1b, interleaved, breadth_first, zb_h1, zbv, auto (the one "
            "that ends first), or a CSV file of your own with a row a rank and actions such as "
            "2F0, 2B0, 2I0, 2W0."
        ),
    ] = "1f1b",
    inference: InferenceOption = False,
    cluster: ClusterOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the simulated step to this file, as JSON for ui.perfetto.dev."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Write what was decided to this file, as JSON. options={'plan': FILE} replays it."
        ),
    ] = None,
    options: OptionsOption = "{}",
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Show what is kept for backward, repeated and gathered, by layer, and the curve.",
        ),
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option(help="Show what this pass changed, as a diff of the graph: shard_params."),
    ] = None,
    code: Annotated[
        bool,
        typer.Option("--code", help="Show the scheduled graph as Python, in launch order."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print it as JSON, and with --diff or --code those too."),
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """Compile a model's training step for any number of ranks, and show what was decided.

    Runs in one process, with no accelerator and no memory for the model.

    Examples:

    fxzero inspect examples.models:gpt_nano --zero 3 --world-size 1024 --cluster dgx_h100

    fxzero inspect model.py:tiny --step --micro-batches 4 --diff accumulate

    fxzero inspect model.py:tiny --step --micro-batches 8 --mesh 4x2 --schedule zb_h1

    fxzero inspect model.py:tiny --step --memory --options '{"memory_budget": "400MiB"}'
    """
    out = console()
    with as_sentences(traceback):
        check_companions(
            {
                "--mesh": (mesh is not None, "--step", step),
                "--schedule": (schedule != "1f1b", "--mesh", mesh is not None),
            }
        )
        pipeline_ranks, world_size = mesh_of(mesh, world_size)
        asked = Asked(
            zero=zero,
            world_size=world_size,
            rank=rank,
            batch_size=batch_size,
            seq_len=seq_len,
            inputs=inputs,
            param_dtype=dtype_of(param_dtype),
            reduce_dtype=dtype_of(reduce_dtype),
            offload=offload,
            step=step,
            clip_grad_norm=clip_grad_norm,
            micro_batches=micro_batches,
            inference=inference,
        )
        asked.check()
        config = settings_of(options, cluster, keep_text=diff is not None)
        if diff is not None:
            check_pass(diff, config, step)
        check_file("--trace", trace)
        check_file("--plan", plan)
        found = load(target)
        settings = asked.settings(found, config)
        pipeline = None
        if pipeline_ranks:
            if schedule != AUTO:
                table_of(schedule, pipeline_ranks, micro_batches)  # raises before it takes time
            micro_step = micro_step_of(found.build, micro_batches=micro_batches, **settings)
            captured = micro_step.capture
            pipeline = under(schedule, micro_step, pipeline_ranks, micro_batches)
        else:
            captured = capture(found.build, **asked.as_run(), **settings)
        if trace is not None:
            write_trace(trace, captured, pipeline.replayed if pipeline is not None else None)
        if plan is not None:
            captured.plan(config).write(plan)
        if as_json:
            data = Analysis.of(captured, memory=memory).to_json()
            if diff is not None:
                data["diffs"] = tables.diffs(captured, diff)
            if code:
                data["code"] = tables.codes(captured)
            if pipeline is not None:
                data["pipeline"] = pipeline.to_json()
            typer.echo(json.dumps(data, indent=1, default=str))
        elif diff is None and not code:
            if pipeline is not None:
                tables.print_pipeline(out, pipeline)
            else:
                tables.print_analysis(out, Analysis.of(captured, memory=memory))
        else:
            for text in tables.diffs(captured, diff) if diff is not None else []:
                tables.print_text(out, text, "diff")
            for text in tables.codes(captured) if code else []:
                tables.print_text(out, text, "python")
