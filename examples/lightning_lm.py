"""A small language model under Lightning, by fxzero. `lightning_lm_ddp` is the same by DDP.

torchrun --standalone --nproc-per-node 2 examples/lightning_lm.py
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fxzero.integrations.lightning import FxZeroStrategy


class Layer(nn.Module):
    """Attention, then two matrices."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, length, hidden), in four heads."""
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.first_norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class LanguageModel(lightning.LightningModule):
    """Predicts the next byte."""

    def __init__(self, hidden: int = 64, num_layers: int = 2, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, hidden)
        self.layers = nn.Sequential(*(Layer(hidden) for _ in range(num_layers)))
        self.head = nn.Linear(hidden, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, length, 256)."""
        return self.head(self.layers(self.embed(text)))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a micro-batch."""
        (text,) = batch
        loss = F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """The mean loss of all ranks."""
        (text,) = batch
        loss = F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW, with a rate that decays each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder: str = "outputs/lightning_lm", **settings: Any) -> lightning.Trainer:
    """Train on a source file of Python's library: twenty steps of two micro-batches."""
    lightning.seed_everything(0)
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    text = torch.tensor(list(source[: 196 * 65])).view(196, 65)
    train, valid = TensorDataset(text[:160]), TensorDataset(text[160:])
    trainer = lightning.Trainer(
        strategy=FxZeroStrategy(zero=3),
        devices=2,
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, monitor="val_loss", save_last=True)],
        **{"logger": False, **settings},
    )
    model = LanguageModel()
    trainer.fit(model, DataLoader(train, 8, shuffle=True), DataLoader(valid, 8), ckpt_path="last")
    return trainer


if __name__ == "__main__":
    main()
