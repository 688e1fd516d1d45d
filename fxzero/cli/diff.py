"""``fxzero diff``: two steps side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxzero.cli.arguments import (
    DEFAULT_WORLD_SIZE,
    BatchOption,
    ClusterOption,
    InputsOption,
    JsonOption,
    MicroBatchesOption,
    OptionsOption,
    ParamDtypeOption,
    RankOption,
    SeqLenOption,
    StepOption,
    TracebackOption,
    WorldSizeOption,
    ZeroOption,
)
from fxzero.cli.failures import FAILED, as_sentences
from fxzero.cli.subject import Subject
from fxzero.cli.terminal import console
from fxzero.errors import ConfigError
from fxzero.inspect.compare import Comparison, Decided, compare
from fxzero.inspect.units import duration, size

MOST_ROWS = 60
"""Differences that a terminal shows; JSON has all."""


def diff(
    before: Annotated[
        str,
        typer.Argument(
            help="A folder that a run has dumped to, a plan file, or a target as for inspect."
        ),
    ],
    after: Annotated[
        str | None,
        typer.Argument(help="The same, of the other side. Default: the first one once more."),
    ] = None,
    zero: ZeroOption = 3,
    world_size: WorldSizeOption = DEFAULT_WORLD_SIZE,
    rank: RankOption = 0,
    batch_size: BatchOption = None,
    seq_len: SeqLenOption = None,
    inputs: InputsOption = None,
    param_dtype: ParamDtypeOption = None,
    step: StepOption = False,
    micro_batches: MicroBatchesOption = 1,
    cluster: ClusterOption = None,
    options: OptionsOption = "{}",
    other_options: Annotated[
        str | None, typer.Option(help="Of the other side. Default: as of the first.")
    ] = None,
    other_zero: Annotated[
        int | None, typer.Option(min=0, max=3, help="The other side's. Default: the first's.")
    ] = None,
    other_cluster: Annotated[
        str | None, typer.Option(help="The other side's. Default: the first's.")
    ] = None,
    as_json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Show which settings and decisions differ, and what that does to time and bytes.

    Ends with 0 if nothing differs, with 1 if something does, with 2 where there is no answer.

    Examples:

    fxzero diff model.py:tiny --cluster dgx_h100 --other-options '{"bucket": {"cap_bytes": 500000}}'

    fxzero diff examples.models:gpt_nano --zero 2 --other-zero 3 --cluster dgx_h100

    fxzero diff DUMP_OF_MONDAY DUMP_OF_TUESDAY
    """
    arguments = dict(locals())
    with as_sentences(traceback):
        one = Subject.of(arguments, target=before)
        other = replace(
            one,
            target=before if after is None else after,
            options=options if other_options is None else other_options,
            zero=zero if other_zero is None else other_zero,
            cluster=cluster if other_cluster is None else other_cluster,
            side="other-",
        )
        if one == other:
            raise ConfigError(
                "both sides are the same. Name another target, dump or plan, or --other-options, "
                "--other-zero or --other-cluster."
            )
        for subject in (one, other):
            if not _is_plan(subject):
                subject.check()
        found = compare(_decided(one), _decided(other))
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
        else:
            print_comparison(console(), found)
        if found.differences:
            raise typer.Exit(FAILED)


def _is_plan(subject: Subject) -> bool:
    """Whether it is a plan, and no analysis: both are JSON."""
    path = Path(subject.target)
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        return "schedules" not in json.loads(path.read_text())
    except (OSError, ValueError):
        return True  # whose reader says what is wrong


def _decided(subject: Subject) -> Decided:
    if _is_plan(subject):
        return Decided.of_plan(Path(subject.target))
    return Decided.of(subject.analysis())


def print_comparison(out: Console, found: Comparison) -> None:
    """The figures, then what differs."""
    table = Table("", "before", "after", "change")
    for column in (1, 2, 3):
        table.columns[column].justify = "right"
    for figure in found.figures:
        shown = {"_us": duration, "_bytes": size}
        show = next((s for end, s in shown.items() if figure.name.endswith(end)), "{:,.0f}".format)
        change = (
            f"{(figure.after - figure.before) / figure.before:+.2%}" if figure.before else "new"
        )
        name = figure.name.removesuffix("_us").removesuffix("_bytes").replace("_", " ")
        table.add_row(name, show(figure.before), show(figure.after), change)
    out.print(table)
    if not found.differences:
        out.print("no setting and no decision differs")
        return
    table = Table("decided by", "what", "before", "after")
    for row in found.differences[:MOST_ROWS]:
        table.add_row(*map(escape, (row.where, row.what, row.before, row.after)))
    out.print(table)
    left = len(found.differences) - MOST_ROWS
    if left > 0:
        out.print(f"and {left} more: --json shows all")
