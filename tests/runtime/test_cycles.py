"""A step leaves no tensors to Python's collector: what it held is free when it is over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import fxzero
from fxzero.inspect.capture import fake_ranks
from tests.parity.sharded import compile_eagerly

OPTIMIZERS = {
    "fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: optim.AdamW(parameters, foreach=True),
    "one by one": lambda parameters: optim.AdamW(parameters, foreach=False),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Garbage stays where it is, and is counted."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def garbage() -> list[Any]:
    """Tensors that only the collector finds."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    return [type(found) for found in gc.garbage if isinstance(found, Tensor)]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("door", ["loop", "step"])
def test_a_step_leaves_none(door: str, make: Callable[..., optim.Optimizer]) -> None:
    """Gradients that a cycle held would be a second copy of them, until the collector comes by."""
    with fake_ranks(2):
        model = fxzero.shard(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), zero=3)
        optimizer = make(model.parameters())
        x, y = torch.ones(4, 6), torch.ones(4, 1)
        if door == "step":
            compiled = fxzero.compile_step(model, optimizer, nn.functional.mse_loss)

            def step() -> None:
                compiled(x, y)

        else:
            called = compile_eagerly(model)

            def step() -> None:
                nn.functional.mse_loss(called(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(3):
            step()
        gc.collect()
        step()
        assert garbage() == []
