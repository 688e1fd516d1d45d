"""Started by `test_timeout`: trains on all ranks, but for one that does something else.

torchrun … run_with_a_fault.py FAULT TIMEOUT_S
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import fxzero

FAULT, TIMEOUT_S = sys.argv[1], float(sys.argv[2])
OPTIONS = {"lower_regions": {"backend": "eager"}}

fxzero.init_distributed(timeout_s=TIMEOUT_S)
rank = dist.get_rank()
torch.manual_seed(0)
model = fxzero.shard(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), zero=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if FAULT == "option" and rank == 1:
    OPTIONS["bucket"] = {"min_bytes": 0}
step = fxzero.compile_step(
    model, optimizer, lambda y, x: y.square().sum() + 0 * x.sum(), options=OPTIONS
)


def loop_for_ever() -> None:
    """As a loader that waits for a file does."""
    while True:
        time.sleep(0.1)


def train() -> None:
    """Three steps."""
    for number in range(3):
        if number == 1 and rank == 1 and FAULT in ("skips", "stopped", "loops"):
            print(f"FAULT {time.time()}", flush=True)
            if FAULT == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if FAULT == "loops":
                loop_for_ever()
            continue
        step(torch.ones(4, 6), torch.ones(4, 1))
    if FAULT == "skips" and rank == 1:
        loop_for_ever()


print(f"PID {rank} {os.getpid()}", flush=True)
try:
    train()
except fxzero.FxZeroError as error:
    text = str(error).replace("\n", " | ")
    print(f"TOLD {rank} {time.time()} {type(error).__name__} {text}", flush=True)
    raise
