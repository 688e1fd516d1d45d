"""What the tests of the strategy for Lightning run on each rank: small modules, and one fit.

fit({"zero": 3}, folder)   →   Fitted(losses, weights, …)      under FxZeroStrategy(zero=3)
fit(None, folder)          →   the same under Lightning's own DDPStrategy
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxzero

EAGERLY = {"lower_regions": {"backend": "eager"}}
"""Where the passes are tested, and Inductor is not."""
WORDS = 32


class Layer(nn.Module):
    """Attention and a small network."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)  # a key's bias has no gradient
        self.out = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Of (batch, length, hidden)."""
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Words(nn.Module):
    """A language model of two layers."""

    def __init__(self, hidden: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, hidden)
        self.layers = nn.ModuleList(Layer(hidden, dropout) for _ in range(2))
        self.head = nn.Linear(hidden, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of (batch, length)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Module(lightning.LightningModule):
    """It, as people train it under Lightning."""

    def __init__(self, hidden: int = 16, dropout: float = 0.0, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.model = Words(hidden, dropout)
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.model(tokens)

    def loss(self, batch: Any) -> Tensor:
        """Of predicting each next word."""
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, index: int) -> Tensor:
        """One micro-batch."""
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Mean loss over all ranks."""
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        """The likeliest next words."""
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        """AdamW, whose rate decays each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": decay, "interval": "step"},
        }


@dataclass
class Fitted:
    """What came of a fit."""

    losses: list[float]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    global_step: int
    extra: Any = None
    reduced_bytes: int = 0
    """Of gradients, over all ranks; of a model that fxzero has sharded."""
    said: list[str] = field(default_factory=list)
    """Warnings."""


def sentences(count: int = 80, length: int = 9) -> TensorDataset:
    """Rows of words."""
    words = torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words)


def loaders(batch: int = 4) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches to train and to validate on: ten micro-batches an epoch on two ranks."""
    return DataLoader(sentences(), batch, shuffle=True), DataLoader(sentences(16), batch)


@contextmanager
def as_torchrun() -> Iterator[None]:
    """The environment that torchrun gives its processes, for a rank of a pool."""
    rank, world = os.environ.get("RANK", "0"), "1"
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
    there = {
        "TORCHELASTIC_RUN_ID": "tests",
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    with mock.patch.dict(os.environ, there):
        yield


def strategy_of(zero: dict[str, Any] | str | None) -> Any:
    """Ours, or one by name, DDP for None; "inductor" leaves the compiler's options alone."""
    if zero is None or isinstance(zero, str):
        return zero or "ddp"
    from fxzero.integrations.lightning import FxZeroStrategy

    settings = dict(zero)
    if not settings.pop("inductor", False) and settings.get("compile", True):
        settings.setdefault("options", EAGERLY)
    return FxZeroStrategy(**settings)


def trainer_of(zero: dict[str, Any] | str | None, folder: str | Path, **settings: Any) -> Any:
    """A Trainer on all ranks that keeps its last checkpoint."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings.setdefault("callbacks", [ModelCheckpoint(dirpath=folder, save_last=True)])
    settings.setdefault("logger", False)
    settings.setdefault("default_root_dir", folder)
    return lightning.Trainer(
        strategy=strategy_of(zero),
        accelerator="cpu",
        devices=world,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Full weights, copied."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in module.state_dict().items()
    }


def fit(
    zero: dict[str, Any] | str | None,
    folder: str | Path,
    *,
    make: Callable[..., Any] = Module,
    of_module: dict[str, Any] | None = None,
    ckpt_path: Any = None,
    batch: int = 4,
    **settings: Any,
) -> Fitted:
    """Fit a module, and say what came of it."""
    settings.setdefault("max_epochs", 2)
    train, valid = loaders(batch)
    with as_torchrun(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = make(**(of_module or {}))
        trainer = trainer_of(zero, folder, **settings)
        trainer.fit(module, train, valid, ckpt_path=ckpt_path)
        return Fitted(
            losses=module.losses,
            weights=whole(module),
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            global_step=trainer.global_step,
            extra=getattr(module, "extra", None),
            reduced_bytes=fxzero.report(module).reduced_bytes if isinstance(zero, dict) else 0,
            said=[str(item.message) for item in said],
        )


def try_to_fit(zero: dict[str, Any] | str | None, folder: str | Path, **settings: Any) -> str:
    """Fit a module, which ends with an error; say which, as people see it."""
    try:
        fit(zero, folder, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def evaluate(
    zero: dict[str, Any] | str | None, folder: str | Path, ckpt_path: Any
) -> tuple[dict[str, float], Tensor]:
    """Validate, test and predict with a checkpoint's weights, without a fit."""
    with as_torchrun():
        module = Module()
        trainer = trainer_of(zero, folder)
        batches = loaders()[1]
        found = dict(trainer.validate(module, batches, ckpt_path=ckpt_path)[0])
        again = trainer.test(module, batches)[0]
        assert again == found
        return found, torch.cat(trainer.predict(module, batches))


def run_example(name: str, folder: str) -> Fitted:
    """One of the two scripts, with its own settings, in float64: AdamW divides rounding errors of
    a gradient that is nearly zero by that gradient's size."""
    script = importlib.import_module(f"examples.{name}")
    with as_torchrun():
        trainer = script.main(
            folder, accelerator="cpu", enable_progress_bar=False, precision="64-true"
        )
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return Fitted([], whole(trainer.lightning_module), metrics, trainer.global_step)
