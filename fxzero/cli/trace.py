"""``fxzero trace``: a step for ui.perfetto.dev."""

from __future__ import annotations

import json
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
    check_companions,
    check_file,
)
from fxzero.cli.failures import as_sentences
from fxzero.cli.subject import Subject
from fxzero.inspect.dump import profiles
from fxzero.inspect.trace import profile_of, trace_of, write_trace
from fxzero.inspect.units import size


def trace(
    target: Annotated[str, typer.Argument(help=TARGET_HELP + DUMP_HELP)],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The file, JSON; gzipped if its name ends with .gz."),
    ] = Path("trace.json"),
    profiled: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="With a dump: what torch.profiler saw of the steps that were watched, kernels "
            "and threads and all.",
        ),
    ] = False,
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
    """Write a step for ui.perfetto.dev: a row a lane, where compute waits, and what is held.

    Of a model the simulated step; of a dump all of its ranks side by side, simulated and measured.

    Examples:

    fxzero trace examples.models:gpt_nano --cluster dgx_h100 -o step.json

    fxzero trace DUMP -o ranks.json

    fxzero trace DUMP --profile -o profile.json.gz
    """
    arguments = dict(locals())
    with as_sentences(traceback):
        subject = Subject.of(arguments)
        is_folder = subject.is_dump and not subject.is_file
        check_companions({"--profile": (profiled, "a dump", is_folder)})
        subject.check()
        check_file("--output", output)
        events = profile_of(profiles(target)) if profiled else trace_of(subject.analyses())
        write_trace(output, events)
        num_bytes = output.stat().st_size
        if as_json:
            named = [event for event in events if event.get("name") == "process_name"]
            found = {
                "output": str(output),
                "num_events": len(events),
                "num_bytes": num_bytes,
                "processes": [event["args"]["name"] for event in named],
            }
            typer.echo(json.dumps(found, indent=1))
        else:
            typer.echo(f"{output}: {len(events):,} events, {size(num_bytes)}")
