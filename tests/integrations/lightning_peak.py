"""The largest resident memory of a fit above that of the imports, on each rank; by torchrun.

python -m torch.distributed.run --nproc-per-node 2 -m tests.integrations.lightning_peak ddp

Parameters, gradients and AdamW's moments are nearly all there is: wide layers, four rows a step.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
import torch._inductor.compile_fx  # what compiling imports is no state: DDP gets it too
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks.measure import KernelPeak
from fxzero.integrations.lightning import FxZeroStrategy

WIDTH, LAYERS = 2048, 20
"""84 million parameters: 336 MB of them in fp32."""


class Wide(lightning.LightningModule):
    """Matrices, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Rows (B, WIDTH)."""
        return self.layers(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Mean square of what comes out."""
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main(name: str) -> None:
    """Fit four steps, and print what this rank held at most."""
    strategy: Any = "ddp" if name == "ddp" else FxZeroStrategy(zero=3)
    meter = KernelPeak()
    meter.reset()
    before_bytes = meter.now_bytes()
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(32, WIDTH)), 4))
    print(f"peak {meter.peak_bytes() - before_bytes}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
