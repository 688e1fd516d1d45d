"""What `inspect` and `report` ask of a capture, from their options; and an analysis of a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxzero.cli.arguments import check_companions
from fxzero.compiler.config import Config
from fxzero.errors import ConfigError
from fxzero.inspect import Analysis, capture
from fxzero.inspect.targets import load
from fxzero.inspect.targets.target import Target

BESIDE = ("code", "diffs", "pipeline")
"""What `fxzero inspect --json` writes beside an analysis."""


@dataclass(frozen=True)
class Asked:
    """A capture as somebody asks for it on a command line."""

    zero: int
    world_size: int
    rank: int
    batch_size: int | None
    seq_len: int | None
    inputs: str | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload: bool
    step: bool
    clip_grad_norm: float
    micro_batches: int
    inference: bool

    def check(self) -> None:
        """See that options mean something together, before anything takes time.

        Raises:
            ConfigError: one has no meaning beside the others, or the rank is in no such world.
        """
        has_reduces = not self.inference
        check_companions(
            {
                "--micro-batches": (self.micro_batches > 1, "--step", self.step),
                "--clip-grad-norm": (self.clip_grad_norm != 1.0, "--step", self.step),
                "--inference": (self.inference, "no --step", not self.step),
                "--reduce-dtype": (self.reduce_dtype is not None, "no --inference", has_reduces),
            }
        )
        if self.rank >= self.world_size:
            raise ConfigError(f"rank {self.rank} is not in a world of {self.world_size} ranks")

    def settings(self, target: Target, config: Config) -> dict[str, Any]:
        """What `fxzero.inspect.capture` takes, but for how the step is run."""
        return {
            "zero": self.zero,
            "world_size": self.world_size,
            "rank": self.rank,
            "batch_size": self.batch_size,
            **target.usual(self.param_dtype, self.seq_len, self.inputs),
            "reduce_dtype": self.reduce_dtype,
            "offload": self.offload,
            "clip_grad_norm": self.clip_grad_norm or None,
            "options": config,
        }

    def as_run(self) -> dict[str, Any]:
        """How the step is run."""
        return {
            "training": not self.inference,
            "step": self.step,
            "micro_batches": self.micro_batches,
        }


def find(target: str) -> Target | Analysis:
    """A target to be captured, or an analysis that a file has: wrong ones are told before either
    takes time.

    Args:
        target: as `fxzero.inspect.targets.load` takes it, or a JSON file that ``--json`` wrote.

    Raises:
        ConfigError: there is no such target, or the file holds no analysis.
    """
    if target.endswith(".json") and not target.startswith("hf:"):
        return _read(Path(target))
    return load(target)


def analysis_of(found: Target | Analysis, asked: Asked, config: Config) -> Analysis:
    """What was found as an analysis with all details; a target is captured for it."""
    if isinstance(found, Analysis):
        return found
    captured = capture(found.build, **asked.as_run(), **asked.settings(found, config))
    return Analysis.of(captured, memory=True, detail=True)


def _read(path: Path) -> Analysis:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Name a file that --json wrote.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict) or "schedules" not in data:
        raise ConfigError(
            f"{path} holds no analysis: name a file that `fxzero report --json` wrote"
        )
    found = Analysis.from_json({k: v for k, v in data.items() if k not in BESIDE}, str(path))
    for detail in found.details:
        if any(len(row.num_bytes) != len(detail.kinds) for row in detail.held):
            raise ConfigError(
                f"{path}: graph {detail.graph} holds memory of other than {len(detail.kinds)} kinds"
            )
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")
