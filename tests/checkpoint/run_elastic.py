"""Started by `test_elastic`: trains in float64 on as many ranks as there are, and writes down every
loss: of all ranks' rows, so that it does not depend on who has which.

torchrun … run_elastic.py FOLDER NUM_STEPS ZERO
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxzero
from fxzero.checkpoint import Checkpoints

FOLDER, NUM_STEPS, ZERO = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

fxzero.init_distributed()
rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 16)).double()
model = fxzero.shard(model, zero=ZERO)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = fxzero.compile_step(
    model, optimizer, F.mse_loss, options={"lower_regions": {"backend": "eager"}}
)
state = fxzero.TrainState(step, rng=False)

with (
    Checkpoints(state, FOLDER / "checkpoints", every=3, keep=2) as checkpoints,
    open(FOLDER / "losses", "a") as losses,
):
    begin = checkpoints.resume()
    for number in range(begin + 1, NUM_STEPS + 1):
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(12, 16, generator=generator, dtype=torch.float64)[rank::size]
        loss = step(rows, rows.sin()).loss
        if size > 1:
            dist.all_reduce(loss)
        if rank == 0:
            losses.write(f"{number} {size} {loss.item() / size!r}\n")
            losses.flush()
        if number == begin + 2:
            (FOLDER / f"trains.{size}.{rank}.{os.getpid()}").touch()
        time.sleep(0.03)
        if checkpoints.after_step(number):
            break
    else:
        checkpoints.finish(NUM_STEPS)
