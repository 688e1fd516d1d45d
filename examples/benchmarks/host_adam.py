"""Update on the host, against DeepSpeed's C++ Adam and torch's own loop.

    python examples/benchmarks/host_adam.py --json host_adam.json

One AdamW update of some millions of fp32 parameters on one thread, as a step runs it for what lives
in the host's memory (`fxzero.runtime.updates.adamw`: torch's fused kernel), and by DeepSpeedCPUAdam
(``pip install -e '.[peers]'``; it compiles itself with g++ and ninja), in turns, on equal numbers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks.report import machine, table, write_json
from fxzero.runtime import updates

GROUP: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
}


class Numbers:
    """Parameters in tensors of a layer's size, and their gradients."""

    def __init__(self, num_elements: int) -> None:
        torch.manual_seed(0)
        sizes = [1 << 20] * (num_elements >> 20) + [num_elements % (1 << 20)]
        self.params = [torch.randn(size) for size in sizes if size]
        self.grads = [torch.randn_like(param) for param in self.params]


def ours(numbers: Numbers) -> Callable[[], None]:
    """What a step's lane ``host`` runs."""
    state = [[torch.zeros_like(p) for p in numbers.params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in numbers.params]
    return lambda: updates.adamw(numbers.params, numbers.grads, [*state, steps], GROUP, None, None)


def by_optimizer(
    numbers: Numbers, make: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> Callable[[], None]:
    """An optimizer's own step."""
    parameters = [torch.nn.Parameter(param) for param in numbers.params]
    for parameter, grad in zip(parameters, numbers.grads, strict=True):
        parameter.grad = grad
    optimizer = make(list(parameters))
    return lambda: optimizer.step() and None


def torch_loop(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Operator by operator."""
    return torch.optim.AdamW(parameters, lr=GROUP["lr"], foreach=False, fused=False)


def deepspeed(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """ZeRO-Offload's."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam(
        parameters, lr=GROUP["lr"], weight_decay=GROUP["weight_decay"], adamw_mode=True
    )
    return made


def main(
    millions: Annotated[int, typer.Option(help="Of parameters.")] = 20,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    repeats: Annotated[int, typer.Option(help="Updates of each, in turns.")] = 31,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Time one update of each, in turns."""
    torch.set_num_threads(threads)
    facts = machine("host_adam.py", "cpu")
    numbers = {name: Numbers(millions * 10**6) for name in ("fxzero", "deepspeed", "torch_loop")}
    run = {
        "fxzero": ours(numbers["fxzero"]),
        "deepspeed": by_optimizer(numbers["deepspeed"], deepspeed),
        "torch_loop": by_optimizer(numbers["torch_loop"], torch_loop),
    }
    times: dict[str, list[float]] = {name: [] for name in run}
    with torch.no_grad():
        for repeat in range(-2, repeats):
            for name, update in run.items():
                if name == "torch_loop" and repeat > 4:
                    continue  # it takes ten times as long
                begin = time.perf_counter()
                update()
                if repeat >= 0:
                    times[name].append(1e3 * (time.perf_counter() - begin))
    rows = [
        {
            "name": name,
            "median_ms": median(own),
            "min_ms": min(own),
            "ratio_to_deepspeed": median(
                mine / theirs for mine, theirs in zip(own, times["deepspeed"], strict=False)
            ),
            "every_ms": own,
        }
        for name, own in times.items()
    ]
    shown = [
        [row["name"], f"{row['median_ms']:.2f}", f"{row['ratio_to_deepspeed']:.3f}"] for row in rows
    ]
    print(table([f"{millions} M", "ms", "to DeepSpeed"], shown))
    if json is not None:
        write_json(json, {**facts, "millions": millions, "threads": threads}, rows)


if __name__ == "__main__":
    typer.run(main)
