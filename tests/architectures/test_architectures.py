"""A sample of the table; `python -m tests.architectures` runs all of it."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
import torch

from tests.architectures.models import ARCHITECTURES
from tests.architectures.run import DOORS, Trained, compare, judge
from tests.parity.harness import Pools
from tests.tiers import exhaustive

SAMPLE = [("bert", 0), ("t5", 3), ("mixtral", 3), ("vit", 0)]
"""What is quick to compile, of four kinds; every run trains the last in an ordinary loop."""


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("name", "zero", "door"),
    [
        (*SAMPLE[-1], DOORS[0]),
        *exhaustive((*SAMPLE[-1], DOORS[1])),
        *exhaustive(*((*each, door) for each in SAMPLE[:-1] for door in DOORS)),
    ],
)
def test_it_trains_as_eager_does(ranks: Pools, world: int, name: str, zero: int, door: str) -> None:
    for verdict in ranks(world).run(judge, name, zero, door):
        assert verdict.outcome == "right", verdict.why
        # Dynamo itself traces some of them twice, where a Python float is a tensor's operand.
        assert verdict.graphs in ((4,) if name == "t5" and not dynamo_copies() else (1, 2))


@functools.cache
def dynamo_copies() -> bool:
    """Whether Dynamo traces ``copy.deepcopy``: T5's decoder copies its configuration.

    torch 2.11 ends its graph there, and `compile_step` says so.
    """

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x + len(copy.deepcopy([1, 2]))

    try:
        torch.compile(copied, backend="eager", fullgraph=True)(torch.ones(1))
    except torch._dynamo.exc.Unsupported:
        return False
    return True


def test_forty_architectures_of_nine_kinds_are_in_the_table() -> None:
    kinds = Counter(architecture.kind for architecture in ARCHITECTURES.values())
    assert sum(kinds.values()) >= 40
    assert len(kinds) == 10, kinds


def test_a_parameter_that_is_off_by_a_trillionth_is_found() -> None:
    right = Trained({"step 0": torch.tensor(1.0)}, {"w": torch.tensor([1.0, 8.0]).double()})
    off = Trained(right.losses, {"w": right.parameters["w"] + 1.6e-11})
    assert compare(right, right, 1e-12) == []
    assert compare(off, right, 1e-12)
