"""Train an architecture through both doors, and compare with eager in one process.

The reference is transformers' model as it is, in eager mode, on the whole batch. Where eager
itself gives other numbers for the mean of the ranks' losses (a loss in fp32, BatchNorm, a
balance of experts over the batch, a contrastive loss), the reference is that mean, which is
what data parallelism means; `eager_differs` says by how much the two are apart.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from fxzero.compiler.compilation import Compilation
from fxzero.step.loss import loss_of
from tests.architectures.architecture import Architecture, Batch
from tests.architectures.models import ARCHITECTURES
from tests.parity.training import Tensors, differences, full_parameters, mean_over_ranks
from tests.tracing import observed

STEPS = 3
ROWS = 4
"""Of a batch over all ranks."""
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Of a tensor's largest element, by the dtype in which a model trains."""
OPTIONS: dict[str, Any] = {"lower_regions": {"backend": "eager"}}
DOORS = ("torch.compile", "compile_step")


@dataclass(frozen=True)
class Trained:
    """What training leaves behind."""

    losses: Tensors
    parameters: Tensors


@dataclass(frozen=True)
class Verdict:
    """What became of one architecture at one stage, through one door."""

    name: str
    kind: str
    zero: int
    door: str
    outcome: str
    """``right``, ``wrong``, ``refused`` (an error of fxzero's) or ``crashed``."""
    why: str
    graphs: int
    """How many graphs fxzero compiled."""
    reference: str
    """``whole batch``; ``ranks`` for the mean over the ranks' losses; ``ranks' loss`` where the
    parameters are compared with those of the whole batch."""
    eager_differs: float
    """How far eager's whole batch is from eager's mean over ranks, of the largest element."""
    seconds: float


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Steps of a few per cent. Epsilon is such that noise in place of a gradient stays noise."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def rows_of(batch: Batch, rank: int, world_size: int) -> Batch:
    """A rank's equal part; flags go to every rank."""
    return {
        name: value.chunk(world_size)[rank] if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def train_eagerly(architecture: Architecture, parts: int) -> Trained:
    """Train in this process on the mean of the losses of so many parts of each batch."""
    model = architecture.build()
    optimizer = adamw(model.parameters())
    losses: Tensors = {}
    for step in range(STEPS):
        batch = architecture.batch(ROWS, seed=step)
        found = [loss_of(model(**rows_of(batch, i, parts))) for i in range(parts)]
        loss = torch.stack(found).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"step {step}"] = loss.detach()
    return Trained(losses, full_parameters(model))


def train_compiled(architecture: Architecture, zero: int, door: str) -> Trained:
    """Train this rank's part of every batch through one of fxzero's doors."""
    model = fxzero.shard(architecture.build(), zero=zero)
    optimizer = adamw(model.parameters())
    take = loop(model, optimizer) if door == DOORS[0] else whole(model, optimizer)
    losses: Tensors = {}
    for step in range(STEPS):
        batch = architecture.batch(ROWS, seed=step)
        loss = take(rows_of(batch, dist.get_rank(), dist.get_world_size()))
        losses[f"step {step}"] = mean_over_ranks(loss)
    return Trained(losses, full_parameters(model))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
    """A step of the ordinary loop."""
    compiled = torch.compile(model, backend="fxzero", options=OPTIONS)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = loss_of(compiled(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
    """The whole step in one graph."""
    compiled = fxzero.compile_step(model, optimizer, options=OPTIONS)
    return lambda batch: compiled(**batch).loss


def reference(architecture: Architecture) -> tuple[Trained, str, float]:
    """What eager gives, by which reading of the batch, and how far the two readings are apart."""
    whole_batch = train_eagerly(architecture, 1)
    ranks = train_eagerly(architecture, dist.get_world_size())
    losses = distance(whole_batch.losses, ranks.losses)
    parameters = distance(whole_batch.parameters, ranks.parameters)
    apart = max(losses, parameters)
    near = RTOL[architecture.dtype] / 4
    if parameters > near:
        return ranks, "ranks", apart
    if losses > near:
        return Trained(ranks.losses, whole_batch.parameters), "ranks' loss", apart
    return whole_batch, "whole batch", apart


def distance(actual: Tensors, expected: Tensors) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    pairs = [(tensor, expected[name]) for name, tensor in actual.items()]
    return max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in pairs
        if a is not None and b is not None and b.numel()
    )


def compare(actual: Trained, expected: Trained, rtol: float) -> list[str]:
    """What differs, a line each."""
    return [
        f"{part}: {difference}"
        for part in ("losses", "parameters")
        for difference in differences(getattr(actual, part), getattr(expected, part), rtol)
    ]


def judge(name: str, zero: int, door: str) -> Verdict:
    """Train one architecture and compare. Runs on every rank."""
    architecture = ARCHITECTURES[name]
    expected, kind, apart = reference(architecture)
    compilations: list[Compilation] = []
    start = time.perf_counter()
    notes: list[str] = []
    outcome = "right"
    with warnings.catch_warnings(record=True) as caught, observed(compilations.append):
        warnings.simplefilter("always", fxzero.FxZeroWarning)
        try:
            actual = train_compiled(architecture, zero, door)
        except fxzero.FxZeroError as error:
            outcome, notes = "refused", [f"{type(error).__name__}: {error}"]
        else:
            notes = compare(actual, expected, RTOL[architecture.dtype])
            outcome = "wrong" if notes else "right"
    notes += [str(w.message) for w in caught if issubclass(w.category, fxzero.FxZeroWarning)]
    return Verdict(
        name=name,
        kind=architecture.kind,
        zero=zero,
        door=door,
        outcome=outcome,
        why="\n".join(notes),
        graphs=len(compilations),
        reference=kind,
        eager_differs=apart,
        seconds=round(time.perf_counter() - start, 1),
    )
