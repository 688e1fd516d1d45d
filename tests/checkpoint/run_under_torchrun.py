"""Started by `test_kills`: trains, saves every few steps, and writes down every loss.

torchrun … run_under_torchrun.py FOLDER NUM_STEPS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxzero
from fxzero.checkpoint import Checkpoints

FOLDER, NUM_STEPS = Path(sys.argv[1]), int(sys.argv[2])
EVERY = 3


class Rows:
    """Batches that are drawn one after the other."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def __next__(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 64, generator=self.generator)
        return x, x.sin()


fxzero.init_distributed()
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 64))
model = fxzero.shard(model, zero=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = fxzero.compile_step(
    model, optimizer, F.mse_loss, options={"lower_regions": {"backend": "eager"}}
)
rows = Rows(rank)
torch.manual_seed(rank)
state = fxzero.TrainState(step, rows=rows.generator)

with (
    Checkpoints(state, FOLDER / "checkpoints", every=EVERY, keep=2) as checkpoints,
    open(FOLDER / f"losses.{rank}", "a") as losses,
):
    begin = checkpoints.resume()
    (FOLDER / f"pid.{rank}").write_text(str(os.getpid()))
    for number in range(begin + 1, NUM_STEPS + 1):
        loss = step(*next(rows)).loss.item()
        losses.write(f"{number} {loss!r}\n")
        losses.flush()
        if number == begin + 1:
            (FOLDER / f"trains.{rank}.{os.getpid()}").touch()
        time.sleep(0.005)
        if checkpoints.after_step(number):
            break
    else:
        checkpoints.finish(NUM_STEPS)
