"""What every contender trains, and what the parent asks of a rank process.

A `Workload` is the model and its batches: seeded, so that every contender starts from
the same weights and sees the same tokens. The tokens follow a rule that the model can
learn: the loss then falls, and a contender that lost a gradient would show a higher one.
A `Job` is one measurement of one contender. It travels to the ranks as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from examples.models import GPT, GPTConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of Hydra's group `model`, and its batches; `batch` is per rank, each as long as the
    model allows."""

    model: Mapping[str, Any]
    """The model's settings, as Hydra composed them."""
    batch: int
    dtype: str
    device: str

    @staticmethod
    def settings(overrides: Sequence[str]) -> dict[str, Any]:
        """Compose a model's settings: ``model=gpt_bench model.num_layers=12``.

        Raises:
            HydraException: there is no such model, or it has no such setting.
        """
        chosen = [] if any(o.startswith("model=") for o in overrides) else ["model=gpt_bench"]
        with initialize_config_module("examples.conf", version_base="1.3"):
            composed = compose("train", overrides=[*chosen, *overrides])
        settings = OmegaConf.to_container(composed.model, resolve=True)
        assert isinstance(settings, dict)
        return {str(key): value for key, value in settings.items()}

    def build(self) -> GPT:
        """Build the whole model on this rank, equal on all of them."""
        torch.manual_seed(SEED)
        model = instantiate(self.model)
        return model.to(device=self.device, dtype=DTYPES[self.dtype])

    def with_layers(self, num_layers: int) -> Workload:
        """The same model with another number of layers."""
        return replace(self, model={**self.model, "num_layers": num_layers})

    @cached_property
    def config(self) -> GPTConfig:
        """The model's shape."""
        with torch.device("meta"):
            return replace(self, device="meta").build().config

    def num_parameters(self) -> int:
        """Count the parameters without allocating them."""
        with torch.device("meta"):
            model = replace(self, device="meta").build()
        return sum(parameter.numel() for parameter in model.parameters())

    def sample(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets [batch, block] of one step: next = 5 * token + 3."""
        vocab, block = self.config.vocab_size, self.config.block_size
        generator = torch.Generator().manual_seed(SEED + 10_007 * step + rank)
        tokens = torch.randint(vocab, (self.batch, 1), generator=generator)
        for _ in range(block):
            tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 3) % vocab], dim=1)
        tokens = tokens.to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement of one contender."""

    contender: str
    workload: Workload
    measure: Literal["steps", "first_backward", "traffic", "machine"] = "steps"
    zero: int = 3
    """ZeRO stage of the fxzero contender; the peers have their own."""
    fxzero_options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    """Of fxzero's own step, and of pipelines: into how many parts it splits the batch."""
    stages: int = 1
    """Of a pipeline; its ranks train on the batches of all of them together."""
    schedule: str = "1f1b"
    """Of a pipeline."""
    warmup: int = 4
    steps: int = 12
    threads: int = 1
    link: str | None = None
    """Rate of the link between two hosts, as `link.RATES` names it; None for one machine."""
    simulate: bool = False
    """Also simulate what fxzero compiled, which keeps its graphs in memory."""
    counts_tensors: bool = False
    """Also count what tensors take, in a step after those that are timed."""
    timeout_s: float = 900.0

    def sample(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step: a rank's own, or that of all ranks of its pipeline, so that
        every contender trains on the same tokens."""
        replicas = ranks // self.stages
        of_pipeline = range(rank % replicas, ranks, replicas)
        parts = [self.workload.sample(step, each) for each in of_pipeline]
        tokens, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        return tokens, targets

    def write(self, path: Path) -> None:
        """Store the job where the ranks will read it."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Load what `write` stored."""
        values = json.loads(path.read_text())
        return cls(**{**values, "workload": Workload(**values["workload"])})
