"""Norms that are not finite are reported a step late, with the parameters' names."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from fxzero.runtime.finite import Finite
from tests.parity.harness import Pools
from tests.parity.sharded import on_two_ranks
from tests.runtime.test_watch import Said

EAGER = {"lower_regions": {"backend": "eager"}}


class Rooted(nn.Module):
    """The gradient of `root` is infinite where it is 0, and no other one is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.root = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        """(B, 3), scalar → scalar."""
        return self.layer(x).square().sum() + (self.root * factor).sum().sqrt()


def steps(factors: list[float], **options: object) -> nn.Module:
    """Train whole steps with clipping; at factor 0 a gradient is not finite."""
    torch.manual_seed(0)
    model = Rooted()
    step = fxzero.compile_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        options={**EAGER, **options},
        clip_grad_norm=1.0,
    )
    for factor in factors:
        step(torch.ones(2, 3), torch.tensor(factor))
    return model


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the logger was told."""
    handler = Said()
    yield handler.lines
    logging.getLogger("fxzero").removeHandler(handler)


def test_a_step_that_was_not_finite(said: list[str]) -> None:
    """The next step says so, and names the one parameter."""
    model = steps([1.0, 0.0])
    assert not said, "nobody has waited for it"
    del model
    steps([1.0, 0.0, 1.0])
    message = said[-1]
    assert "in step 2 of this graph the norm of all gradients was nan" in message
    assert "not finite in root. " in message
    assert "stop_unless_finite" in message


def test_finite_steps_say_nothing(said: list[str]) -> None:
    """No news."""
    steps([1.0, 2.0, 3.0])
    assert not said


def test_bad_steps_in_a_row_are_said_ever_more_rarely(said: list[str]) -> None:
    """The 1st, 2nd, 4th, 8th, … time."""
    node = Finite(["a", "b"])
    for _ in range(10):
        node(torch.tensor(float("inf")), torch.tensor([float("inf"), 1.0]))
    assert len(said) == 4
    assert "was inf (8 such steps so far): not finite in a. " in said[-1]


def test_the_last_step_of_a_run() -> None:
    """Is looked at when the process ends."""
    code = "import torch; from fxzero.runtime.finite import Finite; import logging\n"
    code += "f = Finite(['w']); f(torch.tensor(float('nan')), torch.tensor([float('nan')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "in step 1 of this graph the norm of all gradients was nan" in done.stderr


def on_one_rank() -> list[str]:
    """Job: rank 1's batch alone makes a gradient infinite."""
    said = Said()
    torch.manual_seed(0)
    model = fxzero.shard(Rooted(), zero=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = fxzero.compile_step(model, optimizer, options=EAGER, clip_grad_norm=1.0)
    for factor in (1.0, float(dist.get_rank() == 0), 1.0):
        step(torch.ones(2, 3), torch.tensor(factor))
    return said.lines


@on_two_ranks
def test_a_step_that_was_not_finite_on_one_rank(ranks: Pools, world: int) -> None:
    """All ranks say so, for all have updated by it."""
    for lines in ranks(world).run(on_one_rank):
        assert len(lines) == 1
        assert "not finite in root" in lines[0]
