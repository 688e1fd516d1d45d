"""What collectives take: timed on two ranks, over gloo."""

from __future__ import annotations

import math
from dataclasses import astuple

import torch
import torch.distributed as dist

from fxzero.cost.links import CollectiveFigures, collective, time_collective
from fxzero.transfer import TransferKind
from tests.parity.harness import Pools


def twice(kind: TransferKind, num_tensors: int) -> list[list[float]]:
    """What a collective that is timed gives, two times in a row."""
    group = dist.group.WORLD
    assert group is not None
    start, finish = collective(kind, 1 << 12, "cpu", group, num_tensors)
    return [torch.cat([t.flatten() for t in finish(start())]).tolist() for _ in range(2)]


def test_each_run_moves_the_same(ranks: Pools) -> None:
    """A reduction must not go on with memory that the one before has taken."""
    for kind, elements in (
        (TransferKind.ALL_GATHER, 1024),
        (TransferKind.REDUCE_SCATTER, 512),
        (TransferKind.ALL_REDUCE, 1024),
    ):
        for num_tensors in (1, 4):
            for runs in ranks(2).run(twice, kind, num_tensors):
                assert runs == [[1.0] * elements] * 2, kind


def times(kind: TransferKind) -> CollectiveFigures:
    """As the doctor asks for them."""
    return time_collective(kind, "cpu")


def test_figures_are_positive(ranks: Pools) -> None:
    """And a byte takes less than what a slow network would."""
    first, _ = ranks(2).run(times, TransferKind.ALL_GATHER)
    assert all(value >= 0 and math.isfinite(value) for value in astuple(first))
    assert 0 < first.us_per_byte < 1.0
    assert first.latency_us > 1.0
