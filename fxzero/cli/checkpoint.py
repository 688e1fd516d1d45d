"""``fxzero checkpoint``: what is in a folder of checkpoints, whether it is whole, what differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxzero.checkpoint.comparing import Compared, compare
from fxzero.checkpoint.listing import Listed, list_checkpoints
from fxzero.checkpoint.opened import Opened, find, find_all
from fxzero.checkpoint.verifying import Verified, verify
from fxzero.cli.arguments import JsonOption, TracebackOption
from fxzero.cli.failures import FAILED, as_sentences
from fxzero.cli.terminal import console
from fxzero.inspect.units import size

MOST_ROWS = 60
"""Differences that a terminal shows; JSON has all."""

checkpoint = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder of checkpoints, or one of them.")
]


@checkpoint.callback()
def of_checkpoints() -> None:
    """Look at checkpoints without a model: list them, check every byte, compare two.

    No GPU and no other rank is needed, and nothing is unpickled. Exit codes: 0 done, 1 something is
    not whole, or differs, 2 wrong use.
    """


@checkpoint.command("ls")
def ls(
    folder: FolderArgument, as_json: JsonOption = False, traceback: TracebackOption = False
) -> None:
    """List checkpoints, oldest first, and see that every file is there and as long as it was.

    Quick: no file but the manifests is read. Exit code 1: one is not whole.

    Examples:

    fxzero checkpoint ls checkpoints
    """
    with as_sentences(traceback, "The checkpoint could not be read"):
        found = list_checkpoints(folder)
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
        else:
            print_list(console(), found)
        if not found.are_whole:
            raise typer.Exit(FAILED)


def print_list(out: Console, found: Listed) -> None:
    """A row a checkpoint."""
    table = Table("checkpoint", "step", "written", "size", "layout", "versions", "")
    for column in (1, 3):
        table.columns[column].justify = "right"
    for row in found.rows:
        manifest = row.manifest
        state = "[bold red]not whole[/]" if row.fault else "[green]whole[/]"
        if manifest is None:
            table.add_row(escape(row.path.name), row.step_text, "", "", "", "", state)
            continue
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        table.add_row(
            escape(row.path.name),
            row.step_text,
            escape(manifest.written),
            size(manifest.tensor_bytes),
            escape(manifest.layout),
            escape(versions),
            state,
        )
    if found.rows:
        out.print(table)
    else:
        out.print(f"no checkpoint in {found.folder}", highlight=False, markup=False)
    for row in found.rows:
        if row.fault:
            out.print(row.fault, highlight=False, markup=False, soft_wrap=True)
    for name in found.unfinished:
        out.print(f"{name}: being written, or left by a job that ended", markup=False)


@checkpoint.command("verify")
def verify_command(
    folder: FolderArgument,
    step: Annotated[
        int | None, typer.Option(min=0, help="Only the one of this step. Default: all of them.")
    ] = None,
    as_json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Read every byte of checkpoints and compare its hash; see that every tensor is all there.

    Also read are the values, such as schedules and generators. A checkpoint that
    torch.distributed.checkpoint.save has written has no hashes: its archives' checksums are
    compared. Exit code 1: one is not whole.

    Examples:

    fxzero checkpoint verify checkpoints

    fxzero checkpoint verify checkpoints --step 100 --json
    """
    with as_sentences(traceback, "The checkpoint could not be read"):
        found = []
        for path in find_all(folder, step):
            found.append(verify(path))
            if not as_json:
                print_verified(console(), found[-1])
        if as_json:
            typer.echo(json.dumps([each.to_json() for each in found], indent=1))
        if not all(each.is_whole for each in found):
            raise typer.Exit(FAILED)


def print_verified(out: Console, found: Verified) -> None:
    """A line of what was read, and one for each fault."""
    word = "[green]whole[/]" if found.is_whole else "[bold red]not whole[/]"
    by = "" if found.has_hashes else ", by the checksums of its archives: it has no hashes"
    out.print(
        f"{escape(str(found.path))}: {word}; {found.num_tensors} tensors, {found.num_files} files, "
        f"{size(found.num_bytes)} in {found.seconds:.2f} s, "
        f"{found.bytes_per_s / 1e6:,.0f} MB/s{by}",
        highlight=False,
    )
    for fault in found.faults:
        out.print(f"  {escape(str(fault))}", highlight=False, soft_wrap=True)


@checkpoint.command("diff")
def diff(
    before: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder of some: its newest whole one.")
    ],
    after: Annotated[Path, typer.Argument(help="The other one, alike.")],
    as_json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and all values of tensors and of the rest.

    Tensors are compared whole, whatever the layouts were, and read a few at a time. Exit code 1:
    something differs, or one of them is not whole.

    Examples:

    fxzero checkpoint diff monday tuesday

    fxzero checkpoint diff checkpoints/step-0000000100 checkpoints
    """
    with as_sentences(traceback, "The checkpoint could not be read"):
        found = compare(Opened(find(before)), Opened(find(after)))
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
        else:
            print_compared(console(), found)
        if not found.is_equal:
            raise typer.Exit(FAILED)


def print_compared(out: Console, found: Compared) -> None:
    """What is on one side, then what differs, the most first."""
    out.print(f"{found.before} → {found.after}", highlight=False, markup=False, soft_wrap=True)
    for side, names in (("before", found.only_before), ("after", found.only_after)):
        if names:
            _print_rows(out, [f"tensors only {side}"], [(name,) for name in names])
    if found.forms:
        forms = [(row.name, row.before, row.after) for row in found.forms]
        _print_rows(out, ["tensor", "before", "after"], forms)
    if found.tensors:
        columns = ["tensor", "largest difference", "of its largest", "elements", "not finite"]
        largest_first = sorted(found.tensors, key=lambda r: (-r.num_non_finite, -r.relative))
        rows = [
            (
                row.name,
                f"{row.largest:.3e}",
                f"{row.relative:.3e}",
                f"{row.num_different:,} of {row.num_elements:,}",
                str(row.num_non_finite or ""),
            )
            for row in largest_first
        ]
        _print_rows(out, columns, rows)
    if found.values:
        values = [(row.path, row.before, row.after) for row in found.values]
        _print_rows(out, ["value", "before", "after"], values)
    equal = "nothing differs; " if found.is_equal else ""
    out.print(f"{equal}{found.num_equal} tensors are equal", highlight=False)
    for text in found.skipped:
        out.print(f"not compared: {text}", highlight=False, markup=False)


def _print_rows(out: Console, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(*columns)
    for row in rows[:MOST_ROWS]:
        table.add_row(*map(escape, row))
    out.print(table)
    left = len(rows) - MOST_ROWS
    if left > 0:
        out.print(f"and {left} more: --json shows all")
