"""The largest resident memory of a loop of accelerate above that of the imports, on each rank.

    torchrun --nproc-per-node 2 -m tests.integrations.accelerate_peak ddp|3

Parameters, gradients and AdamW's moments are nearly all there is: wide layers, four rows a step.
"""

from __future__ import annotations

import sys

import torch
import torch._inductor.compile_fx  # what compiling imports is no state: DDP gets it too
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks.measure import KernelPeak
from fxzero.integrations.accelerate import FxZeroAccelerator, FxZeroPlugin

WIDTH, LAYERS = 2048, 20
"""84 million parameters: 336 MB of them in fp32."""


def main(name: str) -> None:
    """Take four steps, and print what this rank held at most."""
    meter = KernelPeak()
    meter.reset()
    before_bytes = meter.now_bytes()
    sharded = FxZeroPlugin(zero=3)
    accelerator = (
        Accelerator(cpu=True) if name == "ddp" else FxZeroAccelerator(cpu=True, fxzero=sharded)
    )
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    model: nn.Module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.randn(32, WIDTH)), 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (rows,) in loader:
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    print(f"peak {meter.peak_bytes() - before_bytes}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
