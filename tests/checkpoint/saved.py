"""Checkpoints to look at: of a small run, with every kind of tensor, and changed in some way."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxzero
from fxzero.checkpoint import folder
from fxzero.checkpoint.manifest import METADATA, NAME, Manifest, hash_blocks


class Odd(nn.Module):
    """A scalar, a tensor of nothing, other dtypes, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.thin = nn.Parameter(torch.randn(3, 5).bfloat16())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("counts", torch.tensor([2**60 + 1, -3]))

    def forward(self, ids: Tensor) -> Tensor:
        """(B) → scalar."""
        hidden = self.norm(self.embed(ids)) * self.scale + self.thin.sum()
        return self.head(hidden).square().mean()


class Run:
    """What trains."""

    def __init__(self, seed: int = 0, model: Callable[[], nn.Module] = Odd) -> None:
        torch.manual_seed(seed)
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.state = fxzero.TrainState(self.model, self.optimizer, scheduler=self.scheduler)

    def train(self) -> None:
        """One step."""
        self.model(torch.randint(12, (6,))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def save(self, path: Path, step: int) -> Path:
        """Save, and let go of the folder."""
        saved = fxzero.checkpoint.save(self.state, path, step=step, asynchronous=False).wait()
        folder.unlock(path)
        return saved


def flip(file: Path, at: int = -1) -> None:
    """Change a bit, by default in the middle."""
    data = bytearray(file.read_bytes())
    data[at if at >= 0 else len(data) // 2] ^= 1
    file.write_bytes(data)


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Write a file anew, as if it had been saved so: its hash fits."""
    (path / name).write_bytes(data)
    content = json.loads((path / NAME).read_bytes())
    manifest = Manifest.from_bytes(json.dumps(content).encode(), path / NAME)
    manifest = Manifest(**{**vars(manifest), "files": {**manifest.files, name: hash_blocks(data)}})
    (path / NAME).write_bytes(manifest.to_bytes())


def change_metadata(path: Path, change: Callable[[Any], None]) -> None:
    """Change what a checkpoint says of its tensors, as a writer with a defect would."""
    metadata = pickle.loads((path / METADATA).read_bytes())
    change(metadata)
    data = pickle.dumps(metadata)
    if (path / NAME).exists():
        rewrite(path, METADATA, data)
    else:
        (path / METADATA).write_bytes(data)


def drop_a_part(name: str) -> Callable[[Any], None]:
    """Forget a part of a tensor."""

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[name].chunks.pop()

    return change
