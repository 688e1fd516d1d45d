"""Commands and their options; what they print is in `fxzero.cli.tables`."""

from __future__ import annotations

import importlib
import inspect as inspect_module
import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from fxzero.cli import tables
from fxzero.errors import ConfigError, FxZeroError, nearest
from fxzero.inspect import Plan, capture
from fxzero.inspect.trace import write_trace

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    """Dtypes by their torch names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.callback()
def fxzero() -> None:
    """A compiler for distributed training steps in PyTorch."""


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="Where the model is made: package.module:factory.")],
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to compile for.")] = 8,
    rank: Annotated[int, typer.Option(min=0, help="The rank whose graph to show.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Passed to example_inputs().")] = 2,
    param_dtype: Annotated[Dtype | None, typer.Option(help="Dtype to compute in.")] = None,
    reduce_dtype: Annotated[Dtype | None, typer.Option(help="Dtype to reduce in.")] = None,
    step: Annotated[
        bool, typer.Option(help="Compile the whole step: compile_step, AdamW, clipping.")
    ] = False,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a whole step.")] = 1,
    inference: Annotated[bool, typer.Option(help="Compile a forward alone.")] = False,
    cluster: Annotated[
        str, typer.Option(help="Machine to decide for: a name in conf/cluster, or a YAML file.")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Write the simulated step here, for ui.perfetto.dev.")
    ] = None,
    options: Annotated[
        str, typer.Option(help="""Backend options as JSON: '{"prefetch": {"distance": 2}}'.""")
    ] = "{}",
    diff: Annotated[str, typer.Option(help="Show what this pass changed.")] = "",
    code: Annotated[bool, typer.Option(help="Show the scheduled graph as Python.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: the plan, and with --diff or --code those too."),
    ] = False,
) -> None:
    """Compile a model's training step for any number of ranks, and show what was decided.

    Runs in one process, with no accelerator and no memory for the model.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width: do not fold what may be searched
    try:
        if micro_batches > 1 and not step:
            raise ConfigError("--micro-batches has a meaning only with --step")
        if step and inference:
            raise ConfigError("--inference compiles a forward alone, --step everything: take one")
        build = load(target)
        settings = _mapping(options)
        if cluster:
            settings["cost"] = {**settings.get("cost", {}), "cluster": cluster}
        captured = capture(
            build,
            zero=zero,
            world_size=world_size,
            rank=rank,
            batch_size=batch_size,
            param_dtype=getattr(torch, param_dtype.value) if param_dtype else None,
            reduce_dtype=getattr(torch, reduce_dtype.value) if reduce_dtype else None,
            training=not inference,
            step=step,
            micro_batches=micro_batches,
            options={**settings, "keep_text": bool(diff)},
        )
        if trace is not None:
            write_trace(trace, captured)
        plan = Plan.of(captured)
        if as_json:
            data = plan.to_json()
            if diff:
                data["diffs"] = tables.diffs(captured, diff)
            if code:
                data["code"] = tables.codes(captured)
            typer.echo(json.dumps(data, indent=1, default=str))
        elif not (diff or code):
            tables.print_plan(console, plan)
        else:
            texts = tables.diffs(captured, diff) if diff else []
            for text in texts:
                tables.print_text(console, text, "diff")
            for text in tables.codes(captured) if code else []:
                tables.print_text(console, text, "python")
    except FxZeroError as error:
        message = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0]
        Console(stderr=True).print(
            f"[bold red]{type(error).__name__}[/]: {escape(message)}", highlight=False
        )
        raise typer.Exit(1) from None


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--options={text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--options={text!r} must be a JSON object")
    return value


def load(target: str) -> Callable[[], Any]:
    """Import ``package.module:factory``, from the working directory too.

    Raises:
        ConfigError: there is no such module, or it has no such function.
    """
    module_name, _, name = target.partition(":")
    if not name:
        raise ConfigError(f"{target!r} names no factory. Write package.module:factory.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import {module_name!r} from {Path.cwd()}: {error}. Run from the folder that "
            "holds it, or install it."
        ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [n for n, value in vars(module).items() if inspect_module.isfunction(value)]
        raise ConfigError(f"{module_name} has no function {name!r}: {nearest(name, known)}")
    return factory
