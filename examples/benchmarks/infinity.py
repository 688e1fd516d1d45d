"""A model whose states do not fit: resident memory with all of it on disk, and with none.

    python examples/benchmarks/infinity.py --json infinity.json

A GPT of 404 million parameters (6.5 GB in fp32 with gradients and AdamW's state), three steps of
`fxzero.compile_step` in one process on one thread, a process each: as it is, and with
`memory="infinity"`. The largest resident memory (VmHWM) is that of the whole process, of building
the model on: its parameters are in memory until the first step moves them. Losses are compared.
"""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

import fxzero
from examples.benchmarks.report import machine, table, write_json
from examples.models import gpt_bench
from fxzero.runtime.disk_arena import disk_arena_of

MODES: dict[str, dict[str, Any]] = {"none": {}, "infinity": {"memory": "infinity"}}


def largest_bytes() -> int:
    """The most that this process has had in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10


def train(connection: Connection, mode: str, shape: dict[str, int], steps: int) -> None:
    """Take some steps, and say what they took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt_bench(**shape)
    batch = model.example_inputs(1)
    built_bytes = largest_bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = fxzero.compile_step(model, optimizer, options=MODES[mode])
    losses, times_s = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(float(step(*batch).loss))
        times_s.append(time.perf_counter() - begin)
    arena = disk_arena_of(optimizer)
    connection.send(
        {
            "mode": mode,
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "losses": losses,
            "steps_s": times_s,
            "built_bytes": built_bytes,
            "largest_bytes": largest_bytes(),
            "disk_bytes": 0 if arena is None else arena.num_bytes,
        }
    )


def main(
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = 32,
    hidden: Annotated[int, typer.Option(help="Its width.")] = 1024,
    steps: Annotated[int, typer.Option(help="How many.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Train each way in a process of its own."""
    shape = {"num_layers": layers, "hidden": hidden, "num_heads": 16}
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        mine, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=train, args=(theirs, mode, shape, steps))
        process.start()
        rows.append(mine.recv())
        process.join()
    shown = [
        [
            row["mode"],
            f"{row['largest_bytes'] / (1 << 30):.2f}",
            f"{row['disk_bytes'] / (1 << 30):.2f}",
            f"{row['steps_s'][-1]:.1f}",
            f"{row['losses'][-1]!r}",
        ]
        for row in rows
    ]
    print(table(["memory", "resident GiB", "disk GiB", "last step s", "last loss"], shown))
    equal = rows[0]["losses"] == rows[1]["losses"]
    print("losses are equal" if equal else "losses differ")
    if json is not None:
        write_json(json, {**machine("infinity.py", "cpu"), "shape": shape}, rows)


if __name__ == "__main__":
    typer.run(main)
