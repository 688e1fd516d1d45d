"""What a DeepSpeed configuration comes to, as data, and how to train by it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fxzero.compiler.config import Config
from fxzero.errors import ConfigError, FxZeroWarning
from fxzero.integrations.deepspeed.engine import Engine
from fxzero.integrations.deepspeed.lines import Line
from fxzero.integrations.deepspeed.map_optimizer import MadeOptimizer
from fxzero.integrations.deepspeed.map_schedule import MadeSchedule
from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.sharding.precision import LossScale, Precision
from fxzero.sharding.shard import model_state
from fxzero.sharding.shard import shard as shard_model
from fxzero.step import TrainStep
from fxzero.step import compile_step as compile_whole_step

OF_WHOLE_STEPS = (
    "stop_unless_finite",
    "memory",
    "host_budget",
    "disk",
    "offload_states",
    "offload_activations",
)
"""Settings that hold where the optimizer is part of the graph."""


@dataclass(frozen=True)
class FromDeepSpeed:
    """What a DeepSpeed configuration comes to.

    ds = fxzero.from_deepspeed("ds_config.json")
    model = ds.shard(model)
    step = ds.compile_step(model, loss_fn=loss_fn)
    """

    source: str
    """The file, or what it was."""
    world_size: int
    zero: int
    """ZeRO stage."""
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload: bool
    """Whether `shard` keeps shards in the host's memory."""
    options: Mapping[str, Any]
    """The compiler's, for whole steps."""
    train_batch_size: int
    """Rows of a step, over all ranks."""
    rows: int
    """Rows of a micro-batch, on each rank."""
    micro_batches: int
    clip_grad_norm: float | None
    precision: Precision
    make_optimizer: MadeOptimizer | None
    """Makes the optimizer of parameters, or groups of them; None where none is configured."""
    make_scheduler: MadeSchedule | None
    """Makes the schedule of an optimizer; None where none is configured."""
    lines: tuple[Line, ...]
    """What became of each key."""

    @property
    def rows_per_rank(self) -> int:
        """Rows of the batch that a compiled step takes, on each rank."""
        return self.rows * self.micro_batches

    @property
    def loop_options(self) -> dict[str, Any]:
        """The compiler's options for ``torch.compile(backend="fxzero")``, where the optimizer is
        outside of the graph."""
        return {name: value for name, value in self.options.items() if name not in OF_WHOLE_STEPS}

    @property
    def config(self) -> Config:
        """The compiler's options for whole steps, as settings."""
        return Config.from_options(self.options)

    def plugin(self, mesh: DeviceMesh | None = None, *, whole_step: bool = False) -> FxZeroPlugin:
        """The same, for a tool that makes the model and the loop by itself.

        Args:
            mesh: as of `shard`.
            whole_step: one graph to the update, for tools that can: see `FxZeroPlugin`.

        Raises:
            ConfigError: the configuration says what such a loop does not do: a loss scale, a look
                at bf16 gradients, or what whole steps alone do.
        """
        if not whole_step:
            self._check_loop("a tool's own loop")
            self._say_unchecked()
        if self.param_dtype is torch.float16:
            raise ConfigError(
                f"{self.source} trains in fp16, for which the loss is scaled, and a tool's own "
                "loop does not do that for what fxzero computes in fp16. Say bf16 there, or train "
                "by engine() or compile_step()."
            )
        return FxZeroPlugin(
            zero=self.zero,
            mesh=mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            offload=self.offload,
            options=self.options if whole_step else self.loop_options,
            whole_step=whole_step,
        )

    def shard(self, model: nn.Module, *, mesh: DeviceMesh | None = None) -> nn.Module:
        """Shard a model in place, as `fxzero.shard` does, and return it."""
        return shard_model(
            model,
            self.zero,
            mesh=mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            offload=self.offload,
        )

    def compile_step(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        scheduler: LRScheduler | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> TrainStep:
        """A whole step as one call, with a batch of `rows_per_rank` rows: `fxzero.compile_step`.

        Args:
            model: sharded by `shard`, or not yet.
            optimizer: by default the configured one, over all trainable parameters.
            loss_fn: as for `fxzero.compile_step`.
            scheduler: by default the configured one.
            options: more of the compiler's; they go before those of the configuration.

        Raises:
            ConfigError: there is no optimizer, or two.
        """
        self._shard_unless(model)
        optimizer, scheduler = self._make(model, optimizer, scheduler)
        return compile_whole_step(
            model,
            optimizer,
            loss_fn,
            micro_batches=self.micro_batches,
            clip_grad_norm=self.clip_grad_norm,
            precision=self.precision,
            scheduler=scheduler,
            options=merged(self.options, options),
        )

    def engine(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: LRScheduler | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Engine:
        """DeepSpeed's three calls, around the model compiled in place by ``torch.compile``.

        Args:
            model, optimizer, scheduler, options: as for `compile_step`.

        Raises:
            ConfigError: something is configured that only a whole step does.
        """
        self._check_loop("engine()")
        self._shard_unless(model)
        optimizer, scheduler = self._make(model, optimizer, scheduler)
        model.compile(backend="fxzero", options=merged(self.loop_options, options))
        fp16 = self.param_dtype is torch.float16
        return Engine(
            model,
            optimizer,
            scheduler,
            rows=self.rows,
            micro_batches=self.micro_batches,
            train_batch_size=self.train_batch_size,
            clip_grad_norm=self.clip_grad_norm,
            loss_scale=LossScale(self.precision) if fp16 else None,
            skips=bool(self.options.get("stop_unless_finite", False)),
        )

    def _shard_unless(self, model: nn.Module) -> None:
        state = model_state(model)
        if state is None:
            self.shard(model)
        elif state.zero != self.zero:
            raise ConfigError(
                f"the model is sharded with zero={state.zero}, and {self.source} says stage "
                f"{self.zero}. Shard it by from_deepspeed(…).shard(model)."
            )

    def _make(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> tuple[Optimizer, LRScheduler | None]:
        for name, given, made in (
            ("optimizer", optimizer, self.make_optimizer),
            ("scheduler", scheduler, self.make_scheduler),
        ):
            if given is not None and isinstance(made, MadeSchedule | MadeOptimizer):
                mine = made.kind if isinstance(made.kind, str) else made.kind.__name__
                raise ConfigError(
                    f"{name}={type(given).__name__} is given, and {self.source} says {mine}. "
                    f"Leave one out: leave_out=['{name}']."
                )
        if optimizer is None:
            if self.make_optimizer is None:
                raise ConfigError(
                    f"{self.source} has no optimizer. Pass one, over the sharded model's "
                    "parameters."
                )
            optimizer = self.make_optimizer(p for p in model.parameters() if p.requires_grad)
        if scheduler is None and self.make_scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                scheduler = self.make_scheduler(optimizer)
        return optimizer, scheduler

    def _check_loop(self, who: str) -> None:
        for name, what in (
            ("disk", "holds something on disk"),
            ("offload_states", "offloads a part of the state"),
            ("offload_activations", "moves saved values to the host"),
        ):
            if name in self.options:
                raise ConfigError(
                    f"{self.source} {what} (options {name}={self.options[name]}), which is a whole "
                    f"step's: use compile_step in the place of {who}, or leave it out."
                )

    def _say_unchecked(self) -> None:
        """Say that a tool's own loop updates by gradients that are not finite, too."""
        if not self.options.get("stop_unless_finite", False):
            return
        asked = [line.key for line in self.lines if line.key.endswith(".check_grad_overflow")]
        what = (
            "a tool's own loop does not look for gradients that are not finite, and would update "
            "by them. Say bf16.check_grad_overflow: false"
        )
        if asked:
            raise ConfigError(
                f"{self.source} says {asked[0]}: true, and {what}, or train by "
                "plugin(whole_step=True), engine() or compile_step()."
            )
        warnings.warn(
            f"{self.source} trains in bf16, for which DeepSpeed has check_grad_overflow on by "
            f"default, and {what}, if that is meant; plugin(whole_step=True) stops there.",
            FxZeroWarning,
            stacklevel=3,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON has it; dtypes and classes by their names."""
        made = self.make_optimizer
        schedule = self.make_scheduler
        return {
            "source": self.source,
            "world_size": self.world_size,
            "shard": {
                "zero": self.zero,
                "param_dtype": _dtype(self.param_dtype),
                "reduce_dtype": _dtype(self.reduce_dtype),
                "offload": self.offload,
            },
            "options": dict(self.options),
            "train_batch_size": self.train_batch_size,
            "rows": self.rows,
            "micro_batches": self.micro_batches,
            "clip_grad_norm": self.clip_grad_norm,
            "precision": {
                name: _dtype(value) if isinstance(value, torch.dtype) else value
                for name, value in dataclasses.asdict(self.precision).items()
            },
            "optimizer": made and {"kind": made.kind.__name__, **made.settings},
            "scheduler": schedule and {"kind": schedule.kind, **schedule.settings},
        }


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def merged(options: Mapping[str, Any], more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings with others in their place; of a pass those that are said."""
    both = dict(options)
    for name, value in (more or {}).items():
        mine = both.get(name)
        nested = isinstance(mine, Mapping) and isinstance(value, Mapping)
        both[name] = {**mine, **value} if nested and mine is not None else value
    return both
