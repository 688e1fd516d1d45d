"""What a step costs the host when kernels take next to nothing: both doors, on fake ranks.

    python examples/benchmarks/overhead.py --layers 12,96 --json overhead.json

A GPT of many layers and hardly any width in one process, whose process group moves nothing: what
is left is Python, guards, autograd, dispatch and the launch of some twenty small kernels a layer.
`inductor` is the same model, neither sharded nor reduced, under plain torch.compile.
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
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks import options
from examples.benchmarks.report import machine, table, write_json
from examples.models import GPT, GPTConfig

Step = Callable[[], object]
WIDTH, BLOCK, VOCABULARY = 16, 8, 64


def loop(model: torch.nn.Module, backend: str) -> dict[str, Step]:
    """The parts of the ordinary loop's step."""
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

    return {"forward": lambda: compiled(tokens, tokens), "backward": without_update, "step": step}


def contenders(num_layers: int) -> dict[str, dict[str, Step]]:
    """By name, what is timed of each."""
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
        "fxzero-step": {"step": lambda: whole(tokens, tokens)},
    }


def measure(steps: int, actions: dict[str, Step]) -> dict[str, float]:
    """Milliseconds of each action, the median of some calls after three that compile."""
    found = {}
    for name, action in actions.items():
        times = []
        for i in range(steps + 3):
            begin = time.perf_counter()
            action()
            if i >= 3:
                times.append((time.perf_counter() - begin) * 1e3)
        found[f"{name}_ms"] = median(times)
    return found


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
            for name, actions in contenders(depth).items():
                torch._dynamo.reset()
                rows.append({"name": name, "layers": depth, **measure(steps, actions)})
    facts = {
        **machine("overhead.py", "cpu"),
        "model": f"GPT, width {WIDTH}, 1 x {BLOCK} tokens, vocabulary {VOCABULARY}, fp32",
        "ranks": f"{ranks} fake ones, ZeRO-3; inductor alone, not sharded",
        "optimizer": "AdamW, fused",
        "forward_ms": "forward",
        "backward_ms": "forward, backward and zero_grad",
        "step_ms": "the whole step, update included",
    }
    write_json(json_path, facts, rows)
    header = ["contender", "layers", "forward ms", "with backward ms", "step ms"]
    keys = ("forward_ms", "backward_ms", "step_ms")
    lines = [
        [row["name"], str(row["layers"]), *(f"{row[k]:.1f}" if k in row else "-" for k in keys)]
        for row in rows
    ]
    print(table(header, lines))


if __name__ == "__main__":
    typer.run(main)
