"""Commands and their options; what they print is in `fxzero.cli.tables`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fxzero import __version__
from fxzero.cli import tables
from fxzero.cli.failures import as_sentences
from fxzero.cli.options import options_yaml
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import loop_passes, step_passes
from fxzero.errors import ConfigError, nearest
from fxzero.inspect import Analysis, capture
from fxzero.inspect.pipeline import micro_step_of, under
from fxzero.inspect.target import load
from fxzero.inspect.trace import write_trace
from fxzero.pipeline.schedules import AUTO, table_of

DEFAULT_WORLD_SIZE = 8

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    """Dtypes by their torch names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def print_version(wanted: bool) -> None:
    """What is installed, and what it compiles for."""
    if wanted:
        typer.echo(f"fxzero {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def fxzero(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print versions and exit."
        ),
    ] = False,
) -> None:
    """A compiler for distributed training steps in PyTorch.

    Exit codes: 0 done, 1 the model cannot be compiled, 2 wrong use (an option, a target, a file).
    """


@app.command()
def options() -> None:
    """Print every setting of the compiler as YAML: its default, and what it does.

    The same names are taken by torch.compile(..., backend="fxzero", options={...}), by
    fxzero.compile_step(..., options={...}), by `fxzero inspect --options` as JSON, and by Hydra.
    """
    typer.echo(options_yaml(), nl=False)


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="Where the model is made: package.module:factory or file.py:factory. The function "
            "takes no arguments and returns a model that has example_inputs(batch_size), or "
            "(model, inputs): a tensor, a tuple, or a dict of keyword arguments."
        ),
    ],
    zero: Annotated[
        int,
        typer.Option(
            min=0,
            max=3,
            help="ZeRO stage. 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also "
            "parameters.",
        ),
    ] = 3,
    world_size: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Ranks to compile for; none of them is started.")
    ] = DEFAULT_WORLD_SIZE,
    rank: Annotated[
        int, typer.Option(min=0, help="The rank whose graph to show, from 0 to world size - 1.")
    ] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows of this rank's batch, passed to example_inputs(). Default: 2 for each "
            "micro-batch.",
        ),
    ] = None,
    param_dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype to gather and compute in. Default: that of the parameters."),
    ] = None,
    reduce_dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype that gradients travel in. Default: that of the parameters."),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Keep shards in the host's memory: shard(offload=True)."),
    ] = False,
    step: Annotated[
        bool,
        typer.Option("--step", help="Compile the whole step: compile_step with AdamW."),
    ] = False,
    clip_grad_norm: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="With --step: the norm that gradients are clipped to, as in your compile_step; 0 "
            "does not clip.",
        ),
    ] = 1.0,
    micro_batches: Annotated[
        int,
        typer.Option(min=1, max=1024, help="With --step: equal parts that each batch is split in."),
    ] = 1,
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
    inference: Annotated[
        bool, typer.Option("--inference", help="Compile a forward alone, without gradients.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Machine to decide and simulate for: a name in conf/cluster (dgx_h100, laptop, "
            "…), or a YAML file with the same keys. Default: guessed from this one."
        ),
    ] = None,
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
    options: Annotated[
        str,
        typer.Option(
            help="""Settings of the compiler as JSON: '{"prefetch": {"distance": 2}}'. """
            "`fxzero options` lists them."
        ),
    ] = "{}",
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
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show an error's traceback, and what torch logs.")
    ] = False,
) -> None:
    """Compile a model's training step for any number of ranks, and show what was decided.

    Runs in one process, with no accelerator and no memory for the model.

    Examples:

    fxzero inspect examples.models:gpt_nano --zero 3 --world-size 1024 --cluster dgx_h100

    fxzero inspect model.py:tiny --step --micro-batches 4 --diff accumulate

    fxzero inspect model.py:tiny --step --micro-batches 8 --mesh 4x2 --schedule zb_h1

    fxzero inspect model.py:tiny --step --memory --options '{"memory_budget": "400MiB"}'
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width: do not fold what may be searched
    with as_sentences(traceback):
        check_companions(
            {
                "--micro-batches": (micro_batches > 1, "--step", step),
                "--mesh": (mesh is not None, "--step", step),
                "--schedule": (schedule != "1f1b", "--mesh", mesh is not None),
                "--clip-grad-norm": (clip_grad_norm != 1.0, "--step", step),
                "--inference": (inference, "no --step", not step),
                "--reduce-dtype": (reduce_dtype is not None, "no --inference", not inference),
            }
        )
        pipeline_ranks, world_size = mesh_of(mesh, world_size)
        if rank >= world_size:
            raise ConfigError(f"rank {rank} is not in a world of {world_size} ranks")
        config = settings_of(options, cluster, keep_text=diff is not None)
        if diff is not None:
            check_pass(diff, config, step)
        check_file("--trace", trace)
        check_file("--plan", plan)
        settings: dict[str, Any] = {
            "zero": zero,
            "world_size": world_size,
            "rank": rank,
            "batch_size": batch_size,
            "param_dtype": getattr(torch, param_dtype.value) if param_dtype else None,
            "reduce_dtype": getattr(torch, reduce_dtype.value) if reduce_dtype else None,
            "offload": offload,
            "clip_grad_norm": clip_grad_norm or None,
            "options": config,
        }
        pipeline = None
        if pipeline_ranks:
            if schedule != AUTO:
                table_of(schedule, pipeline_ranks, micro_batches)  # raises before it takes time
            micro_step = micro_step_of(load(target), micro_batches=micro_batches, **settings)
            captured = micro_step.capture
            pipeline = under(schedule, micro_step, pipeline_ranks, micro_batches)
        else:
            captured = capture(
                load(target),
                training=not inference,
                step=step,
                micro_batches=micro_batches,
                **settings,
            )
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
                tables.print_pipeline(console, pipeline)
            else:
                tables.print_analysis(console, Analysis.of(captured, memory=memory))
        else:
            for text in tables.diffs(captured, diff) if diff is not None else []:
                tables.print_text(console, text, "diff")
            for text in tables.codes(captured) if code else []:
                tables.print_text(console, text, "python")


def mesh_of(text: str | None, world_size: int) -> tuple[int, int]:
    """Of ``4x2``: ranks of the pipeline, and ranks that share a stage; none and all without one.

    Raises:
        ConfigError: it is no such text, or the world has another size.
    """
    if text is None:
        return 0, world_size
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise ConfigError(f"--mesh {text}: write pipeline ranks x ranks of each stage, as in 4x2")
    pipeline, shared = int(match[1]), int(match[2])
    if world_size not in (DEFAULT_WORLD_SIZE, pipeline * shared):
        raise ConfigError(f"--mesh {text} has {pipeline * shared} ranks, --world-size {world_size}")
    return pipeline, shared


def check_file(option: str, path: Path | None) -> None:
    """See, before anything is compiled, that a file can be written.

    Raises:
        ConfigError: it is a folder, or in none.
    """
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no folder {str(path.parent)!r}. Name a file in a folder "
            "that exists."
        )
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file in it.")


def check_companions(wants: dict[str, tuple[bool, str, bool]]) -> None:
    """See that each option that is used has what it means something with.

    Args:
        wants: by option, whether it is used, what it needs beside it, and whether that is so.

    Raises:
        ConfigError: one has no meaning here.
    """
    for option, (used, needed, given) in wants.items():
        if used and not given:
            raise ConfigError(f"{option} has a meaning only with {needed}")


def settings_of(text: str, cluster: str | None, keep_text: bool) -> Config:
    """The compiler's settings, of ``--options`` and ``--cluster``.

    Raises:
        ConfigError: they are no settings, or contradict each other.
    """
    values = read_json(text)
    if cluster is not None:
        cost = values.get("cost", {})
        own = cost.get("cluster", cluster) if isinstance(cost, dict) else cluster
        if own != cluster:
            raise ConfigError(f"--cluster {cluster} and --options' cost.cluster={own!r} differ")
        if isinstance(cost, dict):
            values["cost"] = {**cost, "cluster": cluster}
    if keep_text:
        values["keep_text"] = True
    return Config.from_options(values)


def read_json(text: str) -> dict[str, Any]:
    """A JSON object whose keys stand there once."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"--options={text!r} sets {', '.join(twice)} twice")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"--options={text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--options={text!r} must be a JSON object")
    return value


def check_pass(name: str, config: Config, step: bool) -> None:
    """See that a pass of that name will run.

    Raises:
        ConfigError: none does.
    """
    pipelines = step_passes(config) if step else loop_passes(config)
    known = {p.name for p in (*pipelines.scheduling, *pipelines.lowering)}
    if name not in known:
        raise ConfigError(f"--diff: no pass {name!r} runs here: {nearest(name, known)}")
