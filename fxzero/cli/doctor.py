"""``fxzero doctor``: what of this machine works, what does not, what to do, and how fast it is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxzero.cli.arguments import TracebackOption, check_companions, check_file
from fxzero.cli.failures import FAILED, as_sentences
from fxzero.cli.terminal import console
from fxzero.doctor import Examination, Verdict, examine
from fxzero.doctor.cluster_file import check_name, write
from fxzero.errors import ConfigError

STYLES = {Verdict.OK: "green", Verdict.WARN: "bold yellow", Verdict.FAIL: "bold red"}


def doctor(
    context: typer.Context,
    write_to: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write this machine's figures to FILE, as a cluster: cluster.yaml.",
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder on the disk to measure, which takes 256 MiB for a moment. Default: the "
            "system's temporary one.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only see what works, and measure nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON; `docs/doctor.md` says what it has.")
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """See what of this machine works, what does not and what to do, and measure how fast it is.

    The file that --write makes is a cluster: steps are then decided and simulated for this machine.
    Links are measured between ranks, so start as many as will train. Exit code 1: something that
    is needed does not work.

    Examples:

    fxzero doctor

    fxzero doctor --quick --json

    torchrun --nproc-per-node 2 -m fxzero doctor --write cluster.yaml --disk /nvme/scratch

    fxzero estimate gpt-lite --world-size 2 --cluster cluster.yaml
    """
    with as_sentences(traceback):
        check_companions({"--write": (write_to is not None, "measuring: no --quick", not quick)})
        check_companions({"--disk": (disk is not None, "measuring: no --quick", not quick)})
        check_file("--write", write_to)
        if write_to is not None:
            check_name("--write", write_to)
        if disk is not None and not disk.is_dir():
            raise ConfigError(f"--disk {disk}: there is no such folder. Name one that exists.")
        folder = disk or Path(tempfile.gettempdir())
        found = examine(context.obj, disk=folder, measures=not quick)
        if found.rank == 0:
            if write_to is not None and found.cluster is not None:
                write(write_to, found.cluster)
            if as_json:
                written = str(write_to) if write_to is not None and found.cluster else None
                typer.echo(json.dumps({**found.to_json(), "file": written}, indent=1))
            else:
                print_examination(console(), found)
                if write_to is not None and found.cluster is not None:
                    typer.echo(f"written: {write_to}. Use it by --cluster {write_to}")
        if not found.is_fine:
            raise typer.Exit(FAILED)


def print_examination(out: Console, found: Examination) -> None:
    """A line a check, what to do below it, and the sum."""
    table = Table("", "check", "found")
    for checked in found.checks:
        text = escape(checked.found)
        if checked.advice:
            text += f"\n→ {escape(checked.advice)}"
        style = STYLES[checked.verdict]
        table.add_row(f"[{style}]{checked.verdict}[/]", escape(checked.name), text)
    out.print(table)
    counts = [f"{sum(c.verdict is verdict for c in found.checks)} {verdict}" for verdict in Verdict]
    ranks = "one rank" if found.world_size == 1 else f"{found.world_size} ranks"
    out.print(f"{', '.join(counts)}; {ranks}, {found.seconds:.1f} s", highlight=False)
