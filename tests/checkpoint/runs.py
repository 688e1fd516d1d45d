"""A small run of training to save and to load, and all of its state as bytes to compare."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fxzero
from fxzero.checkpoint.folder import published

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Counting:
    """A loader that knows its position."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there."""
        self.position = state["position"]


@dataclass
class Run:
    """What trains."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    loader: Counting
    state: fxzero.TrainState

    def train(self, steps: int = 1) -> None:
        """Steps whose batches are drawn from torch's generator, which a checkpoint holds."""
        for _ in range(steps):
            random.random()
            np.random.random()
            self.loader.position += 1
            train_once(self.model, self.optimizer)
            self.scheduler.step()


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """What most runs have."""
    return torch.optim.AdamW(parameters, lr=0.05)


def network() -> nn.Module:
    """Matrices, a vector, buffers, dropout."""
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
    )


def make_run(
    seed: int = 0,
    make_optimizer: MakeOptimizer = adamw,
    build: Callable[[], nn.Module] = network,
) -> Run:
    """A run that begins; another seed has other values everywhere."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = build()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = Counting(seed)
    state = fxzero.TrainState(model, optimizer, scheduler=scheduler, loader=loader)
    return Run(model, optimizer, scheduler, loader, state)


def train_once(model: nn.Module, optimizer: Optimizer) -> Tensor:
    """One step of the ordinary loop."""
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def all_of(run: Run) -> Any:
    """Every bit of a run: parameters, buffers, optimizer, scheduler, loader, generators."""
    return bits(
        {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict(),
            "loader": run.loader.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
    )


def bits(value: Any) -> Any:
    """A value as what compares by type and bit; dicts in any order."""
    if isinstance(value, DTensor):
        return ("DTensor", str(value.placements), bits(value.to_local()))
    if isinstance(value, Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return ("Tensor", str(value.dtype), tuple(value.shape), data)
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value).__name__, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Mapping):
        items = [(bits(k), bits(v)) for k, v in value.items()]
        ordered = isinstance(value, OrderedDict)
        return (type(value).__name__, tuple(items if ordered else sorted(items, key=repr)))
    if isinstance(value, (set, frozenset)):
        # In one order: by their texts dicts are put in order that have them as keys.
        return (type(value).__name__, tuple(sorted(map(bits, value), key=repr)))
    if isinstance(value, (list, tuple)) or hasattr(value, "maxlen"):
        about = (type(value).__name__, getattr(value, "maxlen", None))
        return (*about, tuple(map(bits, value)))
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


def visible(folder: Path) -> list[str]:
    """The checkpoints of a folder, by name, oldest first."""
    return [item.path.name for item in published(folder)]


def hidden(folder: Path) -> list[str]:
    """What else is there, but the lock."""
    names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    return sorted(names - {".lock", *visible(folder)})


@contextmanager
def unchanged(run: Run) -> Iterator[None]:
    """See that nothing in a run is another afterwards."""
    before = all_of(run)
    yield
    assert all_of(run) == before


def save_now(run: Run, folder: Path, step: int, **settings: Any) -> Path:
    """Save, and wait until it is on disk."""
    return fxzero.checkpoint.save(
        run.state, folder, step=step, asynchronous=False, **settings
    ).wait()
