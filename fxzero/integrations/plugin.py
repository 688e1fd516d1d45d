"""What is said to fxzero under a tool that makes the model, the loop, or both, by itself.

One set of words for all of them: they are those of `fxzero.shard`, and of the compiler's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxzero.compiler.config import Config
from fxzero.errors import ConfigError
from fxzero.integrations.at_work import at_work
from fxzero.ranks.groups import leave_at_exit
from fxzero.sharding.shard import model_state, shard


@dataclass(frozen=True)
class FxZeroPlugin:
    """How a tool is to shard and compile the model that it trains.

    Raises:
        ConfigError: a stage or an option that does not exist, before anything is touched.
    """

    zero: int = 3
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    mesh: DeviceMesh | None = None
    """One axis to shard over (default: all ranks), or two: replicate, shard."""
    param_dtype: torch.dtype | None = None
    """Compute in this dtype; master shards keep theirs. None: as the tool's own setting says."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are reduced; default: the compute dtype."""
    offload: bool = False
    """Keep shards in the host's memory, where the optimizer updates them."""
    options: Mapping[str, Any] | Config | None = None
    """The compiler's, as of ``torch.compile(backend="fxzero", options=…)``."""
    compile: bool = True
    """False runs the sharded model as it is, one operator after another: for a debugger."""
    whole_step: bool = False
    """Compile a training step, from forward to update, as one graph: `fxzero.compile_step`. For
    tools that own the loop and let it be replaced: `integrations.transformers.FxZeroMixin`."""

    def __post_init__(self) -> None:
        if type(self.zero) is not int or self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero={self.zero!r} is no ZeRO stage. Pass 0, 1, 2 or 3.")
        if self.options is not None and not self.compile:
            raise ConfigError("options= are the compiler's, and compile=False: leave out one.")
        if self.whole_step and not self.compile:
            raise ConfigError(
                "whole_step=True is one compiled graph, and compile=False: leave out one."
            )
        Config.from_options(self.options)

    def refuse_whole_step(self, tool: str, why: str) -> None:
        """Refuse it under a tool that calls backward and update itself.

        Raises:
            ConfigError: it is asked for.
        """
        if self.whole_step:
            raise ConfigError(f"FxZeroPlugin(whole_step=True) under {tool}: {why}. Leave it out.")

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model in place, unless it is sharded already.

        Raises:
            ShardingError: it cannot be.
            ConfigError: it is sharded already, at another stage than this asks for.
        """
        leave_at_exit()  # the tool has joined the group, and may not leave it
        state = model_state(model)
        if state is None:
            return shard(
                model,
                self.zero,
                mesh=self.mesh,
                param_dtype=self.param_dtype,
                reduce_dtype=self.reduce_dtype,
                offload=self.offload,
            )
        if state.zero != self.zero:
            raise ConfigError(
                f"the model was sharded with zero={state.zero}, and zero={self.zero} is asked for "
                "here. Leave out one of the two."
            )
        return model

    def compile_forward(self, model: nn.Module) -> None:
        """Compile a model's forward in place: names in its state dict stay as they are."""
        options = self.options
        if self.whole_step and Config.from_options(options).offloads:
            options = None  # a step's; what evaluates holds nothing from one call to the next
        if self.compile:
            model.compile(backend="fxzero", options=options)

    def sentence(self, model: nn.Module) -> str:
        """The line that says what became of a model."""
        how = "compiled by torch.compile" if self.compile else "not compiled (compile=False)"
        how = "training steps compiled whole" if self.whole_step else how
        return at_work(model, how)
