"""The commands, a file each."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from fxzero import __version__
from fxzero.cli.bisect import bisect
from fxzero.cli.checkpoint import checkpoint
from fxzero.cli.diff import diff
from fxzero.cli.doctor import doctor
from fxzero.cli.estimate import estimate
from fxzero.cli.explain import explain
from fxzero.cli.export import export
from fxzero.cli.import_deepspeed import import_deepspeed
from fxzero.cli.inspect import inspect
from fxzero.cli.options import options
from fxzero.cli.report import report
from fxzero.cli.trace import trace

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def print_version(wanted: bool) -> None:
    """What is installed, and what it compiles for."""
    if wanted:
        typer.echo(f"fxzero {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def fxzero(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print versions and exit."
        ),
    ] = False,
) -> None:
    """A compiler for distributed training steps in PyTorch.

    Exit codes: 0 done, 1 a finding (something differs, does not fit, or does not work here), 2 no
    answer (an option, a target or a file is wrong, or the model cannot be compiled).
    """
    context.obj = __version__


for command in (
    *(bisect, diff, doctor, estimate, explain, export),
    *(import_deepspeed, inspect, options, report, trace),
):
    app.command()(command)
app.add_typer(checkpoint, name="checkpoint")
