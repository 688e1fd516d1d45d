"""Parity on CUDA: one device without collectives, two over NCCL."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from tests.parity.models import EXAMPLES, Batch
from tests.parity.training import (
    RTOL,
    STEPS,
    Trace,
    assert_same_trace,
    build,
    make_batch,
    rows_of_rank,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a device a rank")
lowerings = pytest.mark.parametrize("lowering", ["eager", "inductor"])


def batches() -> list[Batch]:
    """The whole batch of each step, on the current device."""
    found = [make_batch(EXAMPLES["gpt"], torch.float64, seed) for seed in range(STEPS)]
    return [{name: tensor.cuda() for name, tensor in batch.items()} for batch in found]


def eager_trace() -> Trace:
    """The unsharded model on the whole batches, before there are ranks."""
    return train(build(EXAMPLES["gpt"], torch.float64).cuda(), EXAMPLES["gpt"].loss, batches())


def compiled(zero: int, lowering: str) -> Any:
    """The sharded model."""
    model = fxzero.shard(build(EXAMPLES["gpt"], torch.float64).cuda(), zero=zero)
    return torch.compile(model, backend="fxzero", options={"lower_regions": {"backend": lowering}})


@lowerings
def test_one_device(lowering: str) -> None:
    """A single process computes what eager PyTorch does."""
    expected = eager_trace()
    model: nn.Module = compiled(3, lowering)
    assert_same_trace(
        train(model, EXAMPLES["gpt"].loss, batches()), expected, rtol=RTOL[torch.float64]
    )


@two_devices
@lowerings
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_devices(zero: int, lowering: str) -> None:
    """Two ranks over NCCL compute what one process does on the whole batch."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(on_nccl, (port, zero, lowering), nprocs=2)  # type: ignore[no-untyped-call]


def on_nccl(rank: int, port: int, zero: int, lowering: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    expected = eager_trace()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl", rank=rank, world_size=2)
    try:
        parts = [rows_of_rank(batch) for batch in batches()]
        trace = train(compiled(zero, lowering), EXAMPLES["gpt"].loss, parts)
        assert_same_trace(trace, expected, rtol=RTOL[torch.float64])
    finally:
        dist.destroy_process_group()
