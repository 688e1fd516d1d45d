"""Stages of a pipeline: fxzero next to torch.distributed.pipelining, and next to no pipeline.

    python examples/benchmarks/pipeline.py --json FILE                       two stages, a rank each
    python examples/benchmarks/pipeline.py --ranks 4 --zero 3 \\
        --peers pipelining-fsdp2,pipelining-reshard --json FILE              two ranks a stage
    sudo python examples/benchmarks/pipeline.py --link 1gbit \\
        --others fxzero-step,ddp --json FILE model.num_layers=12             a stage a host

All train on the same tokens: `--batch` sequences for each rank, those of a pipeline's ranks
together split into `--micro-batches`. Every repeat runs every contender once, in an order that
rotates. The idle share of fxzero's ranks is the time in which they wait for others, or have ended,
over the step; beside it is the one of the schedule's replay, by what they were busy for. Memory in
tensors leaves out what the resident size holds beside: Python, the compiler, the heap's gaps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks import options
from examples.benchmarks.launch import RankResults, RunError, launch_in_turns
from examples.benchmarks.report import Run, conditions, render_steps, step_row, write_json
from examples.benchmarks.workload import Job

PIPELINES = ("fxzero-pipeline", "pipelining", "pipelining-fsdp2", "pipelining-reshard")


def idle_shares(repeats: Sequence[RankResults], stages: int) -> list[float]:
    """By stage, the median share of a step, which its slowest rank ends, in which a rank waits for
    messages or has ended."""
    by_stage: list[list[float]] = [[] for _ in range(stages)]
    for ranks in repeats:
        longest_ms = [max(times) for times in zip(*(r["step_ms"] for r in ranks), strict=True)]
        for rank, found in enumerate(ranks):
            by_stage[rank * stages // len(ranks)] += [
                1 - busy_ms / step_ms
                for busy_ms, step_ms in zip(found["busy_ms"], longest_ms, strict=True)
            ]
    return [median(shares) for shares in by_stage]


def replayed_idle_shares(job: Job, step_ms: float, measured: Sequence[float]) -> list[float]:
    """What the schedule's replay makes of it: every stage is busy for as long as measured, a third
    of it in forward and in each half of backward, and no message takes time."""
    from fxzero.pipeline.replay import replay_table, weights_last
    from fxzero.pipeline.schedules import table_of
    from fxzero.pipeline.tables import Action, Work

    schedule = table_of(job.schedule, job.stages, job.micro_batches)
    parts = {Work.BACKWARD: 2 / 3}

    def action_us(action: Action) -> float:
        place = schedule.rank_of[action.stage]
        each = schedule.num_stages // job.stages
        busy_us = (1 - measured[place]) * step_ms * 1e3 / each / job.micro_batches
        return busy_us * parts.get(action.work, 1 / 3)

    return list(replay_table(schedule, action_us, early_us=weights_last(action_us)).idle_shares)


def shares(row: Mapping[str, Any], key: str) -> str:
    """A share for each stage, where a row has them."""
    return " ".join(f"{share:.1%}" for share in row.get(key, ()))


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The model: model=gpt_bench model.num_layers=12.")
    ] = None,
    *,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")],
    peers: Annotated[str, typer.Option(help="Other pipelines, by comma.")] = "pipelining",
    others: Annotated[str, typer.Option(help="Contenders without stages, by comma.")] = "",
    stages: Annotated[int, typer.Option(help="Ranks along the pipeline.", min=2)] = 2,
    schedule: Annotated[
        str, typer.Option(help="Of fxzero; its peers run gpipe, or 1f1b.")
    ] = "1f1b",
    zero: Annotated[int, typer.Option(help="ZeRO stage of fxzero.", min=0, max=3)] = 0,
    fxzero_options: Annotated[str, typer.Option(help="torch.compile options, as JSON.")] = "{}",
    ranks: Annotated[int, typer.Option(help="Processes.", min=2)] = 2,
    threads: Annotated[int, typer.Option(help="CPU threads per rank.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Timed steps per run.", min=1)] = 8,
    warmup: Annotated[int, typer.Option(help="Steps before them.", min=2)] = 3,
    repeat: Annotated[int, typer.Option(help="Runs per contender.", min=1)] = 3,
    batch: Annotated[int, typer.Option(help="Sequences for each rank.", min=1)] = 4,
    micro_batches: Annotated[int, typer.Option(help="Of a pipeline's step.", min=1)] = 8,
    rate: Annotated[
        options.Rate | None,
        typer.Option("--link", help="Put the stages on two hosts with such a link between them."),
    ] = None,
    dtype: Annotated[options.Dtype, typer.Option(help="Of everything.")] = options.Dtype.fp32,
    timeout_s: Annotated[float, typer.Option(help="Limit of one run, in seconds.")] = 900.0,
) -> None:
    """Measure step time and peak memory of pipelines, in turns."""
    names = ["fxzero-pipeline", *options.contenders(peers), *options.contenders(others)]
    reference = (options.contenders(peers) or names)[0]
    if ranks % stages:
        raise typer.BadParameter(f"--ranks {ranks} are no multiple of --stages {stages}")
    if batch * stages % micro_batches:
        raise typer.BadParameter(
            f"a pipeline's {batch * stages} sequences (--batch {batch} times --stages {stages}) do "
            f"not split into --micro-batches {micro_batches}"
        )
    workload = options.workload(overrides, batch, dtype, options.Device.cpu)
    if rate is not None:
        options.check_link(ranks, options.Device.cpu)
    job = Job(
        contender=names[0],
        workload=workload,
        zero=zero,
        fxzero_options=options.compile_options(fxzero_options),
        micro_batches=micro_batches,
        stages=stages,
        schedule=schedule,
        warmup=warmup,
        steps=steps,
        threads=threads,
        link=rate.value if rate is not None else None,
        timeout_s=timeout_s,
        counts_tensors=True,
    )
    jobs = [
        replace(job, contender=name)
        if name in PIPELINES
        else replace(
            job, contender=name, stages=1, micro_batches=max(1, micro_batches // stages), zero=3
        )
        for name in names
    ]
    facts = conditions("pipeline.py", job, ranks)
    try:
        results = launch_in_turns(jobs, ranks, repeat)
    except RunError as error:
        raise SystemExit(str(error)) from None
    runs = [[Run.merge(found) for found in repeats] for repeats in results]
    base = runs[names.index(reference)][-1]
    rows = [step_row(each, found, base) for each, found in zip(jobs, runs, strict=True)]
    for row, repeats in zip(rows, results, strict=True):
        row["tensor_peak_bytes"] = median(
            max(found["tensor_peak_bytes"] for found in ranks) for ranks in repeats
        )
    rows[0]["idle_shares"] = idle_shares(results[0], stages)
    rows[0]["replayed_idle_shares"] = replayed_idle_shares(
        job, rows[0]["median_ms"], rows[0]["idle_shares"]
    )
    facts |= {
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "fxzero_options": dict(job.fxzero_options),
        "steps": steps,
        "warmup": warmup,
        "repeat": repeat,
        "tensor_memory": "tensors before a step, and what torch's allocator hands out in it",
        "memory": f"above the imports, largest rank; {results[0][0][0]['memory_method']}",
        "loss_reference": reference,
    }
    write_json(json_path, facts, rows)
    more = {
        "in tensors MB": lambda row: f"{row['tensor_peak_bytes'] / 1e6:.1f}",
        "idle": lambda row: shares(row, "idle_shares"),
        "replayed": lambda row: shares(row, "replayed_idle_shares"),
    }
    print(render_steps(rows, reference, more))


if __name__ == "__main__":
    typer.run(main)
