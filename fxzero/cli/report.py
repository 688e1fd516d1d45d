"""``fxzero report``: one page that opens offline, of what was decided for a model's step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

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
    SeqLenOption,
    StepOption,
    TracebackOption,
    WorldSizeOption,
    ZeroOption,
    check_companions,
    check_file,
)
from fxzero.cli.failures import as_sentences
from fxzero.cli.subject import Subject
from fxzero.errors import ConfigError
from fxzero.inspect.report import page, report_data
from fxzero.inspect.units import size

DEFAULT_OUTPUT = Path("report.html")


def report(
    target: Annotated[
        str, typer.Argument(help=f"{TARGET_HELP}{DUMP_HELP} Or a file that --json wrote.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the page.")
    ] = DEFAULT_OUTPUT,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with this: a dump, a file that --json wrote, or another target, which is "
            "captured with the same options."
        ),
    ] = None,
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
    inference: InferenceOption = False,
    cluster: ClusterOption = None,
    options: OptionsOption = "{}",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write no page: print the analysis that it is made of, which TARGET and --against "
            "read back.",
        ),
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """Write one HTML page of a model's step: timeline, memory, traffic, graph, passes' diffs.

    The page needs no network and no server. The step is captured as `fxzero inspect` does it: in
    one process, with no accelerator and no memory for the model.

    Examples:

    fxzero report examples.models:gpt_nano -o report.html --cluster dgx_h100

    fxzero report llama3-8b --step --micro-batches 4 --world-size 64

    fxzero report train.py:build --zero 2 --json > zero2.json

    fxzero report train.py:build --zero 3 --against zero2.json

    fxzero report DUMP -o run.html
    """
    arguments = dict(locals())
    with as_sentences(traceback):
        subject = Subject.of(arguments)
        subject.check()
        check_companions(
            {
                "--against": (against is not None, "no --json", not as_json),
                "--output": (output != DEFAULT_OUTPUT, "no --json", not as_json),
            }
        )
        check_file("--output", output)
        other = None
        if against is not None:
            other = replace(subject, target=against)
            if other.is_dump:  # whatever was captured for it
                other = Subject(against, rank=rank)
            other.check()
        found = subject.analysis(texts=True)
        if as_json:
            typer.echo(json.dumps(found.to_json(), default=str))
            return
        theirs = None if other is None else (other.analysis(texts=True), other.target)
        made = page(report_data(found, target, theirs)).encode()
        try:
            output.write_bytes(made)  # as text, some systems would change ends of lines: hashes
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}") from None
        typer.echo(f"wrote {output} ({size(len(made))}): open it in a browser")
