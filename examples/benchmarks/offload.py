"""Steps that hold part of what they have in the host's memory, against what bounds them.

    python examples/benchmarks/offload.py --json offload.json

A GPT in fp32 with AdamW by `fxzero.compile_step`, in one process on one thread, in turns:

    none         all of it on the device
    states_host  optimizer state and masters on the host, updated there (ZeRO-Offload)
    on_device    optimizer state on the host, updated on the device, which it streams through
    delay        states_host, each update beside the next step's compute; its losses are others
    all_host     and parameters on the device where they are used alone (ZeRO-3 Offload)
    infinity     and all of it on disk: on the host is what is on its way (ZeRO-Infinity)
    activations  what forward saves for backward goes to the host and comes back, as far as there is
                 time for it

With `--deepspeed` also DeepSpeed's ZeRO-3 with optimizer and parameters on the host, and beside it
fxzero's all_host without anything held back, as DeepSpeed's copies are not.

On CPU a device's memory is plain memory too: copies are held back to `--rate`, which is what a bus
of that bandwidth would do, and the disk to `--disk-rate` each way. The bound of a step is the
longest of what runs side by side: compute (the step without offload), bytes down, up, read and
written over their rates, and the updates by themselves. Peaks are of what torch allocates outside
of the arena, beside what the plan says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

import fxzero
from examples.benchmarks.measure import allocated_peak_bytes, timed_s
from examples.benchmarks.report import machine, table, write_json
from examples.models import gpt_bench
from fxzero.compiler.compilation import Compilation, observers
from fxzero.cost.throttle import Throttle
from fxzero.graph import Lane
from fxzero.schedule.simulate import simulate_memory

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "states_host": {"memory": "states_host"},
    "on_device": {"memory": "states_host", "offload_states": {"update": "device"}},
    "delay": {"memory": "states_host", "offload_states": {"delay": 1}},
    "all_host": {"memory": "all_host"},
    "infinity": {"memory": "infinity"},
    "activations": {"offload_activations": {"share": 1.0, "min_bytes": 1 << 18}},
}

LANES = ("h2d", "d2h", "read", "write")


@dataclass
class Contender:
    """One way to hold a step."""

    name: str
    step: Callable[[], Any]
    loss: float
    simulated_bytes: int
    host_bytes: int
    resident_bytes: int
    moved_bytes: dict[str, int]
    """By lane."""


def made(
    name: str,
    shape: dict[str, int],
    batch_size: int,
    rate: str,
    disk_rate: str,
    settings: dict[str, Any],
) -> Contender:
    """Compile a step, and read what its graph holds and moves."""
    torch.manual_seed(0)
    model = gpt_bench(**shape)
    batch = model.example_inputs(batch_size)
    optimizer = torch.optim.AdamW(model.parameters())
    throttle = {"h2d": rate, "d2h": rate, "read": disk_rate, "write": disk_rate}
    options = {**settings, "throttle": throttle} if settings else {}
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    observers.append(keep)
    step = fxzero.compile_step(model, optimizer, options=options)
    out = [step(*batch) for _ in range(2)][-1]
    observers.remove(keep)
    (compilation,) = [c for c in found if c.joint is not None]
    assert compilation.joint is not None
    memory = simulate_memory(compilation.joint, fuses=True)
    moved = {
        lane: sum(t.record.full_bytes for t in compilation.joint.transfers(name=lane))
        for lane in LANES
    }
    return Contender(
        name,
        lambda: step(*batch),
        float(out.loss),
        memory.peak_bytes,
        memory.host_bytes,
        memory.resident_bytes,
        moved,
    )


def deepspeed(connection: Connection, shape: dict[str, int], batch_size: int) -> None:
    """A process of DeepSpeed's ZeRO-3 with everything that it can hold on the host there: it puts a
    function of its own in the place of `F.linear`. It takes a step whenever it is asked."""
    import deepspeed as peer
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}  # what its launcher sets
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        peer.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = gpt_bench(**shape)
    batch = model.example_inputs(batch_size)
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    engine, *_ = peer.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    def step() -> None:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()

    for _ in range(2):
        step()
    while True:
        connection.send(timed_s("cpu", step)[1])
        connection.recv()


DEEPSPEED = "DeepSpeed ZeRO-3, both on the host"


def start_deepspeed(shape: dict[str, int], batch_size: int) -> tuple[Any, Connection]:
    """Start its process, and wait until it has taken a step."""
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=deepspeed, args=(theirs, shape, batch_size), daemon=True)
    process.start()
    mine.recv()
    return process, mine


def update_s(shape: dict[str, int]) -> float:
    """Seconds of all updates by themselves, by torch's fused kernel."""
    torch.manual_seed(0)
    model = gpt_bench(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return min(timed_s("cpu", optimizer.step)[1] for _ in range(5))


def main(
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = 12,
    hidden: Annotated[int, typer.Option(help="Its width.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Sequences of 256 tokens.")] = 4,
    rate: Annotated[str, typer.Option(help="What copies are held back to, each way.")] = "200MB/s",
    disk_rate: Annotated[
        str, typer.Option(help="What the disk is held back to, each way.")
    ] = "500MB/s",
    repeats: Annotated[int, typer.Option(help="Steps of each, in turns.")] = 5,
    with_deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="Beside DeepSpeed (pip install '.[peers]').")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Time steps under each way to hold them."""
    facts = machine("offload.py", "cpu")
    torch.set_num_threads(1)
    shape = {"num_layers": layers, "hidden": hidden, "num_heads": 8}
    contenders = [
        made(name, shape, batch_size, rate, disk_rate, mode) for name, mode in MODES.items()
    ]
    alone_s = update_s(shape)
    steps = {contender.name: contender.step for contender in contenders}
    if with_deepspeed:
        steps["all_host, as fast as it goes"] = made(
            "", shape, batch_size, "", "", MODES["all_host"]
        ).step
    times: dict[str, list[float]] = {name: [] for name in steps}
    peer, theirs = start_deepspeed(shape, batch_size) if with_deepspeed else (None, None)
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(timed_s("cpu", step)[1])
        if theirs is not None:
            theirs.send("step")
            times.setdefault(DEEPSPEED, []).append(theirs.recv())
    if peer is not None:
        peer.kill()
    compute_s = median(times["none"])
    throttle = Throttle(h2d=rate, d2h=rate, read=disk_rate, write=disk_rate)
    rows: list[dict[str, Any]] = []
    for contender in contenders:
        bounds = {
            "compute": compute_s,
            **{
                lane: contender.moved_bytes[lane] / throttle.bytes_per_s(Lane(lane))
                for lane in LANES
            },
            "update": alone_s if contender.name not in ("none", "on_device") else 0.0,
        }
        bound = max(bounds, key=bounds.__getitem__)
        measured = min(allocated_peak_bytes(contender.step) for _ in range(2))
        step_s = median(times[contender.name])
        rows.append(
            {
                "mode": contender.name,
                "step_s": step_s,
                "steps_s": times[contender.name],
                "bound_s": bounds[bound],
                "bound_by": bound,
                "bounds_s": bounds,
                "ratio": step_s / bounds[bound],
                "loss": contender.loss,
                "peak_bytes": measured + contender.resident_bytes,
                "simulated_peak_bytes": contender.simulated_bytes,
                "host_bytes": contender.host_bytes,
            }
        )
    header = ["mode", "step s", "bound s", "by", "ratio", "device MB", "simulated", "host MB"]
    print(
        table(
            header,
            [
                [
                    row["mode"],
                    f"{row['step_s']:.3f}",
                    f"{row['bound_s']:.3f}",
                    row["bound_by"],
                    f"{row['ratio']:.3f}",
                    f"{row['peak_bytes'] / 1e6:.1f}",
                    f"{row['simulated_peak_bytes'] / 1e6:.1f}",
                    f"{row['host_bytes'] / 1e6:.1f}",
                ]
                for row in rows
            ],
        )
    )
    for name in list(times)[len(rows) :]:
        rows.append({"mode": name, "step_s": median(times[name]), "steps_s": times[name]})
        print(f"{name}: {median(times[name]):.3f} s")
    losses = {row["loss"] for row in rows if "loss" in row and row["mode"] != "delay"}
    print("losses are equal" if len(losses) == 1 else f"losses differ: {sorted(losses)}")
    if json is not None:
        write_json(
            json,
            {**facts, "shape": shape, "batch": batch_size, "rate": rate, "disk_rate": disk_rate},
            rows,
        )


if __name__ == "__main__":
    typer.run(main)
