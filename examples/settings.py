"""The types of `conf/`: what each setting is, its unit, and what it may hold.

Hydra composes the YAML files; `Settings.of` then checks the result. A key that does
not exist or a value of the wrong type is an error before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf


class Dtype(Enum):
    """Dtypes by the names that they have in torch."""

    float32 = torch.float32
    bfloat16 = torch.bfloat16


@dataclass
class DataSettings:
    """Which bytes to learn from."""

    path: str | None
    """A text file, or null for the standard library's source."""
    max_bytes: int
    """Bytes of it to use, from its beginning."""
    val_fraction: float
    """Part of the text, at its end, that is kept for validation."""


@dataclass
class PrecisionSettings:
    """In which dtypes a step computes; the master shards are float32."""

    param_dtype: Dtype
    """Parameters and activations."""
    reduce_dtype: Dtype
    """Gradients while they travel between ranks."""


@dataclass
class TrainerSettings:
    """The loop."""

    steps: int
    batch_size: int
    """Rows per step, over all ranks."""
    warmup_steps: int
    """Steps over which the learning rate rises; from there it falls as a cosine."""
    min_lr_ratio: float
    """The last learning rate, as a part of the highest."""
    clip_grad_norm: float
    log_every: int
    """Steps between two records of the log."""
    val_every: int
    """Steps between two validations; there is always one at the end."""
    val_batches: int
    """Batches per validation."""
    sample_length: int
    """Bytes of text to generate at the end; 0 for none."""
    seed: int
    threads: int | None
    """CPU threads per rank; null for OMP_NUM_THREADS, or an even share of the cores."""
    compile: bool
    """False runs the same model without torch.compile."""


@dataclass
class Settings:
    """Everything that `examples/train.py` can be told."""

    model: dict[str, Any]
    """`_target_` names a function that returns the model, other keys are its arguments."""
    data: DataSettings
    zero: int
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    optimizer: dict[str, Any]
    """`_target_` names a torch optimizer, other keys are its arguments."""
    precision: PrecisionSettings
    trainer: TrainerSettings
    fxzero: dict[str, Any]
    """Options of the backend, as `torch.compile(..., options=...)` takes them."""

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """Check what Hydra composed.

        Raises:
            omegaconf.errors.OmegaConfBaseException: a key or a value that does not fit.
        """
        checked = OmegaConf.merge(OmegaConf.structured(cls), cfg)
        return cast(Settings, OmegaConf.to_object(checked))
