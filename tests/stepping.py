"""Scheduled graphs of whole steps, for any number of ranks, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import fxzero
from fxzero.compiler.compilation import Compilation, observers
from fxzero.graph import StepGraph
from fxzero.inspect.capture import fake_ranks

EAGER: dict[str, Any] = {
    "lower_regions": {"backend": "eager"},
    # Tiny layers would all travel together, and nothing would be worth overlapping.
    "bucket": {"min_bytes": 0},
    "prefetch": {"distance": 1},
}


def compiled_step(
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]],
    *,
    zero: int = 3,
    world_size: int = 8,
    rank: int = 0,
    mesh_shape: tuple[int, ...] = (),
    optimizer: Callable[[Any], Optimizer] = torch.optim.AdamW,
    options: Mapping[str, Any] = EAGER,
    **settings: Any,
) -> Compilation:
    """Compile one step on one of many ranks that exist only in name.

    Args:
        mesh_shape: of two axes, replicate and shard; the default is one axis of all ranks.
    """
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    torch._dynamo.reset()
    observers.append(keep)
    try:
        with fake_ranks(world_size, rank):
            model, batch = build()
            mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
            fxzero.shard(model, zero=zero, mesh=mesh)
            step = fxzero.compile_step(
                model, optimizer(model.parameters()), options=dict(options), **settings
            )
            step(*batch)
    finally:
        observers.remove(keep)
        torch._dynamo.reset()
    (compilation,) = found
    return compilation


@contextlib.contextmanager
def holding(micro_steps: int) -> Iterator[None]:
    """Let graphs hold up to so many micro-steps."""
    with (
        mock.patch("fxzero.passes.accumulate.UNROLLED", micro_steps),
        mock.patch("fxzero.step.capture.UNROLLED", micro_steps),
    ):
        yield


def step_graph(
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]], **settings: Any
) -> StepGraph:
    """The scheduled graph of one step."""
    joint = compiled_step(build, **settings).joint
    assert joint is not None
    return joint


def chain_of(depth: int = 3, width: int = 8, rows: int = 4) -> Any:
    """Bias-free linear layers that return a loss, and a batch."""
    from tests.tracing import Chain

    return lambda: (Chain(depth, width), (torch.randn(rows, width),))
