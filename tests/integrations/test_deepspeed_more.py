"""Losses of DeepSpeed 0.19.8 itself for every key that is taken, and for what others publish."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxzero
from fxzero.errors import ConfigError
from tests.integrations.deepspeed_cases import Net, batch, is_low, loss_fn, loss_of_step
from tests.integrations.deepspeed_more_cases import MORE, STEPS
from tests.integrations.deepspeed_reference import MORE_FILE, own_optimizer
from tests.parity.harness import Pools
from tests.tiers import exhaustive

REFERENCE: dict[str, Any] = json.loads(MORE_FILE.read_text())
EAGER = {"lower_regions": {"backend": "eager"}}
PARTS = 16
"""Jobs in which a pool trains all cases; neighbours are alike, and go to different ones."""


def losses_of(name: str, door: str) -> list[float] | str:
    """Train one case, on this rank; or what it needs the other door for."""
    torch.compiler.reset()
    case = MORE[name]
    made = fxzero.from_deepspeed(
        case["config"], deepspeed_version=REFERENCE["deepspeed"], **case["arguments"]
    )
    net = Net()
    own = None if made.make_optimizer is not None else own_optimizer
    rows, world = made.train_batch_size // dist.get_world_size(), dist.get_world_size()
    batches = [batch(step, dist.get_rank(), world) for step in range(STEPS)]
    batches = [(x[:rows], y[:rows]) for x, y in batches]
    if own is not None:
        made.shard(net)
    optimizer = own(net) if own is not None else None
    if door == "step":
        step = made.compile_step(net, optimizer, loss_fn, options=EAGER)
        return [step(*rows).loss.item() for rows in batches]
    try:
        engine = made.engine(net, optimizer, options=EAGER)
    except ConfigError as error:
        return str(error)
    return [loss_of_step(engine, x, y, made.micro_batches) for x, y in batches]


def all_losses(names: list[str], door: str) -> list[list[float] | str]:
    """Job: several cases."""
    return [losses_of(name, door) for name in names]


RUN = [name for name, losses in REFERENCE["cases"].items() if not isinstance(losses, str)]
"""What DeepSpeed trains on a CPU."""


def test_the_reference_is_whole() -> None:
    """Every case was tried, and most of them train there."""
    assert REFERENCE["deepspeed"] == "0.19.8"
    assert set(REFERENCE["cases"]) == set(MORE)
    assert len(RUN) >= 120


@pytest.mark.parametrize("part", [0, *exhaustive(*range(1, PARTS))])
@pytest.mark.parametrize("door", ["step", *exhaustive("engine")])
def test_losses_are_deepspeeds(ranks: Pools, door: str, part: int) -> None:
    names = RUN[part::PARTS]
    wrong = []
    for rank, found in enumerate(ranks(2).run(all_losses, names, door)):
        for name, losses in zip(names, found, strict=True):
            if isinstance(losses, str):
                assert door == "engine", (name, losses)
                assert "whole step" in losses, (name, losses)
                continue
            resolved = MORE[name]["resolved"]
            low = is_low(resolved) or bool(resolved.get("bfloat16", {}).get("enabled"))
            within = {"rel": 0.02, "abs": 0.02} if low else {"rel": 1e-5, "abs": 1e-5}
            wanted = REFERENCE["cases"][name][rank]
            if losses != pytest.approx(wanted, **within):
                wrong.append((name, rank, losses, wanted))
    assert not wrong
