"""From what the ranks measured to rows, a table and a JSON file.

A step takes as long as its slowest rank, and a run needs the memory of its largest one.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import torch

from examples.benchmarks.contenders import stage
from examples.benchmarks.launch import RankResults
from examples.benchmarks.workload import DTYPES, Job


@dataclass(frozen=True)
class Run:
    """One run of one contender, over all its ranks."""

    step_ms: list[float]
    losses: list[float]
    first_step_s: float
    peak_bytes: int
    peak_with_compile_bytes: int
    sent_bytes_per_step: float | None
    """What each rank sends, where the contender says it."""
    simulated: Mapping[str, Any]
    """What the simulators say, where they were asked."""

    @classmethod
    def merge(cls, ranks: RankResults) -> Run:
        """Take the slowest rank of each step, the largest rank, and the mean loss."""
        return cls(
            step_ms=[max(times) for times in zip(*(r["step_ms"] for r in ranks), strict=True)],
            losses=[fmean(losses) for losses in zip(*(r["losses"] for r in ranks), strict=True)],
            first_step_s=max(r["first_step_s"] for r in ranks),
            peak_bytes=max(r["peak_bytes"] for r in ranks),
            peak_with_compile_bytes=max(r["peak_with_compile_bytes"] for r in ranks),
            sent_bytes_per_step=ranks[0].get("sent_bytes_per_step"),
            simulated={
                key: value
                for key, value in ranks[0].items()
                if key.startswith("simulated") or key == "costs"
            },
        )


def compile_row(
    job: Job, repeats: Sequence[RankResults], warm: Sequence[RankResults]
) -> dict[str, Any]:
    """Aggregate the repeats of one contender at one depth, with empty caches and full ones."""
    warm_s = [max(rank["first_backward_s"] for rank in ranks) for ranks in warm]
    first_s = [max(rank["first_backward_s"] for rank in ranks) for ranks in repeats]
    peaks_bytes = [max(rank["peak_with_compile_bytes"] for rank in ranks) for ranks in repeats]
    return {
        "name": job.contender,
        "zero": stage(job),
        "layers": job.workload.config.num_layers,
        "micro_batches": job.micro_batches,
        "num_parameters": job.workload.num_parameters(),
        "first_backward_s": median(first_s),
        "warm_s": median(warm_s),
        "cpu_s": median(max(rank["cpu_s"] for rank in ranks) for ranks in repeats),
        "warm_cpu_s": median(max(rank["cpu_s"] for rank in ranks) for ranks in warm),
        "again_cpu_s": median(max(rank["again_cpu_s"] for rank in ranks) for ranks in warm),
        "min_s": min(first_s),
        "max_s": max(first_s),
        "peak_with_compile_bytes": median(peaks_bytes),
    }


def step_row(job: Job, runs: Sequence[Run], reference: Run) -> dict[str, Any]:
    """Aggregate the repeats of one contender; losses are held against the reference's."""
    step_ms = [time_ms for run in runs for time_ms in run.step_ms]
    return {
        "name": job.contender,
        "zero": stage(job),
        "num_parameter_bytes": job.workload.num_parameters() * DTYPES[job.workload.dtype].itemsize,
        "median_ms": median(step_ms),
        "min_ms": min(step_ms),
        "max_ms": max(step_ms),
        "peak_bytes": median(run.peak_bytes for run in runs),
        "peak_with_compile_bytes": median(run.peak_with_compile_bytes for run in runs),
        "first_step_s": median(run.first_step_s for run in runs),
        "sent_bytes_per_step": runs[-1].sent_bytes_per_step,
        "final_loss": runs[-1].losses[-1],
        "max_loss_difference": max(loss_difference(run, reference) for run in runs),
        "simulated_per_repeat": [dict(run.simulated) for run in runs if run.simulated],
        "step_ms_per_repeat": [run.step_ms for run in runs],
        "peak_bytes_per_repeat": [run.peak_bytes for run in runs],
    }


def render_steps(
    rows: Sequence[dict[str, Any]],
    reference: str,
    more: Mapping[str, Callable[[dict[str, Any]], str]] = MappingProxyType({}),
) -> str:
    """Show the rows of `step_row` as a table, with ratios to the reference.

    Args:
        more: further columns, by their titles.
    """
    base = next(row for row in rows if row["name"] == reference)
    header = [
        *("contender", "zero", "median ms", "min", "max", "time ratio"),
        *("peak MB", "peak ratio", "with compile MB", "first step s", "loss", "loss diff"),
        *more,
    ]
    lines = [
        [
            row["name"],
            str(row["zero"]),
            f"{row['median_ms']:.1f}",
            f"{row['min_ms']:.1f}",
            f"{row['max_ms']:.1f}",
            f"{row['median_ms'] / base['median_ms']:.3f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / base['peak_bytes']:.3f}",
            f"{row['peak_with_compile_bytes'] / 1e6:.1f}",
            f"{row['first_step_s']:.2f}",
            f"{row['final_loss']:.6f}",
            f"{row['max_loss_difference']:.1e}" if row["name"] != "alone" else "",
            *(column(row) for column in more.values()),
        ]
        for row in rows
    ]
    return f"{table(header, lines)}\nratios are to {reference}"


def loss_difference(run: Run, reference: Run) -> float:
    """Return the largest relative difference of loss, over all steps."""
    pairs = zip(run.losses, reference.losses, strict=True)
    return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)


def bounds(
    rows: Sequence[Mapping[str, Any]], alone: Mapping[str, Any], traffic: RankResults, ranks: int
) -> dict[str, Any]:
    """What no schedule can beat: compute without transfers, and transfers without compute.

    Args:
        alone: the row of the contender that computes for itself.
        traffic: what the ranks measured of the link.
    """
    bytes_per_s = median(speed for rank in traffic for speed in rank["bytes_per_s"])
    sent = [row["sent_bytes_per_step"] for row in rows if row["sent_bytes_per_step"]]
    step = 3 * rows[0]["num_parameter_bytes"] * (1 - 1 / ranks)  # ZeRO-3, every rank
    least = min(sent, default=step)
    return {
        "compute_ms": alone["median_ms"],
        "link_bytes_per_s": bytes_per_s,
        "sent_bytes_per_step": least,
        "traffic_ms": least / bytes_per_s * 1e3,
        "zero3_traffic_ms": step / bytes_per_s * 1e3,
        "bound_ms": max(alone["median_ms"], least / bytes_per_s * 1e3),
    }


def conditions(script: str, job: Job, ranks: int) -> dict[str, Any]:
    """Say what a reader needs to judge the figures, or to repeat them."""
    return {
        **machine(script, job.workload.device),
        "backend": "nccl" if job.workload.device == "cuda" else "gloo",
        "ranks": ranks,
        "link": job.link,
        "threads_per_rank": job.threads,
        **asdict(job.workload),
    }


def machine(script: str, device: str) -> dict[str, Any]:
    """Say which command ran, when, on what."""
    return {
        "command": shlex.join(["python", f"examples/benchmarks/{script}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
    }


def cpu_model() -> str:
    """Return the processor's name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def write_json(path: Path, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the conditions and the rows; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": facts, "rows": rows}, indent=2) + "\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, figures to the right."""
    lines = [header, *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
