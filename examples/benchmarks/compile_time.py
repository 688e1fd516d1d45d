"""Seconds until a deep model's first gradients: fxzero next to plain torch.compile.

    python examples/benchmarks/compile_time.py --depths 12,48,96 --json compile_time.json
    python examples/benchmarks/compile_time.py --doors fxzero,fxzero-step --depths 12,96 --json FILE
    python examples/benchmarks/compile_time.py --doors fxzero-step --peers "" --depths 24 \
        --micro-batches 4,64 --json FILE

Each figure is the first forward and backward of fresh processes (of a compiled step: that step),
with an empty compile cache (cold) and with what such a run has left there (warm). Equal layers are
one compilation for fxzero, so depth should cost it little; and so should a step's micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks import options
from examples.benchmarks.launch import RunError, launch_cold_and_warm
from examples.benchmarks.report import compile_row, conditions, table, write_json
from examples.benchmarks.workload import Job


def render(rows: Sequence[dict[str, Any]], reference: str) -> str:
    """Show the rows as a table, with ratios to the reference at the same depth."""
    base = {_size(row): row for row in rows if row["name"] == reference}
    header = ["contender", "zero", "layers", "micro", "cold s", "min", "max", "time ratio", "cpu s"]
    header += ["warm s", "warm ratio", "warm cpu s", "again cpu s", "peak MB"]
    lines = [
        [
            row["name"],
            str(row["zero"]),
            str(row["layers"]),
            str(row["micro_batches"]),
            f"{row['first_backward_s']:.1f}",
            f"{row['min_s']:.1f}",
            f"{row['max_s']:.1f}",
            f"{row['first_backward_s'] / base[_size(row)]['first_backward_s']:.3f}",
            f"{row['cpu_s']:.1f}",
            f"{row['warm_s']:.1f}",
            f"{row['warm_s'] / base[_size(row)]['warm_s']:.3f}",
            f"{row['warm_cpu_s']:.1f}",
            f"{row['again_cpu_s']:.1f}",
            f"{row['peak_with_compile_bytes'] / 1e6:.1f}",
        ]
        for row in rows
    ]
    return f"{table(header, lines)}\nratios are to {reference} at the same size"


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["layers"], row["micro_batches"]


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The model: model=gpt_tiny model.hidden=256.")
    ] = None,
    *,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")],
    peers: Annotated[str, typer.Option(help="Whom to compare with, by comma.")] = "inductor",
    doors: Annotated[str, typer.Option(help="fxzero's own contenders; may be empty.")] = "fxzero",
    depths: Annotated[str, typer.Option(help="Transformer blocks, by comma.")] = "12,48,96",
    micro_batches: Annotated[
        str, typer.Option(help="Parts of a step's batch, by comma; only fxzero-step has them.")
    ] = "1",
    zero: Annotated[int, typer.Option(help="ZeRO stage of fxzero.", min=0, max=3)] = 3,
    fxzero_options: Annotated[str, typer.Option(help="torch.compile options, as JSON.")] = "{}",
    ranks: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    threads: Annotated[int, typer.Option(help="CPU threads per rank.", min=1)] = 1,
    repeat: Annotated[int, typer.Option(help="Runs per contender and depth.", min=1)] = 1,
    batch: Annotated[int, typer.Option(help="Sequences per rank.", min=1)] = 2,
    dtype: Annotated[options.Dtype, typer.Option(help="Of everything.")] = options.Dtype.fp32,
    device: Annotated[options.Device, typer.Option(help="CPU or GPU.")] = options.Device.cpu,
    timeout_s: Annotated[float, typer.Option(help="Limit of one run, in seconds.")] = 1800.0,
) -> None:
    """Measure cold compile time of fxzero and plain torch.compile at several depths."""
    names, reference = options.chosen(doors, peers)
    overrides = overrides or ["model=gpt_tiny"]
    workload = options.workload(overrides, batch, dtype, device)
    job = Job(
        contender=names[0],
        workload=workload,
        measure="first_backward",
        zero=zero,
        fxzero_options=options.compile_options(fxzero_options),
        threads=threads,
        timeout_s=timeout_s,
    )
    numbers = options.numbers("--micro-batches", micro_batches)
    if max(numbers) > 1 and names != ["fxzero-step"]:
        raise typer.BadParameter(f"--micro-batches: only fxzero-step has them, not {names}")
    jobs = [
        replace(
            job,
            contender=name,
            workload=replace(workload.with_layers(layers), batch=batch * number),
            micro_batches=number,
        )
        for layers in options.numbers("--depths", depths)
        for number in numbers
        for name in names
    ]
    facts = conditions("compile_time.py", job, ranks)
    try:
        cold, warm = launch_cold_and_warm(jobs, ranks, repeat)
    except RunError as error:
        raise SystemExit(str(error)) from None
    rows = [compile_row(*measured) for measured in zip(jobs, cold, warm, strict=True)]
    facts |= {
        "layers": sorted({row["layers"] for row in rows}),
        "fxzero_options": job.fxzero_options,
        "repeat": repeat,
        "memory": f"above the imports, largest rank; {cold[0][0][0]['memory_method']}",
        "first_backward_s": "first forward and backward (fxzero-step: the first step), slowest "
        "rank, imports not counted",
        "cpu_s": "CPU seconds of the slowest rank's own process meanwhile, empty caches; "
        "warm_cpu_s with full ones; again_cpu_s for the same once more, which compiles nothing",
        "compile_cache": "empty at the start of each run; for warm_s, left by such a run",
    }
    write_json(json_path, facts, rows)
    print(render(rows, reference))


if __name__ == "__main__":
    typer.run(main)
