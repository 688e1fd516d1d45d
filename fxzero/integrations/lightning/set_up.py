"""What of a LightningModule is sharded, moved and compiled, and what would go wrong in silence.

    def training_step(self, batch):
        loss = self(batch)                  self.forward is compiled, with all that it calls
        loss = self.model(batch)            so is the forward of each child that has parameters
        loss = self.model.head(batch)       not compiled: markers read parameters in full, eagerly

Losses, metrics and logging in `training_step` run as Python. The whole module is sharded, metrics'
own networks too; the states of metrics are neither parameters nor buffers, and stay each rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    CheckpointIO,
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TorchCheckpointIO,
    TransformerEnginePrecision,
    XLAPrecision,
)
from torch import nn
from torchmetrics import Metric

from fxzero.errors import ConfigError, nearest
from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.sharding.params import is_known
from fxzero.sharding.shard import model_state

_SETTINGS = (
    "accelerator parallel_devices cluster_environment checkpoint_io precision_plugin"
).split()
"""Of Lightning's own strategies, that this one takes too."""
_OTHERS = {
    FSDPPrecision: "belongs to FSDP: give precision=, or param_dtype= on the strategy",
    DeepSpeedPrecision: "belongs to DeepSpeed: give precision=, or param_dtype= on the strategy",
    XLAPrecision: "is for TPUs, on which fxzero does not run",
    BitsandbytesPrecision: "replaces parameters by packed ones, which cannot be sharded by rows",
    TransformerEnginePrecision: "replaces layers by such as read their weights in kernels of "
    "their own, which no graph shows. Use precision='bf16-mixed' or 'bf16-true'",
}
"""Precisions that are not here, and why."""


def refuse_unknown(settings: Mapping[str, Any]) -> None:
    """See that nothing is said that nobody listens to.

    Raises:
        ConfigError: a name that is not among them.
    """
    for name in settings:
        if name not in _SETTINGS:
            known = [*FxZeroPlugin.__dataclass_fields__, *_SETTINGS]
            raise ConfigError(f"FxZeroStrategy has no {name}=: {nearest(name, known)}")


def check_precision(precision: Precision, param_dtype: torch.dtype | None) -> None:
    """See that a precision can be kept, and goes with `param_dtype`.

    Raises:
        ConfigError: it cannot, and why; or the two say different things.
    """
    for kind, reason in _OTHERS.items():
        if isinstance(precision, kind):
            raise ConfigError(f"{type(precision).__name__} {reason}.")
    if param_dtype is None:
        return
    computes = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    wanted = computes.get(str(precision.precision).partition("-")[0])
    if isinstance(precision, (MixedPrecision, HalfPrecision, DoublePrecision)) and (
        wanted != param_dtype
    ):
        raise ConfigError(
            f"precision={precision.precision!r} computes in {wanted}, and param_dtype="
            f"{param_dtype}. Leave out one of the two."
        )


def check(module: LightningModule, trainer: Any, plugin: FxZeroPlugin, world_size: int) -> None:
    """See that nothing goes round the strategy.

    Raises:
        ConfigError: something does, and what to do about it.
    """
    if plugin.compile and getattr(module, "_compiler_ctx", None) is not None:
        raise ConfigError(
            "the LightningModule was compiled by torch.compile, and FxZeroStrategy compiles it. "
            "Pass the module itself, or FxZeroStrategy(compile=False)."
        )
    draws = [item for item in trainer.loggers if getattr(item, "_log_graph", False)]
    if draws and world_size > 1:
        raise ConfigError(
            f"{type(draws[0]).__name__}(log_graph=True) runs the model on rank 0 alone, which "
            "would wait for the other ranks for ever. Leave log_graph out."
        )


def check_folder(checkpoint_io: CheckpointIO) -> None:
    """See that nobody has said how to write the one file that is not written.

    Raises:
        ConfigError: somebody has.
    """
    if type(checkpoint_io) is not TorchCheckpointIO:
        raise ConfigError(
            f"save_distributed_checkpoint=True writes a folder by fxzero.checkpoint, and "
            f"{type(checkpoint_io).__name__} would write a file. Leave out one of the two."
        )


def shard(plugin: FxZeroPlugin, module: LightningModule, device: torch.device) -> None:
    """Shard a LightningModule in place, unless it has done so itself, and move what is left.

    Raises:
        ConfigError: it has sharded itself in part, or at another stage.
        ShardingError: it cannot be sharded.
    """
    plugin.shard(module)
    state = model_state(module)
    assert state is not None
    if state.pipeline is not None:
        raise ConfigError(
            "the model is cut into stages of a pipeline, which fxzero.compile_step trains: a "
            "training_step runs a forward and a backward of its own. Shard it without stages."
        )
    outside = [name for name, p in module.named_parameters() if not is_known(p)]
    if outside:
        raise ConfigError(
            f"{len(outside)} parameters ({', '.join(outside[:4])}) are outside of what "
            "configure_model has sharded: nobody would reduce their gradients. Call "
            "fxzero.shard(self, zero=…), or leave it to the strategy."
        )
    for part in module.modules():
        if isinstance(part, Metric):
            part.to(device)
    if not plugin.offload:
        module.to(device)


def called_by_steps(module: LightningModule) -> list[nn.Module]:
    """The modules whose forward is compiled: see above."""
    return [
        part
        for part in (module, *module.children())
        if type(part).forward not in (LightningModule.forward, nn.Module.forward)
        and not isinstance(part, (Metric, torch.jit.ScriptModule))
        and next(part.parameters(), None) is not None
    ]
