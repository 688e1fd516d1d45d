"""What a step costs the host when kernels take next to nothing: both doors, on fake ranks.

    python examples/benchmarks/overhead.py --layers 12,96 --json overhead.json

A GPT of many layers and hardly any width in one process, whose process group moves nothing: what
is left is Python, guards, autograd, dispatch and the launch of some twenty small kernels a layer.
`inductor` is the same model, neither sharded nor reduced, under plain torch.compile.

Host time is what lies between kernels: the step without what Inductor's code takes, the operators
that a scheduled graph calls by itself (collectives above all, which a process group of fake ranks
runs too) and the fused update. The first two are timed from inside, in steps of their own; the
update is timed alone, on plain tensors of the same shapes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch._inductor.output_code import CompiledFxGraph
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks import options
from examples.benchmarks.report import machine, table, write_json
from examples.models import GPT, GPTConfig

Step = Callable[[], object]
WIDTH, BLOCK, VOCABULARY = 16, 8, 64


@dataclass(frozen=True)
class Contender:
    """Somebody who trains a model."""

    parameters: tuple[torch.Tensor, ...]
    actions: dict[str, Step]
    """What is timed, by name; ``"step"`` among them."""


def loop(model: torch.nn.Module, backend: str) -> Contender:
    """The ordinary loop."""
    tokens = torch.zeros(1, BLOCK, dtype=torch.int64)
    optimizer = AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        compiled(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def without_update() -> None:
        compiled(tokens, tokens).backward()
        optimizer.zero_grad()

    actions = {
        "forward": lambda: compiled(tokens, tokens),
        "backward": without_update,
        "step": step,
    }
    return Contender(tuple(model.parameters()), actions)


def contenders(num_layers: int) -> dict[str, Contender]:
    """All of them, by name."""
    import fxzero

    config = GPTConfig(
        num_layers=num_layers, num_heads=2, hidden=WIDTH, vocab_size=VOCABULARY, block_size=BLOCK
    )
    tokens = torch.zeros(1, BLOCK, dtype=torch.int64)
    model = fxzero.shard(GPT(config), zero=3)
    whole = fxzero.compile_step(model, AdamW(model.parameters(), fused=True))
    return {
        "inductor": loop(GPT(config), "inductor"),
        "fxzero": loop(fxzero.shard(GPT(config), zero=3), "fxzero"),
        "fxzero-step": Contender(
            tuple(model.parameters()), {"step": lambda: whole(tokens, tokens)}
        ),
    }


def measure(steps: int, contender: Contender) -> dict[str, float]:
    """Milliseconds of each action, the median of some calls after three that compile; of the
    step also those in kernels, and the rest."""
    found = {}
    for name, action in contender.actions.items():
        for _ in range(3):
            action()
        found[f"{name}_ms"] = median(timed_ms(action) for _ in range(steps))
    inside = []
    with kernels_timed() as kernels:
        for _ in range(steps):
            kernels.clear()
            contender.actions["step"]()
            inside.append(sum(kernels))
    update = update_of(contender.parameters)
    found["kernels_ms"] = median(inside) + median(timed_ms(update) for _ in range(steps))
    found["host_ms"] = found["step_ms"] - found["kernels_ms"]
    return found


def timed_ms(action: Step) -> float:
    """Milliseconds of one call."""
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e3


def update_of(parameters: Iterable[torch.Tensor]) -> Step:
    """AdamW's fused kernel on plain tensors of the same shapes as some parameters' own parts."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    params, grads, means, squares = ([torch.zeros_like(p) for p in own] for _ in range(4))
    counts = [torch.zeros(()) for _ in own]
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    kernel = functools.partial(
        torch._fused_adamw_,
        *(params, grads, means, squares, [], counts),
        **numbers,
        amsgrad=False,
        maximize=False,
    )
    return torch.no_grad()(kernel)


@contextlib.contextmanager
def kernels_timed() -> Iterator[list[float]]:
    """Collect the milliseconds of Inductor's code, and of operators outside of it."""
    found: list[float] = []
    running = False

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if running:  # an operator inside of something that is timed
                return function(*args, **kwargs)
            running = True
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                found.append((time.perf_counter() - begin) * 1e3)
                running = False

        return call

    with (
        mock.patch.object(CompiledFxGraph, "__call__", timed(CompiledFxGraph.__call__)),
        mock.patch.object(OpOverload, "__call__", timed(OpOverload.__call__)),
    ):
        yield found


def main(
    *,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")],
    layers: Annotated[str, typer.Option(help="Transformer blocks, by comma.")] = "12,96",
    steps: Annotated[int, typer.Option(help="Calls to take the median of.", min=1)] = 40,
    ranks: Annotated[int, typer.Option(help="Fake ranks.", min=2)] = 8,
) -> None:
    """Measure what a step costs the host."""
    from fxzero.inspect.capture import fake_ranks

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with fake_ranks(ranks):
        for depth in options.numbers("--layers", layers):
            for name, contender in contenders(depth).items():
                torch._dynamo.reset()
                rows.append({"name": name, "layers": depth, **measure(steps, contender)})
    facts = {
        **machine("overhead.py", "cpu"),
        "model": f"GPT, width {WIDTH}, 1 x {BLOCK} tokens, vocabulary {VOCABULARY}, fp32",
        "ranks": f"{ranks} fake ones, ZeRO-3; inductor alone, not sharded",
        "optimizer": "AdamW, fused",
        "forward_ms": "forward",
        "backward_ms": "forward, backward and zero_grad",
        "step_ms": "the whole step, update included",
        "kernels_ms": "of it in Inductor's code, operators outside of it and the fused update",
        "host_ms": "of it between kernels: the rest",
    }
    write_json(json_path, facts, rows)
    header = ["contender", "layers", "forward ms", "with backward ms", "step ms"]
    header += ["in kernels ms", "between them ms"]
    keys = ("forward_ms", "backward_ms", "step_ms", "kernels_ms", "host_ms")
    lines = [
        [row["name"], str(row["layers"]), *(f"{row[k]:.1f}" if k in row else "-" for k in keys)]
        for row in rows
    ]
    print(table(header, lines))


if __name__ == "__main__":
    typer.run(main)
