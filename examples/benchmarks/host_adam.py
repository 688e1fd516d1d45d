"""Update on the host, against DeepSpeed's C++ Adam and torch's own loop.

    python examples/benchmarks/host_adam.py --json host_adam.json

One AdamW update of some millions of fp32 parameters on one thread, as a step runs it for what lives
in the host's memory (`fxzero.runtime.updates.adamw`: torch's fused kernel, in a step's arena), and
by DeepSpeedCPUAdam (``pip install -e '.[peers]'``; it compiles itself with g++ and ninja), in
turns, on equal numbers. Where memory happens to lie makes a tenth of the time: each of several
rounds makes all of it anew.
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
from fxzero.runtime.arena import HostArena, Layout, aligned

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
    """What a step's lane ``host`` runs, where a step has it: see `fxzero.runtime.arena`."""
    state = [[torch.zeros_like(p) for p in numbers.params] for _ in range(2)]
    lists = {"": numbers.params, "exp_avg": state[0], "exp_avg_sq": state[1]}
    homes = {(str(i), name): t for name, own in lists.items() for i, t in enumerate(own)}
    layouts = {home: Layout.of(tensor) for home, tensor in homes.items()}
    arena = HostArena(layouts, sum(aligned(grad.nbytes) for grad in numbers.grads))
    for home, tensor in homes.items():
        assert arena.bring_home(home, tensor)
    begin = 0
    for i, grad in enumerate(numbers.grads):
        numbers.grads[i] = Layout.of(grad).at(arena.staging, begin).copy_(grad)
        begin += aligned(grad.nbytes)
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


def in_turns(num_elements: int, repeats: int, first: int) -> dict[str, list[float]]:
    """Milliseconds of updates in new memory; who makes its memory first differs."""
    makers: dict[str, Callable[[Numbers], Callable[[], None]]] = {
        "fxzero": ours,
        "deepspeed": lambda numbers: by_optimizer(numbers, deepspeed),
        "torch_loop": lambda numbers: by_optimizer(numbers, torch_loop),
    }
    names = list(makers)
    run = {name: makers[name](Numbers(num_elements)) for name in names[first:] + names[:first]}
    times: dict[str, list[float]] = {name: [] for name in names}
    with torch.no_grad():
        for repeat in range(-2, repeats):
            for name, update in run.items():
                if name == "torch_loop" and repeat > 0:
                    continue  # it takes five times as long
                begin = time.perf_counter()
                update()
                if repeat >= 0:
                    times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def main(
    millions: Annotated[int, typer.Option(help="Of parameters.")] = 20,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often all memory is made anew.")] = 7,
    repeats: Annotated[int, typer.Option(help="Updates of each in a round, in turns.")] = 15,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Time one update of each, in turns."""
    torch.set_num_threads(threads)
    facts = machine("host_adam.py", "cpu")
    times: dict[str, list[list[float]]] = {"fxzero": [], "deepspeed": [], "torch_loop": []}
    for number in range(rounds):
        for name, own in in_turns(millions * 10**6, repeats, first=number % 2).items():
            times[name].append(own)
    theirs = list(map(median, times["deepspeed"]))
    rows = []
    for name, every in times.items():
        medians = list(map(median, every))
        ratios = [mine / other for mine, other in zip(medians, theirs, strict=True)]
        rows.append(
            {
                "name": name,
                "median_ms": median(medians),
                "ratio_to_deepspeed": median(ratios),
                "ratio_of_each_round": ratios,
                "every_ms": every,
            }
        )
    shown = [
        [row["name"], f"{row['median_ms']:.2f}", f"{row['ratio_to_deepspeed']:.3f}"] for row in rows
    ]
    print(table([f"{millions} M", "ms", "to DeepSpeed"], shown))
    if json is not None:
        write_json(json, {**facts, "millions": millions, "threads": threads}, rows)


if __name__ == "__main__":
    typer.run(main)
