"""The types of `examples/conf/`: what each setting is, its unit, and what it may hold.

Hydra composes the YAML files; `Settings.of` then checks the result. A key that does
not exist or a value of the wrong type is an error before anything is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from examples.failures import SettingsError
from fxzero import Config
from fxzero.settings import build


class Dtype(Enum):
    """Dtypes by the names that they have in torch."""

    float32 = torch.float32
    bfloat16 = torch.bfloat16
    float16 = torch.float16


class Step(Enum):
    """How one step runs."""

    compiled = "compiled"
    """One graph from the batch to the update: `fxzero.compile_step`."""
    eager = "eager"
    """The ordinary loop around ``torch.compile(model, backend="fxzero")``."""


@dataclass
class DataSettings:
    """Which bytes to learn from."""

    path: str | None
    """A text file, or null for the standard library's source."""
    max_bytes: int
    """Bytes of it to use, from its beginning."""
    val_fraction: float
    """Part of the text, at its end, that is kept for validation."""

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to learn from."""
        if self.max_bytes < 1:
            raise SettingsError(f"data.max_bytes={self.max_bytes} must be 1 or more")
        if not 0 < self.val_fraction < 1:
            raise SettingsError(
                f"data.val_fraction={self.val_fraction}: the part of the text that is kept for "
                "validation lies between 0 and 1, both excluded; 0.1 is usual."
            )


@dataclass
class PrecisionSettings:
    """In which dtypes a step computes; the master shards are float32."""

    param_dtype: Dtype
    """Parameters and activations."""
    reduce_dtype: Dtype
    """Gradients while they travel between ranks."""


@dataclass
class MeshSettings:
    """How ranks are laid out; parameters are sharded over those that are left."""

    pipeline: int
    """Ranks along a pipeline: 1 for none."""
    replicate: int
    """Replicas, each of which is sharded by itself."""

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        for name in ("pipeline", "replicate"):
            if getattr(self, name) < 1:
                raise SettingsError(f"mesh.{name}={getattr(self, name)} must be 1 or more")


@dataclass
class CheckpointSettings:
    """What is saved of a run, and where."""

    dir: str | None
    """A folder that all hosts share; null saves nothing. Jobs of a sweep have folders in it."""
    every: int
    """Steps between two; the end is always saved, and so is SIGTERM, SIGUSR1 or SIGINT."""
    keep: int | None
    """How many of the last ones stay; null deletes none."""
    keep_every: int | None
    """Checkpoints of steps that this divides stay for good."""
    asynchronous: bool
    """Write while training goes on."""

    def __post_init__(self) -> None:
        """Refuse what is no number of steps or checkpoints."""
        for name in ("every", "keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"checkpoint.{name}={value} must be 1 or more")


class Resume(Enum):
    """Whether a run goes on from a checkpoint."""

    auto = "auto"
    must = "must"
    never = "never"


@dataclass
class TrainerSettings:
    """The loop."""

    steps: int
    step: Step
    batch_size: int
    """Rows per step, over all ranks."""
    micro_batches: int
    """Into how many parts each rank splits its rows, to need less memory."""
    warmup_steps: int
    """Steps over which the learning rate rises; from there it falls as a cosine."""
    min_lr_ratio: float
    """The last learning rate, as a part of the highest."""
    clip_grad_norm: float | None
    """Largest 2-norm of all gradients together; null does not clip."""
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
    """False runs the ordinary loop without torch.compile."""
    wandb: bool
    """Also log as an offline run of wandb, which has to be installed."""

    def __post_init__(self) -> None:
        """Refuse what would train nothing, or something else."""
        least = {"steps": 0, "batch_size": 1, "micro_batches": 1, "warmup_steps": 0}
        least |= {"log_every": 1, "val_every": 1, "val_batches": 1, "sample_length": 0, "seed": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not smallest <= value < 1 << 63:
                raise SettingsError(f"trainer.{name}={value} must be {smallest} or more")
        if not 0 <= self.min_lr_ratio <= 1:
            raise SettingsError(f"trainer.min_lr_ratio={self.min_lr_ratio} must be from 0 to 1")
        norm = self.clip_grad_norm
        if norm is not None and not (norm > 0 and math.isfinite(norm)):
            raise SettingsError(f"trainer.clip_grad_norm={norm} must be positive, or null")
        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise SettingsError(f"trainer.threads={self.threads} must be from 1 to 4096, or null")
        if self.step is Step.compiled and not self.compile:
            raise SettingsError("trainer.compile=false wants trainer.step=eager")


@dataclass
class Settings:
    """Everything that `examples/train.py` can be told."""

    model: dict[str, Any]
    """`_target_` names a function that returns the model, other keys are its arguments."""
    data: DataSettings
    zero: int
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    mesh: MeshSettings
    schedule: str | None
    """Of a pipeline: gpipe, 1f1b, zb_h1, interleaved, breadth_first, zbv or a CSV file; null is
    1f1b."""
    memory_budget: str
    """The most memory that a rank's step may take at its peak; the compiler's setting."""
    optimizer: dict[str, Any]
    """`_target_` names a torch optimizer, other keys are its arguments."""
    precision: PrecisionSettings
    trainer: TrainerSettings
    checkpoint: CheckpointSettings
    ranks: int | None
    """Start this many by torchrun; null trains in the processes that there are, and in a sweep in
    one for each job."""
    resume: Resume
    """Whether to go on from what `checkpoint.dir` has."""
    fxzero: dict[str, Any]
    """The compiler's settings, as `torch.compile(..., options=...)` takes them."""
    deepspeed: str | None = None
    """DeepSpeed's JSON, which then decides `zero`, `precision`, `optimizer` and parts of `trainer`
    and of `fxzero`."""
    deepspeed_version: str | None = None
    """The version that it was written for, where its defaults differ."""
    deepspeed_auto: dict[str, Any] = field(default_factory=dict)
    """What "auto" in it stands for, by the names of TrainingArguments."""

    def __post_init__(self) -> None:
        """Refuse what would be ignored."""
        if not 0 <= self.zero <= 3:
            raise SettingsError(f"zero={self.zero}: ZeRO has the stages 0, 1, 2 and 3")
        if self.ranks is not None and self.ranks < 1:
            raise SettingsError(f"ranks={self.ranks} must be 1 or more, or null")
        if self.memory_budget != "none":
            own = self.fxzero.get("memory_budget", "none")
            if own not in ("none", self.memory_budget):
                raise SettingsError(
                    f"memory_budget={self.memory_budget} and fxzero.memory_budget={own} differ: "
                    "they are one setting. Drop one of them."
                )
            self.fxzero = {**self.fxzero, "memory_budget": self.memory_budget}
        if self.deepspeed is None and (self.deepspeed_version or self.deepspeed_auto):
            raise SettingsError("deepspeed_version and deepspeed_auto go with deepspeed=FILE")
        for group in ("model", "optimizer"):
            if not isinstance(getattr(self, group).get("_target_"), str):
                raise SettingsError(f"{group}._target_ must name what makes it: {group}=NAME")
        if self.compiler() != Config() and not self.trainer.compile:
            raise SettingsError("fxzero's settings have no effect under trainer.compile=false")
        if self.checkpoint.dir is None and self.resume is not Resume.auto:
            raise SettingsError(
                f"resume={self.resume.value} has no effect without checkpoint.dir=FOLDER"
            )
        if self.mesh.pipeline == 1 and self.schedule is not None:
            raise SettingsError(
                f"schedule={self.schedule} orders the stages of a pipeline, and mesh.pipeline=1: "
                "add mesh=pipeline2"
            )
        if self.mesh.pipeline > 1 and self.trainer.step is Step.eager:
            raise SettingsError("a pipeline runs whole steps: it needs trainer.step=compiled")
        if self.precision.param_dtype is Dtype.float16 and self.trainer.step is Step.eager:
            raise SettingsError("precision=fp16 scales the loss: that needs trainer.step=compiled")

    def compiler(self) -> Config:
        """The compiler's settings."""
        return build(Config, self.fxzero, "fxzero")

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """Check what Hydra composed.

        Raises:
            omegaconf.errors.OmegaConfBaseException: a key or a value of another type.
            SettingsError: a value that would train nothing, or something else.
            fxzero.ConfigError: one of the compiler's settings.
        """
        compiles = OmegaConf.select(cfg, "trainer.compile", default=True)
        if isinstance(compiles, (int, float)) and not isinstance(compiles, bool):
            # OmegaConf takes every number but 0 for true.
            raise SettingsError(f"trainer.compile={compiles} must be true or false")
        checked = OmegaConf.merge(OmegaConf.structured(cls), cfg)
        return cast(Settings, OmegaConf.to_object(checked))
