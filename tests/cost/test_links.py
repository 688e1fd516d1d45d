"""What collectives take: timed on two ranks, over gloo."""

from __future__ import annotations

import math
import os
import time
from dataclasses import astuple

import pytest
import torch
import torch.distributed as dist

from fxzero.cost import links
from fxzero.cost.links import CollectiveFigures, collective, time_collective
from fxzero.runtime.collectives import InFlight
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


class Message:
    """On its way for 40 ms, of which a core works half; to be waited for once."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        """Work, and sleep."""
        self.waits += 1
        begin = time.thread_time()
        while time.thread_time() < begin + 0.02:
            pass
        time.sleep(0.02)


def beside_products() -> tuple[float, float, set[int], int]:
    """Figures of four such messages beside products; how often each was waited for; how many were
    finished."""
    group = dist.group.WORLD
    assert group is not None
    messages: list[Message] = []
    finished: list[InFlight] = []

    def start() -> InFlight:
        messages.append(Message())
        return InFlight([], [messages[-1]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "collective", lambda *_: (start, finished.append))
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})  # as a rank of as many as there are cores
        try:
            stream_us, lost_us = links._beside_products_us(TransferKind.ALL_GATHER, group)
        finally:
            os.sched_setaffinity(0, allowed)
    assert not any(flight.handles for flight in finished)
    return stream_us, lost_us, {message.waits for message in messages}, len(finished)


def test_messages_beside_products(ranks: Pools) -> None:
    """What a core does for messages products lose; and all are waited for, each once."""
    ((stream_us, lost_us, waits, num_finished),) = ranks(1).run(beside_products)
    assert waits == {1}
    assert num_finished == links.IN_FLIGHT * links.RUNS
    assert stream_us > links.IN_FLIGHT * 40_000
    assert lost_us > links.IN_FLIGHT * 10_000
