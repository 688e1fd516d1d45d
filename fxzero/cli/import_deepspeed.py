"""``fxzero import-deepspeed``: what becomes of DeepSpeed's JSON, key by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxzero.cli.arguments import TracebackOption
from fxzero.cli.failures import NO_ANSWER, as_sentences
from fxzero.cli.terminal import console
from fxzero.errors import ConfigError
from fxzero.integrations.deepspeed import Examined, FromDeepSpeed, Line, Verdict, examine
from fxzero.integrations.deepspeed.lines import shown

STYLES = {Verdict.MAPPED: "green", Verdict.NEEDLESS: "dim", Verdict.REFUSED: "bold red"}


def import_deepspeed(
    file: Annotated[Path, typer.Argument(help="DeepSpeed's configuration, as JSON.")],
    world_size: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Ranks that read rows of their own.")
    ] = 1,
    deepspeed_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="The DeepSpeed that it was written for, where defaults differ: 0.19.8.",
        ),
    ] = None,
    auto: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help='What "auto" stands for, by the names of TrainingArguments: '
            "'{\"learning_rate\": 5e-5}'.",
        ),
    ] = "{}",
    leave_out: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A key to do without, by its path. Several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Show what becomes of each key of a DeepSpeed configuration, and the settings it comes to.

    A key is mapped, needless, or refused; each line says why. Exit code 2: something is refused.

    Examples:

    fxzero import-deepspeed ds_config.json --world-size 8 --deepspeed-version 0.19.8

    fxzero import-deepspeed ds_config.json --leave-out tensorboard --json

    fxzero import-deepspeed zero3.json --auto '{"learning_rate": 5e-5, "hidden_size": 4096}'
    """
    with as_sentences(traceback):
        examined = examine(
            file,
            world_size=world_size,
            deepspeed_version=deepspeed_version,
            leave_out=leave_out or (),
            **_values(auto),
        )
        if as_json:
            typer.echo(json.dumps(to_json(examined), indent=1))
        else:
            print_examined(console(), examined)
        if examined.result is None:
            raise typer.Exit(NO_ANSWER)


def _values(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--auto {text!r} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--auto {text!r} must be an object: '{{\"learning_rate\": 5e-5}}'")
    return values


def to_json(examined: Examined) -> dict[str, Any]:
    """The settings (null where something is refused), and a line a key."""
    return {
        "settings": None if examined.result is None else examined.result.to_json(),
        "lines": [
            {"key": line.key, "value": line.value, "verdict": line.verdict, "reason": line.reason}
            for line in examined.lines
        ],
    }


def print_examined(out: Console, examined: Examined) -> None:
    """A table of the keys, and the settings below it."""
    out.print(_table(examined.lines))
    counts = [f"{sum(x.verdict is v for x in examined.lines)} {v}" for v in Verdict]
    out.print(f"{examined.source}: {', '.join(counts)}", highlight=False)
    if examined.result is not None:
        for line in settings_lines(examined.result):
            out.print(line, highlight=False, markup=False)


def _table(lines: tuple[Line, ...]) -> Table:
    table = Table("key", "value", "", "what becomes of it")
    for line in lines:
        verdict = f"[{STYLES[line.verdict]}]{line.verdict}[/]"
        table.add_row(escape(line.key), escape(shown(line.value)), verdict, escape(line.reason))
    return table


def settings_lines(made: FromDeepSpeed) -> list[str]:
    """What somebody would write who knew fxzero."""
    dtypes = [
        f"{name}={dtype}"
        for name, dtype in (("param_dtype", made.param_dtype), ("reduce_dtype", made.reduce_dtype))
        if dtype is not None
    ]
    offload = ["offload=True"] if made.offload else []
    lines = [f"fxzero.shard({', '.join(['model', f'zero={made.zero}', *dtypes, *offload])})"]
    if made.make_optimizer is not None:
        lines.append(f"optimizer: {made.make_optimizer}")
    if made.make_scheduler is not None:
        said = ", ".join(f"{key}={value}" for key, value in made.make_scheduler.settings.items())
        lines.append(f"scheduler: {made.make_scheduler.kind}({said})")
    clip = f", clip_grad_norm={made.clip_grad_norm:g}" if made.clip_grad_norm else ""
    schedule = "" if made.make_scheduler is None else ", scheduler=scheduler"
    parts = f"micro_batches={made.micro_batches}{clip}{schedule}, options=options"
    lines.append(f"fxzero.compile_step(model, optimizer, {parts})")
    lines.append(f"options: {json.dumps(made.options)}")
    lines.append(
        f"rows: {made.train_batch_size} a step, {made.rows_per_rank} a rank, {made.rows} a "
        "micro-batch"
    )
    return lines
