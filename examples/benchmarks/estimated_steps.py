"""Steps as `fxzero estimate` foretells them, against the same steps timed.

    python examples/benchmarks/estimated_steps.py --json FILE
    sudo python examples/benchmarks/estimated_steps.py --link 1gbit --json FILE
    python examples/benchmarks/estimated_steps.py --zero 3 --json FILE model.num_layers=12

In each repeat `fxzero doctor` measures the machine on as many ranks as train; by its figures the
steps are scheduled, estimated and run. A machine whose speed changes from one to the other
shows in the repeats: what is said of them is their median.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks import options
from examples.benchmarks.launch import RunError, launch
from examples.benchmarks.report import Run, conditions, table, write_json
from examples.benchmarks.workload import Job
from fxzero.inspect.estimate import estimate
from fxzero.inspect.targets import Target


def by_figures_of(job: Job, cluster: Path) -> Job:
    """The same measurement, scheduled by the figures of a file."""
    options = dict(job.fxzero_options)
    return replace(
        job,
        fxzero_options={**options, "cost": {**options.get("cost", {}), "cluster": str(cluster)}},
    )


def estimated_ms(job: Job, ranks: int) -> float:
    """What a step is said to take, by the figures that it is scheduled by."""
    shape = job.workload.batch, job.workload.config.block_size

    def build() -> Any:
        names = ("tokens", "targets")
        return job.workload.build(), {n: torch.zeros(shape, dtype=torch.int64) for n in names}

    target = Target("benchmark", build)
    found = estimate(
        target,
        world_size=ranks,
        stages=[job.zero],
        cluster=job.fxzero_options["cost"]["cluster"],
        clip_grad_norm=None,
        options=dict(job.fxzero_options),
    )
    return found.stages[job.zero].step_ms


def row_of(zero: int, repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """A stage's repeats, and what they come to."""
    return {
        "zero": zero,
        "estimated_ms": median(one["estimated_ms"] for one in repeats),
        "measured_ms": median(one["measured_ms"] for one in repeats),
        "ratio": median(one["estimated_ms"] / one["measured_ms"] for one in repeats),
        "repeats": repeats,
    }


def rendered(rows: list[dict[str, Any]]) -> str:
    """The table that is printed."""
    header = ["", "estimated ms", "measured ms", "ratio", "of the repeats"]
    lines = [
        [
            f"ZeRO-{row['zero']}",
            f"{row['estimated_ms']:.0f}",
            f"{row['measured_ms']:.0f}",
            f"{row['ratio']:.3f}",
            ", ".join(f"{one['estimated_ms'] / one['measured_ms']:.2f}" for one in row["repeats"]),
        ]
        for row in rows
    ]
    return table(header, lines)


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="The model: model=gpt_bench model.num_layers=12.")
    ] = None,
    *,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")],
    zeros: Annotated[str, typer.Option("--zero", help="ZeRO stages, by comma.")] = "0,3",
    fxzero_options: Annotated[str, typer.Option(help="compile_step's options, as JSON.")] = "{}",
    ranks: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    threads: Annotated[int, typer.Option(help="CPU threads per rank.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Timed steps per run.", min=1)] = 12,
    warmup: Annotated[int, typer.Option(help="Steps before them.", min=2)] = 4,
    repeat: Annotated[int, typer.Option(help="Runs of each stage.", min=1)] = 3,
    batch: Annotated[int, typer.Option(help="Sequences per rank.", min=1)] = 2,
    rate: Annotated[
        options.Rate | None,
        typer.Option("--link", help="Put the ranks on two hosts with such a link between them."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Limit of one run, in seconds.")] = 900.0,
) -> None:
    """Hold estimated steps against measured ones, on CPU ranks."""
    if rate is not None:
        options.check_link(ranks, options.Device.cpu)
    job = Job(
        contender="fxzero-step",
        workload=options.workload(overrides, batch, options.Dtype.fp32, options.Device.cpu),
        fxzero_options=options.compile_options(fxzero_options),
        warmup=warmup,
        steps=steps,
        threads=threads,
        link=rate.value if rate is not None else None,
        timeout_s=timeout_s,
    )
    facts = conditions("estimated_steps.py", job, ranks)
    stages = options.numbers("--zero", zeros)
    repeats: dict[int, list[dict[str, Any]]] = {zero: [] for zero in stages}
    try:
        with TemporaryDirectory() as folder:
            cluster = Path(folder, "measured.yaml")
            for turn in range(repeat):
                machine = launch(replace(job, measure="machine"), ranks)[0]
                cluster.write_text(machine["cluster"])
                for zero in stages:
                    here = by_figures_of(replace(job, zero=zero), cluster)
                    run = Run.merge(launch(here, ranks))
                    repeats[zero].append(
                        {
                            "estimated_ms": estimated_ms(here, ranks),
                            "measured_ms": median(run.step_ms),
                            "step_ms": run.step_ms,
                        }
                    )
                print(f"repeat {turn + 1} of {repeat}: done", file=sys.stderr)
    except RunError as error:
        raise SystemExit(str(error)) from None
    rows = [row_of(zero, found) for zero, found in repeats.items()]
    facts |= {"steps": steps, "warmup": warmup, "repeat": repeat, "costs": "fxzero doctor's"}
    write_json(json_path, facts, rows)
    print(rendered(rows))


if __name__ == "__main__":
    typer.run(main)
