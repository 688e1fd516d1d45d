"""A row of the table: a tiny model that somebody else wrote, and batches for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

Batch = dict[str, Any]
"""The arguments of a model: tensors of one row for each row of the batch, and flags."""
MakeBatch = Callable[[int, torch.Generator], Batch]
"""Of so many rows."""

VOCABULARY = 64
HIDDEN = 32
LENGTH = 12


@dataclass(frozen=True)
class Architecture:
    """A model to train.

    Args:
        name: as transformers names its folder.
        kind: what it is for.
        model: a class of transformers, or a function that builds a module.
        make_batch: makes the model's arguments, labels among them.
        config: the configuration's class; None where `model` builds by itself.
        settings: of the configuration.
        note: what makes it worth a row.
        dtype: in which it trains.
        frozen: a submodule that is not trained.
    """

    name: str
    kind: str
    model: str | Callable[[], nn.Module]
    make_batch: MakeBatch
    config: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    dtype: torch.dtype = torch.float64
    frozen: str = ""

    def build(self) -> nn.Module:
        """The model, equal in every process, without a parameter that is constant.

        Layers that begin at zero, as many do, would hide what is wrong behind them; and a
        bias that begins at zero and has a gradient of zero would hold nothing but noise.
        """
        torch.manual_seed(0)
        model = self._build().to(self.dtype).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        if self.frozen:
            model.get_submodule(self.frozen).requires_grad_(False)
        return model

    def _build(self) -> nn.Module:
        if callable(self.model):
            return self.model()
        import transformers

        assert self.config is not None
        config = getattr(transformers, self.config)(**self.settings)
        built: nn.Module = getattr(transformers, self.model)(config)
        return built

    def batch(self, rows: int, seed: int) -> Batch:
        """A batch in the model's dtype."""
        generator = torch.Generator().manual_seed(seed)
        made = self.make_batch(rows, generator)
        return {n: _cast(value, self.dtype) for n, value in made.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def ids(rows: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    """Token ids, none of which is special: ``(rows, length)``."""
    return torch.randint(4, VOCABULARY, (rows, length), generator=generator)


def pixels(rows: int, generator: torch.Generator, size: int = 16, channels: int = 3) -> Tensor:
    """Images: ``(rows, channels, size, size)``."""
    return torch.randn(rows, channels, size, size, generator=generator)


def classes(rows: int, generator: torch.Generator, count: int = 3) -> Tensor:
    """A class per row."""
    return torch.randint(0, count, (rows,), generator=generator)


def language(rows: int, generator: torch.Generator) -> Batch:
    """Tokens that are their own labels."""
    tokens = ids(rows, generator)
    return {"input_ids": tokens, "labels": tokens}


def masked_language(rows: int, generator: torch.Generator) -> Batch:
    """Tokens with padding at the end of each row, and other tokens as labels."""
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[:, -2:] = 0
    tokens, labels = ids(rows, generator), ids(rows, generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def translation(rows: int, generator: torch.Generator) -> Batch:
    """A sequence to read, and one to write."""
    return {"input_ids": ids(rows, generator), "labels": ids(rows, generator, 8)}


def images(rows: int, generator: torch.Generator) -> Batch:
    """Images, and a class of each."""
    return {"pixel_values": pixels(rows, generator), "labels": classes(rows, generator)}
