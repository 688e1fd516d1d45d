"""The head of a language model and its loss: with its logits in memory, and without.

    python examples/benchmarks/head_loss.py --json head_loss.json

A training step of GPT-lite's head (a batch of 8 sequences of 512, vocabulary 50,304) through
``torch.compile(backend="fxzero")``, with `lower_kernels` and without, in turns. Peaks are of what
torch allocates beyond what was there before the step: on CPU by the profiler's record of every
allocation, on CUDA by the allocator's. Gradients are held against `F.cross_entropy` in eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples is not installed

from examples.benchmarks.measure import allocated_peak_bytes, timed_s
from examples.benchmarks.options import Device
from examples.benchmarks.report import machine, table, write_json


class Head(nn.Module):
    """A linear layer over hidden states and the cross entropy of what it says."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """``(B, T, width), (B, T) → scalar``."""
        return F.cross_entropy(self.linear(hidden).flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Contender:
    """One way to compute a step."""

    name: str
    step: Callable[[], Tensor]
    grads: Callable[[], list[Tensor]]


def peak_bytes(device: str, call: Callable[[], Any]) -> int:
    """The most that torch has allocated at once during a call, beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return allocated_peak_bytes(call)


def contender(name: str, head: Head, hidden: Tensor, target: Tensor, compiled: Any) -> Contender:
    """A contender that runs forward and backward and leaves gradients behind."""

    def step() -> Tensor:
        head.zero_grad()
        hidden.grad = None
        loss: Tensor = compiled(hidden, target)
        loss.backward()
        return loss.detach()

    def grads() -> list[Tensor]:
        assert hidden.grad is not None
        assert head.linear.weight.grad is not None
        return [hidden.grad, head.linear.weight.grad]

    return Contender(name, step, grads)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference between gradients, to the largest element of each."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main(
    *,
    json_path: Annotated[Path, typer.Option("--json", help="Where to write the figures.")],
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 512,
    width: Annotated[int, typer.Option(help="Hidden size.", min=1)] = 768,
    vocabulary: Annotated[int, typer.Option(help="Classes.", min=2)] = 50_304,
    steps: Annotated[int, typer.Option(help="Timed steps of each, in turns.", min=1)] = 3,
    device: Annotated[Device, typer.Option(help="CPU or GPU.")] = Device.cpu,
) -> None:
    """Measure time and memory of a head's training step with and without its logits."""
    torch.manual_seed(0)
    facts = machine("head_loss.py", device.value)
    head = Head(width, vocabulary).to(device.value)
    hidden = torch.randn(batch, length, width, device=device.value, requires_grad=True)
    target = torch.randint(vocabulary, (batch, length), device=device.value)
    force = "linear_cross_entropy" if device is Device.cuda else ""
    ways = {"eager": head} | {
        name: torch.compile(head, backend="fxzero", options={"lower_kernels": settings})
        for name, settings in (
            ("fxzero, logits", {"enabled": False}),
            ("fxzero", {"force": force}),
        )
    }
    contenders = [contender(name, head, hidden, target, way) for name, way in ways.items()]
    rows: list[dict[str, Any]] = []
    expected: list[Tensor] = []
    for each in contenders:
        loss = each.step()  # compiles
        expected = expected or [g.clone() for g in each.grads()]
        rows.append(
            {
                "name": each.name,
                "loss": float(loss),
                "gradient_difference": difference(each.grads(), expected),
                "peak_bytes": peak_bytes(device.value, each.step),
                "step_ms": [],
            }
        )
    for _ in range(steps):
        for each, row in zip(contenders, rows, strict=True):
            row["step_ms"].append(timed_s(device.value, each.step)[1] * 1e3)
    logits_bytes = batch * length * vocabulary * 4
    reference = rows[1]
    for row in rows:
        row["median_ms"] = median(row["step_ms"])
        row["time_ratio"] = row["median_ms"] / median(reference["step_ms"])
        row["saved_share_of_logits"] = (reference["peak_bytes"] - row["peak_bytes"]) / logits_bytes
    facts |= {
        "batch": batch,
        "length": length,
        "width": width,
        "vocabulary": vocabulary,
        "dtype": "fp32",
        "threads": torch.get_num_threads(),
        "logits_bytes": logits_bytes,
        "ratios": "to fxzero with lower_kernels off",
        "gradient_difference": "to F.cross_entropy in eager, over the largest element",
    }
    write_json(json_path, facts, rows)
    header = ["contender", "median ms", "time ratio", "peak MB", "saved / logits", "gradients"]
    lines = [
        [
            row["name"],
            f"{row['median_ms']:.0f}",
            f"{row['time_ratio']:.3f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['saved_share_of_logits']:.2f}",
            f"{row['gradient_difference']:.1e}",
        ]
        for row in rows
    ]
    print(
        f"{table(header, lines)}\nlogits take {logits_bytes / 1e6:.0f} MB; ratios are to the second"
    )


if __name__ == "__main__":
    typer.run(main)
