"""What loops ask of DeepSpeed's engine beside its three calls: sizes, rates, ranks, the model.

A name that neither has is looked for in the model, as there. What fxzero does in another way is an
error that says in which.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fxzero.errors import ConfigError
from fxzero.sharding.precision import LossScale

_SIZES = "Sizes are the configuration's: say them there"
_DTYPE = "Dtypes are the configuration's: say bf16.enabled or fp16.enabled there"
_LOADER = "fxzero makes no data loader: use your own"
OTHERWISE = {
    "save_16bit_model": "Export what save_checkpoint has written by fxzero.checkpoint.export",
    "save_fp16_model": "Export what save_checkpoint has written by fxzero.checkpoint.export",
    "set_train_batch_size": _SIZES,
    "set_train_micro_batch_size": _SIZES,
    "set_gradient_accumulation_boundary": "Steps are counted: say gradient_accumulation_steps",
    "set_lr": "Write optimizer.param_groups[…]['lr']",
    "deepspeed_io": _LOADER,
    "training_dataloader": _LOADER,
    "allreduce_gradients": "backward() reduces what it computes",
    "offload_states": "Say offload_optimizer or offload_param in the configuration",
    "reload_states": "Say offload_optimizer or offload_param in the configuration",
    **dict.fromkeys(("half", "bfloat16", "float", "double"), _DTYPE),
}
"""What DeepSpeed's engine has, or its model would do wrong on shards, and what to do here."""


class EngineSays:
    """Questions and their answers; `Engine` trains."""

    module: nn.Module
    """The model, sharded and compiled."""
    optimizer: Optimizer
    loss_scale: LossScale | None
    """The loss scale of an fp16 run."""
    global_steps = 0
    """Optimizer steps, skipped ones too."""
    skipped_steps = 0
    micro_steps = 0
    global_samples = 0
    """Rows, over all ranks, of the steps so far."""
    _rows: int
    _train_batch_size: int
    _micro_batches: int
    _clip_grad_norm: float | None
    _zero: int
    _norm: Tensor | None = None
    _applied = False

    def __getattr__(self, name: str) -> Any:
        """What the model has.

        Raises:
            AttributeError: neither has it, or fxzero does it in another way.
        """
        if name in OTHERWISE:
            raise AttributeError(f"fxzero's engine has no {name}. {OTHERWISE[name]}.")
        module = self.__dict__.get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        model = "" if module is None else f", nor has its {type(module).__name__}"
        raise AttributeError(
            f"fxzero's engine has no {name!r}{model}. What a configuration comes to has it, maybe: "
            "fxzero.from_deepspeed(…), by options, precision, zero, lines."
        )

    # -- sizes

    def train_batch_size(self) -> int:
        """Rows of a step, over all ranks."""
        return self._train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch, on each rank."""
        return self._rows

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._micro_batches

    def gradient_clipping(self) -> float:
        """The largest norm of all gradients; 0 clips nothing."""
        return self._clip_grad_norm or 0.0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._zero

    # -- steps

    def was_step_applied(self) -> bool:
        """Whether the last `step()` has updated the model."""
        return self._applied

    @property
    def cur_scale(self) -> float:
        """What the next loss is multiplied by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's gradients before clipping; None unless something reads it."""
        return None if self._norm is None else self._norm.item()

    def get_lr(self) -> list[float]:
        """Each parameter group's learning rate in the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Each parameter group's momentum, or betas; 0 where it has neither."""
        groups = self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    # -- ranks

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.module.parameters()).device

    @property
    def local_rank(self) -> int:
        """This rank's number on its host, as torchrun says it."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    # -- the model

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> EngineSays:
        """Put the model into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> EngineSays:
        """Put the model into evaluation mode."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, by its own names."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The model's, by its own names: each rank's shards."""
        return dict(self.module.state_dict())

    module_state_dict = state_dict

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        self.module.zero_grad()

    def compile(self, *_args: Any, **_settings: Any) -> None:
        """Nothing: the model is compiled already, by fxzero."""

    def destroy(self) -> None:
        """Nothing: the model stays as it is."""

    def to(self, *args: Any, **kwargs: Any) -> EngineSays:
        """Nothing, for the device that the model is on.

        Raises:
            ConfigError: another device, or a dtype.
        """
        given = [value for value in (*args, *kwargs.values()) if not isinstance(value, bool)]
        dtype = next((value for value in given if isinstance(value, torch.dtype)), None)
        named = [value for value in given if isinstance(value, (str, int, torch.device))]
        device = torch.device(named[0]) if named else None
        here = self.device
        elsewhere = device is not None and (
            device.type != here.type or device.index not in (None, here.index)
        )
        if elsewhere or dtype is not None:
            raise ConfigError(
                f"engine.to({device if elsewhere else dtype}): the model is sharded, on {here}. "
                "Move it before from_deepspeed(…).engine(model); dtypes are the configuration's."
            )
        return self

    def cuda(self) -> EngineSays:
        """As ``to("cuda")``."""
        return self.to("cuda")
