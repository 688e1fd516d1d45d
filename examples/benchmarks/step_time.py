"""Step time and memory of fxzero next to its peers, in one run.

    python examples/benchmarks/step_time.py --peers ddp,fsdp2 --json step_time.json
    python examples/benchmarks/step_time.py --mode step --peers fsdp2,deepspeed-3 --json FILE
    sudo python examples/benchmarks/step_time.py --mode both --link 1gbit --json FILE
    python examples/benchmarks/step_time.py --json FILE model=gpt_bench model.num_layers=12

Every repeat runs every contender once, in an order that rotates, so that a machine that
slows down slows all of them. Each run starts fresh processes with an empty compile cache.
The losses show that all contenders train the same thing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks import options
from examples.benchmarks.launch import RunError, launch, launch_in_turns
from examples.benchmarks.report import Run, bounds, conditions, render_steps, step_row, write_json
from examples.benchmarks.workload import Job


def print_simulated(row: dict[str, Any]) -> None:
    """Hold what was simulated against what was measured."""
    for found, step_ms in zip(row["simulated_per_repeat"], row["step_ms_per_repeat"], strict=False):
        measured_ms = median(step_ms)
        print(
            f"{row['name']}: simulated {found['simulated_ms']:.0f} ms, measured {measured_ms:.0f}: "
            f"{found['simulated_ms'] / measured_ms:.3f} ({found['costs']})"
        )


def render_bounds(found: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Say what bounds a step, and how far off fxzero's are."""
    ratios = ", ".join(
        f"{row['name']} {row['median_ms'] / found['bound_ms']:.3f}"
        for row in rows
        if row["name"].startswith("fxzero")
    )
    return (
        f"compute alone {found['compute_ms']:.0f} ms; {found['sent_bytes_per_step'] / 1e6:.1f} MB "
        f"sent at {found['link_bytes_per_s'] / 1e6:.1f} MB/s take {found['traffic_ms']:.0f} ms; "
        f"steps to the larger: {ratios or 'no fxzero contender'}"
    )


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The model: model=gpt_bench model.num_layers=12.")
    ] = None,
    *,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")],
    peers: Annotated[str, typer.Option(help="Whom to compare with, by comma.")] = "ddp,fsdp2",
    mode: Annotated[options.Mode, typer.Option(help="Which of fxzero's doors.")] = (
        options.Mode.loop
    ),
    zero: Annotated[int, typer.Option(help="ZeRO stage of fxzero.", min=0, max=3)] = 3,
    fxzero_options: Annotated[str, typer.Option(help="torch.compile options, as JSON.")] = "{}",
    ranks: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    threads: Annotated[int, typer.Option(help="CPU threads per rank.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Timed steps per run.", min=1)] = 12,
    warmup: Annotated[int, typer.Option(help="Steps before them.", min=2)] = 4,
    repeat: Annotated[int, typer.Option(help="Runs per contender.", min=1)] = 3,
    batch: Annotated[int, typer.Option(help="Sequences per rank.", min=1)] = 2,
    rate: Annotated[
        options.Rate | None,
        typer.Option("--link", help="Put the ranks on two hosts with such a link between them."),
    ] = None,
    dtype: Annotated[options.Dtype, typer.Option(help="Of everything.")] = options.Dtype.fp32,
    device: Annotated[options.Device, typer.Option(help="CPU or GPU.")] = options.Device.cpu,
    simulate: Annotated[
        bool, typer.Option(help="Say what the simulators make of fxzero-step; holds its graphs.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="Limit of one run, in seconds.")] = 900.0,
) -> None:
    """Measure step time and peak memory of fxzero and its peers, in turns."""
    names, reference = options.chosen(options.DOORS[mode], peers)
    workload = options.workload(overrides, batch, dtype, device)
    if rate is not None:
        options.check_link(ranks, device)
        names.append("alone")
    job = Job(
        contender=names[0],
        workload=workload,
        zero=zero,
        fxzero_options=options.compile_options(fxzero_options),
        warmup=warmup,
        steps=steps,
        threads=threads,
        simulate=simulate,
        link=rate.value if rate is not None else None,
        timeout_s=timeout_s,
    )
    facts = conditions("step_time.py", job, ranks)
    jobs = [
        replace(job, contender=name, simulate=simulate and name == "fxzero-step") for name in names
    ]
    try:
        results = launch_in_turns(jobs, ranks, repeat)
        speed = launch(replace(job, measure="traffic"), ranks) if rate is not None else None
    except RunError as error:
        raise SystemExit(str(error)) from None
    runs = [[Run.merge(ranks) for ranks in repeats] for repeats in results]
    loss_reference = "ddp" if "ddp" in names else reference
    reference_run = runs[names.index(loss_reference)][0]
    rows = [step_row(*pair, reference_run) for pair in zip(jobs, runs, strict=True)]
    facts |= {
        "num_parameters": workload.num_parameters(),
        "fxzero_options": job.fxzero_options,
        "steps": steps,
        "warmup": warmup,
        "repeat": repeat,
        "memory": f"above the imports, largest rank; {results[0][0][0]['memory_method']}",
        "peak_bytes": "over the timed steps, after the compiler's garbage was returned",
        "peak_with_compile_bytes": "over building, compiling, and all steps",
        "compile_cache": "empty at the start of each run",
        "loss_reference": loss_reference,
    }
    if speed is not None:
        facts["bounds"] = bounds(rows, rows[names.index("alone")], speed, ranks)
    write_json(json_path, facts, rows)
    print(render_steps(rows, reference))
    for row in rows:
        print_simulated(row)
    if speed is not None:
        print(render_bounds(facts["bounds"], rows))


if __name__ == "__main__":
    typer.run(main)
