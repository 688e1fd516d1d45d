"""Losses and parameters of DeepSpeed 0.19.8 itself, and of both doors here, step by step.

fp32 within 1e-5. bf16 within 2 per cent of a loss and 0.02 of a parameter that a learning rate of
0.02 moves in six steps: both compute in bf16, of which an ulp is 2⁻⁸, but DeepSpeed also adds
gradients of micro-batches up, and averages them over ranks, in bf16, where fxzero adds in fp32.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch

import fxzero
from fxzero.integrations.deepspeed import FromDeepSpeed
from tests.integrations.deepspeed_cases import (
    CASES,
    STEPS,
    Net,
    batch,
    is_low,
    loss_fn,
    loss_of_step,
)
from tests.integrations.deepspeed_reference import FILE
from tests.tiers import exhaustive

REFERENCE = json.loads(FILE.read_text())
EAGER = {"lower_regions": {"backend": "eager"}}
VERSION = REFERENCE["deepspeed"]


def read(name: str) -> FromDeepSpeed:
    """A case's configuration, as fxzero reads it."""
    return fxzero.from_deepspeed(CASES[name]["config"], deepspeed_version=VERSION)


def train(name: str, door: str, rank: int, world_size: int) -> dict[str, Any]:
    """Train one case by one door, on this rank."""
    torch.compiler.reset()
    made = read(name)
    net = Net()
    losses: list[float] = []
    rates: list[float] = []
    if door == "step":
        step = made.compile_step(net, loss_fn=loss_fn, options=EAGER)
        for number in range(STEPS):
            done = step(*batch(number, rank, world_size))
            losses.append(done.loss.item())
            rates.append(done.learning_rate)
    else:
        engine = made.engine(net, options=EAGER)
        for number in range(STEPS):
            inputs, targets = batch(number, rank, world_size)
            rates.append(engine.get_lr()[0])
            losses.append(loss_of_step(engine, inputs, targets, made.micro_batches))
    return {
        "losses": losses,
        "learning_rates": rates,
        "parameters": {
            key: full(value).flatten().tolist() for key, value in net.named_parameters()
        },
    }


def full(value: torch.Tensor) -> torch.Tensor:
    """A parameter, of all ranks."""
    whole = value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value
    return whole.detach()


def compare(name: str, found: dict[str, Any], rank: int) -> None:
    """Hold what was found against what DeepSpeed computes."""
    expected = REFERENCE["cases"][name]
    low = is_low(CASES[name]["config"])
    close = {"rtol": 0.02, "atol": 0.02} if low else {"rtol": 1e-5, "atol": 1e-5}
    assert found["learning_rates"] == pytest.approx(expected["learning_rates"], rel=1e-8)
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor(expected["losses"][rank]), **close
    )
    for key, values in expected["parameters"].items():
        torch.testing.assert_close(
            torch.tensor(found["parameters"][key]), torch.tensor(values), **close, msg=key
        )


def of_ranks(count: int) -> list[str]:
    """The cases of so many ranks."""
    return [name for name, case in CASES.items() if case["world_size"] == count]


def train_all(names: list[str], door: str) -> list[dict[str, Any]]:
    """Several cases, on this one of two ranks."""
    return [train(name, door, torch.distributed.get_rank(), 2) for name in names]


def test_the_reference_is_whole() -> None:
    """No case is skipped, and the optimizer has moved every model."""
    assert VERSION == "0.19.8"
    assert set(REFERENCE["cases"]) == set(CASES)
    for name, case in REFERENCE["cases"].items():
        assert len(case["losses"]) == CASES[name]["world_size"]
        assert all(len(losses) == STEPS for losses in case["losses"])


def test_what_the_cases_tell_apart() -> None:
    """Decay that is decoupled from decay that is not, a clip from none, and so on."""
    for one, other in (
        ("adam_is_adamw", "adam_l2"),
        ("clipping_default", "clipping_zero"),
        ("clipping_default", "clipping_half"),
        ("warmup", "warmup_linear"),
        ("one_cycle", "one_cycle_stairs"),
        ("torch_adamw", "adamw_no_decay"),
    ):
        assert REFERENCE["cases"][one]["losses"] != REFERENCE["cases"][other]["losses"]


@pytest.mark.parametrize("name", of_ranks(1))
@pytest.mark.parametrize("door", ["step", "engine"])
def test_alone(name: str, door: str) -> None:
    """Optimizers and schedules."""
    compare(name, train(name, door, 0, 1), 0)


PARTS = 5
"""Of the cases of two ranks: in each are stages, offload or accumulation, clipping or scaling, and
bf16."""
EVERY_RUN = [("step", 0), ("engine", 4)]
AT_TIMES = [case for case in product(("step", "engine"), range(PARTS)) if case not in EVERY_RUN]


@pytest.mark.parametrize(("door", "part"), [*EVERY_RUN, *exhaustive(*AT_TIMES)])
def test_two_ranks(ranks: Any, door: str, part: int) -> None:
    """Stages, offload, accumulation, clipping, bf16."""
    names = of_ranks(2)[part::PARTS]
    for rank, found in enumerate(ranks(2).run(train_all, names, door)):
        for name, case in zip(names, found, strict=True):
            compare(name, case, rank)
