"""Time against peak memory: fxzero under memory budgets, next to what people do today.

    python examples/benchmarks/budget.py --json budget.json --plot budget.png
    python examples/benchmarks/budget.py --batch 2 model.num_layers=4 model.block_size=128

    none                torch.compile of the whole model
    checkpoint          torch.compile, with torch.utils.checkpoint around every block
    torch_budget_0.5    torch.compile, with functorch's activation_memory_budget
    fxzero              fxzero.compile_step with memory_budget: at each peer's peak, and at --shares
                        of the way from the least feasible peak to the one without a budget

One process trains for each row, all of them live at once and take turns, so that a slow minute
meets every row. The peak is what torch's allocator holds at most during a step, with parameters,
optimizer state and batch.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks import options
from examples.benchmarks.measure import allocated_peak_bytes, release_free_memory, timed_s
from examples.benchmarks.report import machine, table, write_json
from examples.benchmarks.workload import Workload

WARMUP = 2


@dataclass(frozen=True)
class Row:
    """One way to train."""

    name: str
    budget: str = "none"
    """fxzero's, as `memory_budget` takes it."""
    share: float = 1.0
    """torch's: of what is saved for backward."""


class Checkpointed(nn.Module):
    """A block that backward computes again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """What the block gives."""
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def prepare(row: Row, workload: Workload) -> tuple[Callable[[int], Tensor], list[Any]]:
    """A training step by its number, and what is alive beside it."""
    model = workload.build()
    if row.name == "checkpoint":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Checkpointed(block)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = workload.sample(0, 0)
    alive = [model, optimizer, batch]
    if row.name == "fxzero":
        import fxzero

        step = fxzero.compile_step(model, optimizer, options={"memory_budget": row.budget})
        return lambda _: step(*batch).loss, alive
    torch._functorch.config.activation_memory_budget = row.share
    compiled = torch.compile(model)

    def train(_: int) -> Tensor:
        loss: Tensor = compiled(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train, alive


def alive_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]) -> int:
    """Parameters, buffers, optimizer state and a batch."""
    tensors = [*model.parameters(), *model.buffers(), *batch]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def serve(row: Row, workload: Workload, threads: int, connection: Connection) -> None:
    """A process's life: compile, tell the peak, then train as often as asked."""
    torch.set_num_threads(threads)
    try:
        step, alive = prepare(row, workload)
        losses = [float(step(number)) for number in range(WARMUP)]
        peak = min(allocated_peak_bytes(lambda: step(0)) for _ in range(2))
        release_free_memory()
        connection.send({"losses": losses, "peak_bytes": peak + alive_bytes(*alive)})
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})
        return
    while (count := connection.recv()) is not None:
        times = []
        for number in range(count):
            _, seconds = timed_s(workload.device, lambda number=number: step(number))  # type: ignore[misc]
            times.append(seconds * 1e3)
        connection.send(times)


class Process:
    """A row's process."""

    def __init__(self, row: Row, workload: Workload, threads: int) -> None:
        self.row = row
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(row, workload, threads, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.said: dict[str, Any] = self.connection.recv()
        self.times_ms: list[float] = []

    def run(self, count: int) -> None:
        """Train some steps, and keep what they took."""
        self.connection.send(count)
        self.times_ms += self.connection.recv()

    def end(self) -> None:
        """End the process."""
        self.connection.send(None)
        self.process.join()

    def to_row(self, reference_ms: float) -> dict[str, Any]:
        """The figures."""
        middle = median(self.times_ms)
        budget = re.fullmatch(r"\d+", self.row.budget)
        return {
            "name": self.row.name,
            "budget_bytes": int(budget[0]) if budget else None,
            "peak_bytes": self.said["peak_bytes"],
            "median_ms": middle,
            "min_ms": min(self.times_ms),
            "max_ms": max(self.times_ms),
            "time_ratio": middle / reference_ms,
            "losses": self.said["losses"],
        }


def least_bytes(workload: Workload, threads: int) -> int:
    """The least budget that fxzero takes, by what it says of one byte."""
    process = Process(Row("fxzero", "1"), workload, threads)
    found = re.search(r"\((\d+) bytes\) is the least", process.said.get("error", ""))
    if found is None:
        raise typer.BadParameter(f"a budget of one byte was not refused: {process.said}")
    return int(found[1])


def plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw time against peak."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    for name in dict.fromkeys(row["name"] for row in rows):
        own = sorted((r["peak_bytes"] / 2**20, r["median_ms"]) for r in rows if r["name"] == name)
        axes.plot(*zip(*own, strict=True), marker="o", label=name)
    axes.set_xlabel("peak memory (MiB)")
    axes.set_ylabel("step (ms)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra's, of the model.")] = None,
    *,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 4,
    shares: Annotated[str, typer.Option(help="Of the way from least to free, by comma.")] = (
        "0.1,0.5"
    ),
    torch_budgets: Annotated[str, typer.Option(help="activation_memory_budget, by comma.")] = (
        "0.7,0.5,0.3"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every row.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 2,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot")] = None,
) -> None:
    """See the module's docstring."""
    chosen = overrides or ["model.num_layers=12", "model.block_size=512"]
    workload = options.workload(chosen, batch, options.Dtype.fp32, options.Device.cpu)
    peers = [Row("none"), Row("checkpoint")]
    peers += [
        Row(f"torch_budget_{share}", share=float(share))
        for share in torch_budgets.split(",")
        if share
    ]
    processes = [Process(row, workload, threads) for row in peers]
    free = Process(Row("fxzero"), workload, threads)
    least = least_bytes(workload, threads)
    span = free.said["peak_bytes"] - least
    budgets = {least + int(float(share) * span) for share in shares.split(",") if share}
    budgets |= {p.said["peak_bytes"] for p in processes}
    budgets = {b for b in budgets if least <= b < free.said["peak_bytes"]}
    processes.append(free)
    for budget in sorted(budgets):
        processes.append(Process(Row("fxzero", str(budget)), workload, threads))
    failed = [f"{p.row}: {p.said['error']}" for p in processes if "error" in p.said]
    if failed:
        raise typer.BadParameter("; ".join(failed))
    for _ in range(rounds):
        for process in processes:
            process.run(steps)
    reference_ms = median(processes[0].times_ms)
    rows = [process.to_row(reference_ms) for process in processes]
    for process in processes:
        process.end()
    header = ["row", "budget MiB", "peak MiB", "median ms", "of none's", "loss"]
    lines = [
        [
            row["name"],
            "" if row["budget_bytes"] is None else f"{row['budget_bytes'] / 2**20:.1f}",
            f"{row['peak_bytes'] / 2**20:.1f}",
            f"{row['median_ms']:.0f}",
            f"{row['time_ratio']:.3f}",
            f"{row['losses'][-1]:.6f}",
        ]
        for row in rows
    ]
    print(table(header, lines))
    facts = machine("budget.py", "cpu")
    facts |= {"model": workload.model, "batch": batch, "threads": threads, "least_bytes": least}
    if json_file is not None:
        write_json(json_file, facts, rows)
    if plot_file is not None:
        plot(plot_file, rows)


if __name__ == "__main__":
    typer.run(main)
