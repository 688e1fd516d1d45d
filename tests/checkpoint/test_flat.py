"""A thousand steps with checkpoints take no more memory, threads, files and sockets than fifty."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxzero
from fxzero._compat import return_free_memory
from fxzero.checkpoint import Checkpoints
from fxzero.checkpoint.saving import wait_for_running
from tests.parity.harness import Pools

STEPS = 1000
EVERY = 10
BEGINS = 300
"""Steps after which everything has happened that happens once."""
GROWTH_BYTES = 4 << 20
"""A tenth of one copy of the state a hundred times, say; what the allocator scatters is less."""


def resources() -> dict[str, int]:
    """What this process has now."""
    wait_for_running()
    gc.collect()
    return_free_memory()
    process = psutil.Process()
    return {
        "bytes": process.memory_info().rss,
        "threads": threading.active_count(),
        "native threads": process.num_threads(),
        "files": len(os.listdir("/proc/self/fd")),
        "sockets": len(process.net_connections()),
    }


def train(folder: str) -> tuple[dict[str, int], dict[str, int]]:
    """Job: what there is early, and at the end."""
    torch._dynamo.reset()
    model = fxzero.shard(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = fxzero.compile_step(
        model, optimizer, F.mse_loss, options={"lower_regions": {"backend": "eager"}}
    )
    early: dict[str, int] = {}
    with Checkpoints(fxzero.TrainState(step), folder, every=EVERY, keep=2) as checkpoints:
        for number in range(1, STEPS + 1):
            step(torch.randn(4, 64), torch.randn(4, 64))
            assert not checkpoints.after_step(number)
            if number == BEGINS:
                early = resources()
        late = resources()
    assert len(list(Path(folder).glob("step-*"))) == 2 or dist.get_rank()
    return early, late


@pytest.mark.exhaustive
def test_nothing_grows(ranks: Pools, tmp_path: Path) -> None:
    """On any rank."""
    for early, late in ranks(2).run(train, str(tmp_path)):
        assert late.pop("bytes") < early.pop("bytes") + GROWTH_BYTES
        assert late == early
