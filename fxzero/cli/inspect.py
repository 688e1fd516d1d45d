"""``fxzero inspect``: one model's step, compiled for any number of ranks, and what was decided."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from fxzero.cli import tables
from fxzero.cli.arguments import (
    DEFAULT_WORLD_SIZE,
    DUMP_HELP,
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
    ScheduleOption,
    SeqLenOption,
    StepOption,
    TracebackOption,
    WorldSizeOption,
    ZeroOption,
    check_companions,
    check_file,
    check_pass,
    mesh_of,
)
from fxzero.cli.failures import as_sentences
from fxzero.cli.subject import Subject
from fxzero.cli.terminal import console
from fxzero.inspect import Analysis, Capture
from fxzero.inspect.code import codes
from fxzero.inspect.dump import programs
from fxzero.inspect.explain.view import View
from fxzero.inspect.lines import around, check_known, lanes, of_modules
from fxzero.inspect.pipeline import PipelineReport, micro_step_of, under
from fxzero.inspect.trace import trace_of, write_trace
from fxzero.pipeline.schedules import AUTO, table_of
from fxzero.sharding.pipeline import PIPELINE


def inspect(
    target: Annotated[str, typer.Argument(help=TARGET_HELP + DUMP_HELP)],
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
            help="The mesh of the ranks. With --step pipeline=4,shard=2, in short 4x2: pipeline "
            "ranks x ranks that share a stage: also show the model as a pipeline. Or "
            "replicate=2,shard=4: copies of the states, each over some ranks. Simulated; "
            "fxzero.shard(mesh=…) trains it."
        ),
    ] = None,
    schedule: ScheduleOption = "1f1b",
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
    around_node: Annotated[
        str | None,
        typer.Option("--around", help="Show a node with what runs before and behind it."),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            help="Show the nodes of a module, or of all that fit a pattern: 'blocks.*.mlp'. "
            "Layers that are alike are shown once."
        ),
    ] = None,
    show_lanes: Annotated[
        bool,
        typer.Option("--lanes", help="Show the simulated step as a picture, a row a lane."),
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

    fxzero inspect model.py:tiny --lanes --module 'blocks.*'
    """
    arguments = dict(locals())
    out = console()
    with as_sentences(traceback):
        subject = Subject.of(arguments)
        shape = mesh_of(mesh, world_size)
        is_pipeline = shape is not None and shape.is_pipeline
        if shape is not None:
            inner = shape.of_a_stage
            subject = replace(subject, world_size=len(inner), mesh=inner.sizes)
        live = not subject.is_dump
        check_companions(
            {
                "--mesh": (is_pipeline, "--step", step),
                "--schedule": (schedule != "1f1b", "--mesh, of a pipeline", is_pipeline),
                "--mesh, --trace and --plan": (
                    mesh is not None or trace is not None or plan is not None,
                    "a model, not with a dump (fxzero trace reads one, and its plan.json is there)",
                    live,
                ),
                "--code": (code, "a model or a dump's folder", not subject.is_file),
            }
        )
        subject.check()
        if diff is not None and live:
            check_pass(diff, subject.config(), step)
        check_file("--trace", trace)
        check_file("--plan", plan)
        detailed = around_node is not None or module is not None or show_lanes
        if not live:
            shown = _Shown(subject.analysis(), None, programs(target, rank) if code else [])
        else:
            pipeline_ranks = shape.along(PIPELINE) if shape is not None and is_pipeline else 0
            captured, pipeline = _captured(subject, pipeline_ranks, schedule, bool(diff))
            if trace is not None:
                replayed = pipeline.replayed if pipeline is not None else None
                every = {rank: Analysis.of(captured, detail=True)}
                write_trace(trace, trace_of(every, replayed))
            if plan is not None:
                captured.plan(subject.config()).write(plan)
            analysis = Analysis.of(captured, memory=memory, detail=detailed or diff is not None)
            shown = _Shown(analysis, pipeline, codes(captured) if code else [])
        views = [View(shown.analysis, detail) for detail in shown.analysis.details]
        if detailed:
            check_known(views, around_node, module)
        if not memory:
            shown = replace(shown, analysis=replace(shown.analysis, memory=()))
        texts = tables.diffs(shown.analysis, diff) if diff is not None else []
        lines = [
            line
            for view in views
            for line in [
                *(lanes(view.detail) if show_lanes else []),
                *(around(view, around_node) if around_node is not None else []),
                *(of_modules(view, module) if module is not None else []),
            ]
        ]
        if as_json:
            data = shown.analysis.to_json()
            if not detailed:
                del data["details"]
            if diff is not None:
                data["diffs"] = texts
            if code:
                data["code"] = shown.codes
            if shown.pipeline is not None:
                data["pipeline"] = shown.pipeline.to_json()
            typer.echo(json.dumps(data, indent=1, default=str))
        elif detailed or diff is not None or code:
            for line in lines:
                tables.print_text(out, line, "text")
            for text in texts:
                tables.print_text(out, text, "diff")
            for text in shown.codes:
                tables.print_text(out, text, "python")
        elif shown.pipeline is not None:
            tables.print_pipeline(out, shown.pipeline)
        else:
            tables.print_analysis(out, shown.analysis)


@dataclass(frozen=True)
class _Shown:
    """What there is to show, of a capture or of a dump."""

    analysis: Analysis
    pipeline: PipelineReport | None
    codes: list[str]


def _captured(
    subject: Subject, pipeline_ranks: int, schedule: str, keep_text: bool
) -> tuple[Capture, PipelineReport | None]:
    """The step of a model; one of its micro-steps where it is shown as a pipeline."""
    if not pipeline_ranks:
        return subject.captured(keep_text=keep_text), None
    count = subject.micro_batches
    if schedule != AUTO:
        table_of(schedule, pipeline_ranks, count)  # raises before it takes time
    build, settings = subject.settings(keep_text=keep_text)
    of_step = {k: v for k, v in settings.items() if k not in ("step", "training")}
    micro_step = micro_step_of(build, **of_step)
    return micro_step.capture, under(schedule, micro_step, pipeline_ranks, count)
