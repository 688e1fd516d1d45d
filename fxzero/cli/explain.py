"""``fxzero explain``: why something is as it is."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxzero.cli.arguments import (
    DEFAULT_WORLD_SIZE,
    DUMP_HELP,
    TARGET_HELP,
    BatchOption,
    ClipOption,
    ClusterOption,
    InputsOption,
    JsonOption,
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
)
from fxzero.cli.failures import as_sentences
from fxzero.cli.subject import Subject
from fxzero.cli.terminal import console
from fxzero.inspect.explain import Explanation
from fxzero.inspect.explain import explain as explained


def explain(
    target: Annotated[str, typer.Argument(help=TARGET_HELP + DUMP_HELP)],
    what: Annotated[
        str,
        typer.Argument(
            help="A node, a parameter, a module (or a pattern of modules: 'blocks.*.mlp'), a "
            "bucket or a pass, by name."
        ),
    ],
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
    cluster: ClusterOption = None,
    options: OptionsOption = "{}",
    as_json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Say why something is as it is: gathered here, kept, repeated, not overlapped, not lowered.

    With the numbers that decided, what the next best choice would cost, and the options that would
    change it. Times are the cost model's.

    Examples:

    fxzero explain examples.models:gpt_nano reduce.backward.0 --cluster dgx_h100

    fxzero explain examples.models:gpt_nano 'blocks.*.mlp' --step --micro-batches 2

    fxzero explain DUMP prefetch
    """
    arguments = dict(locals())
    with as_sentences(traceback):
        subject = Subject.of(arguments)
        subject.check()
        found = explained(subject.analysis(), what)
        if as_json:
            typer.echo(json.dumps([one.to_json() for one in found], indent=1))
            return
        for one in found:
            print_explanation(console(), one)


def print_explanation(out: Console, found: Explanation) -> None:
    """Questions and answers, then the options."""
    out.print(f"[bold]{escape(found.kind)} {escape(found.name)}[/]", highlight=False)
    out.print(_indented(out, found.title), highlight=False, markup=False)
    for answer in found.answers:
        out.print(f"\n[bold]{escape(answer.question)}[/]", highlight=False)
        out.print(_indented(out, answer.text), highlight=False, markup=False)
    if found.settings:
        table = Table("option", "now", "what it changes")
        for setting in found.settings:
            table.add_row(*map(escape, (setting.option, setting.now, setting.effect)))
        out.print()
        out.print(table)
    out.print()


def _indented(out: Console, text: str) -> str:
    """Paragraphs two columns in, as wide as there is room, and no more than is read with ease."""
    return textwrap.fill(
        text,
        width=min(out.width, 120),
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
