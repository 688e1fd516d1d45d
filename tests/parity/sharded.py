"""A sharded, compiled example and its reference: where tests of a training loop start."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxzero
from tests.parity.models import EXAMPLES, Batch, Example
from tests.parity.training import (
    RTOL,
    build,
    make_batch,
)
from tests.tiers import exhaustive

FLOAT64 = torch.float64
TIGHT = RTOL[FLOAT64]

on_two_ranks = pytest.mark.parametrize("world", [2])
all_stages = pytest.mark.parametrize("zero", [0, 1, 2, 3])
ends_in_every_run = pytest.mark.parametrize("zero", [0, 3, *exhaustive(1, 2)])
"""All stages; those between the ends where a run tries all there is."""
first_and_last_stage = pytest.mark.parametrize("zero", [0, 3])


def compiled(name: str, zero: int, mesh: DeviceMesh | None = None, seed: int = 0) -> nn.Module:
    """An example in float64, sharded and compiled with eager regions."""
    model = fxzero.shard(build(EXAMPLES[name], FLOAT64, seed), zero=zero, mesh=mesh)
    return compile_eagerly(model)


def compile_eagerly(model: nn.Module) -> nn.Module:
    """Compile with fxzero's passes, but without a code generator behind them."""
    options = {"lower_regions": {"backend": "eager"}}
    return torch.compile(model, backend="fxzero", options=options)  # type: ignore[return-value]


def batches_of(example: Example, count: int) -> list[Batch]:
    """That many different batches over all ranks."""
    return [make_batch(example, FLOAT64, seed) for seed in range(count)]


def with_reference(name: str, zero: int) -> tuple[Example, nn.Module, nn.Module]:
    """An example, its compiled sharded model, and the same model for the reference."""
    return EXAMPLES[name], compiled(name, zero), build(EXAMPLES[name], FLOAT64)


def take_step(model: nn.Module) -> None:
    """A step of plain descent, so that the next gradients are others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def inner(model: nn.Module) -> nn.Module:
    """The model that torch.compile wrapped."""
    return getattr(model, "_orig_mod", model)
