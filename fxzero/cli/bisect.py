"""``fxzero bisect``: which pass changes the numbers, or takes the time."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxzero.cli.arguments import (
    TARGET_HELP,
    BatchOption,
    ClusterOption,
    InputsOption,
    JsonOption,
    MicroBatchesOption,
    OptionsOption,
    SeqLenOption,
    StepOption,
    TracebackOption,
    ZeroOption,
    check_companions,
    settings_of,
)
from fxzero.cli.failures import FAILED, as_sentences
from fxzero.cli.terminal import console
from fxzero.errors import ConfigError
from fxzero.graph.steady import UNROLLED
from fxzero.inspect.bisect import Case, Finding, Timed, slow
from fxzero.inspect.bisect import bisect as bisected
from fxzero.inspect.dump import is_dump
from fxzero.inspect.targets import Sizes, load
from fxzero.ranks.groups import init_distributed


class ComparedIn(StrEnum):
    """Dtypes that a step can be compared in."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def bisect(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    zero: ZeroOption = 3,
    world_size: Annotated[
        int, typer.Option(min=1, max=16, help="Ranks, all of which run in this process.")
    ] = 2,
    batch_size: BatchOption = None,
    seq_len: SeqLenOption = None,
    inputs: InputsOption = None,
    dtype: Annotated[
        ComparedIn,
        typer.Option(
            help="What the model and its batch are cast to: in float64 rounding hides nothing."
        ),
    ] = ComparedIn.FLOAT64,
    step: StepOption = False,
    clip_grad_norm: Annotated[
        float, typer.Option(min=0.0, help="With --step: the norm to clip to; 0 does not clip.")
    ] = 0.0,
    micro_batches: MicroBatchesOption = 1,
    cluster: ClusterOption = None,
    options: OptionsOption = "{}",
    times: Annotated[
        bool,
        typer.Option(
            "--time",
            help="Instead: time steps with each pass switched off that can be. Under torchrun on "
            "all of its ranks, else on one.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of parameters and batches.")] = 0,
    as_json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Name the pass that changes what a step computes.

    Makes the model with real values, compiles it for some ranks, and runs the graph behind each
    pass, all ranks in lockstep in this process, against the model run eagerly on the same batches:
    loss, gradients and, with --step, parameters behind an AdamW update. What may be read before it
    is there, or after its release, is NaN meanwhile. Dropout draws nothing.

    Ends with 0 if every graph gives the right result, with 1 and the pass if one does not.

    Examples:

    fxzero bisect examples.models:gpt_nano

    fxzero bisect model.py:tiny --step --micro-batches 2 --options '{"memory_budget": "400MiB"}'

    torchrun --nproc-per-node 2 -m fxzero bisect model.py:tiny --time
    """
    with as_sentences(traceback):
        check_companions(
            {
                "--micro-batches": (micro_batches > 1, "--step", step),
                "--clip-grad-norm": (clip_grad_norm > 0, "--step", step),
                "--world-size": (world_size != 2, "no --time: torchrun says it", not times),
            }
        )
        if is_dump(target):
            raise ConfigError(
                f"{target} is a dump: it has shapes, and no values to run with. Name the model."
            )
        if micro_batches > UNROLLED and not times:
            raise ConfigError(
                f"--micro-batches {micro_batches}: more than {UNROLLED} run in a loop, whose graph "
                f"is not run behind each pass. Take {UNROLLED} or fewer: the passes are the same."
            )
        config = settings_of(options, cluster, keep_text=False)
        if not times and config.gather_ahead.enabled:
            # What the step before has started is not in the graph that runs here.
            config = replace(config, gather_ahead=replace(config.gather_ahead, enabled=False))
        config = replace(config, dump="")  # what is made here is thrown away
        case = Case(
            load(target).build,
            Sizes(batch_size, seq_len, inputs),
            zero,
            world_size,
            getattr(torch, dtype.value),
            step,
            micro_batches,
            clip_grad_norm or None,
            config,
            seed,
        )
        if times:
            _time(case, as_json)
            return
        found = bisected(case)
        if as_json:
            typer.echo(json.dumps(_finite(found.to_json()), indent=1))
        else:
            print_finding(console(), found, step)
        if found.culprit is not None:
            raise typer.Exit(FAILED)


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: what could not be compared is null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def print_finding(out: Console, found: Finding, step: bool) -> None:
    """A row a graph, then the pass."""
    table = Table("graph", "part", "behind", "tensors", "largest difference", "of")
    for column in (0, 3, 4):
        table.columns[column].justify = "right"
    for check in found.checks:
        wrong = check.fails(found.tolerance)
        shown = "did not run" if check.error else f"{check.difference:.1e}"
        table.add_row(
            str(check.graph),
            check.part,
            check.behind,
            str(check.num_tensors),
            f"[bold red]{shown}[/]" if wrong else shown,
            escape(check.worst),
        )
    out.print(table)
    if found.note:
        out.print(found.note, highlight=False, soft_wrap=True)
    culprit = found.culprit
    if culprit is None:
        left_out = " gather_ahead was off: it works across steps." if step else ""
        out.print(
            f"no pass changes a result, within {found.tolerance:.0e} of the tensor's largest "
            f"element.{left_out}",
            highlight=False,
        )
        return
    named = {"capture": "the capture", "": "the compiler"}
    where = named.get(culprit.behind, f"the pass {culprit.behind}")
    what = (
        f"its graph does not run: {culprit.error}"
        if culprit.error
        else f"{culprit.worst} differs by {culprit.difference:.3g} of its largest element, on rank "
        f"{culprit.rank}"
    )
    out.print(f"[bold red]{escape(where)}[/]: {escape(what)}", highlight=False, soft_wrap=True)
    for item in found.decisions:
        out.print(f"  right without {escape(item)}", highlight=False, soft_wrap=True)


def _time(case: Case, as_json: bool) -> None:
    """Time steps, on every rank of torchrun's world."""
    if "RANK" in os.environ:
        init_distributed()
    rows = slow(replace(case, dtype=torch.float32 if case.dtype == torch.float64 else case.dtype))
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        typer.echo(json.dumps([vars(row) for row in rows], indent=1))
        return
    print_times(console(), rows)


def print_times(out: Console, rows: tuple[Timed, ...]) -> None:
    """What a step takes without each pass, against the mean of both runs with all."""
    usual = (rows[0].step_ms + rows[-1].step_ms) / 2
    table = Table("without", "step", "of the usual")
    for column in (1, 2):
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(
            row.without or "(nothing)", f"{row.step_ms:,.2f} ms", f"{row.step_ms / usual:.2f}"
        )
    out.print(table)
    if len(rows) == 2:
        out.print("no pass is left that could be switched off")
        return
    best = min(rows[1:-1], key=lambda row: row.step_ms)
    scatter = abs(rows[0].step_ms - rows[-1].step_ms) / usual
    if best.step_ms < usual * (1 - max(scatter, 0.02)):
        out.print(f"a step is faster without {best.without}: {best.step_ms / usual:.2f} of it")
    else:
        out.print("no pass costs more than it saves, within what two equal runs differ by")
