"""What every contender trains, and what the parent asks of a rank process.

A `Workload` is the model and its batches: seeded, so that every contender starts from
the same weights and sees the same tokens. The tokens follow a rule that the model can
learn: the loss then falls, and a contender that lost a gradient would show a higher one.
A `Job` is one measurement of one contender. It travels to the ranks as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from examples.models import GPT, gpt_bench

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A GPT and its batches; `batch` and `block` are per rank."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    batch: int
    block: int
    dtype: str
    device: str

    def model(self) -> GPT:
        """Build the whole model on this rank, equal on all of them."""
        torch.manual_seed(SEED)
        model = gpt_bench(
            num_layers=self.layers,
            num_heads=self.heads,
            hidden=self.hidden,
            vocab_size=self.vocab,
            block_size=self.block,
            dropout=0.0,
        )
        return model.to(device=self.device, dtype=DTYPES[self.dtype])

    def num_parameters(self) -> int:
        """Count the parameters without allocating them."""
        with torch.device("meta"):
            model = Workload(**{**asdict(self), "device": "meta"}).model()
        return sum(parameter.numel() for parameter in model.parameters())

    def sample(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets [batch, block] of one step: next = 5 * token + 3."""
        generator = torch.Generator().manual_seed(SEED + 10_007 * step + rank)
        tokens = torch.randint(self.vocab, (self.batch, 1), generator=generator)
        for _ in range(self.block):
            tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 3) % self.vocab], dim=1)
        tokens = tokens.to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement of one contender."""

    contender: str
    workload: Workload
    measure: Literal["steps", "first_backward"] = "steps"
    zero: int = 3
    """ZeRO stage of the fxzero contender; the peers have their own."""
    fxzero_options: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = 4
    steps: int = 12
    threads: int = 1
    timeout_s: float = 900.0

    def write(self, path: Path) -> None:
        """Store the job where the ranks will read it."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Load what `write` stored."""
        values = json.loads(path.read_text())
        return cls(**{**values, "workload": Workload(**values["workload"])})
