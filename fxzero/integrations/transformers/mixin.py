"""What a Trainer does otherwise under fxzero: a few of its methods, each for one reason.

    Trainer(model, args, …)                     the model is sharded in place, and compiled
      train
        prepare                                 no DistributedDataParallel, no .to(device)
        training_step                           no_sync at ZeRO 0 and 1; autocast of bf16; or, with
                                                whole_step=True, one graph to the update
        save_model, _save_…, _load_…            see `checkpoints`
      evaluate, predict                         see `generation`

Everything else is Trainer's own: its loop, arguments, callbacks and logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer

from fxzero.errors import ConfigError
from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.integrations.transformers import arguments
from fxzero.integrations.transformers.checkpoints import CheckpointsMixin
from fxzero.integrations.transformers.generation import generate_together
from fxzero.integrations.transformers.weights import save_whole
from fxzero.integrations.transformers.whole_step import WholeSteps
from fxzero.integrations.whole import whole
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.shard import model_state, no_sync

log = logging.getLogger("fxzero")


class FxZeroMixin(CheckpointsMixin):
    """A Trainer of transformers that trains by fxzero: ``class Mine(FxZeroMixin, Trainer)``.

    Args:
        fxzero: how to shard and to compile; by default ZeRO-3. All other arguments are those of
            the Trainer.

    Raises:
        ConfigError: an argument that fxzero cannot keep: see `arguments`.
        ShardingError: a model that it cannot shard.
    """

    fxzero: FxZeroPlugin

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """See that its methods come before those of the Trainer."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(FxZeroMixin):
            theirs = next(base for base in cls.__bases__ if issubclass(base, Trainer))
            raise ConfigError(
                f"class {cls.__name__}: {theirs.__name__} comes before FxZeroMixin, and would "
                "train as if it were not there. Write "
                f"class {cls.__name__}(FxZeroMixin, {theirs.__name__})."
            )

    def __init__(self, *args: Any, fxzero: FxZeroPlugin | None = None, **kwargs: Any) -> None:
        """See the class."""
        if fxzero is not None and not isinstance(fxzero, FxZeroPlugin):
            raise ConfigError(f"fxzero={fxzero!r}: give FxZeroPlugin(zero=…)")
        self.fxzero = fxzero if fxzero is not None else FxZeroPlugin()
        self._may_shard = False
        self._whole: WholeSteps | None = WholeSteps(self) if self.fxzero.whole_step else None
        super().__init__(*args, **kwargs)
        self._may_shard = True
        self._make_ready(self.model)

    # -- the model

    def create_accelerator_and_postprocess(self) -> None:
        """Look at the arguments first."""
        if "fxzero" not in vars(self):
            raise ConfigError(
                f"{type(self).__name__}.__init__ calls Trainer.__init__, and not FxZeroMixin's. "
                "Call super().__init__(…)."
            )
        arguments.check_arguments(self.args, self.fxzero)
        super().create_accelerator_and_postprocess()
        arguments.check_launched(self.args, self.accelerator)
        self._see_accelerator()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            engine = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP"
            raise ConfigError(
                f"`accelerate launch` was told to use {engine}, and the Trainer to use fxzero. "
                "Start with torchrun, or with a config of accelerate that says multi_gpu alone."
            )

    def _see_accelerator(self) -> None:
        """Let it give norms as plain tensors, of a whole step what its graph has found; and know
        that it wraps nothing, in words that Dynamo reads."""
        accelerator = self.accelerator
        clip, unwrap = accelerator.clip_grad_norm_, accelerator.unwrap_model

        def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
            if self._whole is not None and self._whole.last is not None:
                return self._whole.last.grad_norm
            return whole(clip(*args, **kwargs))

        def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if model is self.model:
                return model
            inner: nn.Module = unwrap(model, *args, **kwargs)
            return inner

        accelerator.clip_grad_norm_ = self._clip_of_fxzero = clip_grad_norm
        accelerator.unwrap_model = unwrap_model

    @property
    def clips_by_fxzero(self) -> bool:
        """Whether nobody has replaced what clips gradients."""
        return self.accelerator.clip_grad_norm_ is self._clip_of_fxzero

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Shard what ``model_init`` makes, at the start of each training."""
        model: nn.Module = super().call_model_init(trial)
        if self._may_shard:  # else Trainer's own constructor looks at the model first
            self._make_ready(model)
        return model

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See that what is trained is what was sharded."""
        arguments.check_still_sharded(self.model, self.model_wrapped)
        if self._whole is not None:
            self._whole.begin()
        found = super()._inner_training_loop(*args, **kwargs)
        self._use_gradients()
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Look at a model that has learned all that it has seen."""
        self._use_gradients()
        return super().evaluation_loop(*args, **kwargs)

    def _use_gradients(self) -> None:
        """Make the update that a whole step may have left; whoever saves does so anyway."""
        if self._whole is not None:
            self._whole.use_gradients()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave a model where it is that is sharded, or will be: each rank moves its part."""
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        stays = self.fxzero.offload or on_meta or self.args.world_size > 1
        if not stays and model_state(model) is None:
            super()._move_model_to_device(model, device)

    def _make_ready(self, model: nn.Module) -> None:
        """Shard and compile a model in place, once."""
        if model_state(model) is not None and getattr(model, "_is_accelerate_prepared", False):
            return
        several = self.args.world_size > 1
        arguments.check_model(model, self.fxzero.zero if several else 0)
        plugin = dataclasses.replace(
            self.fxzero, param_dtype=arguments.compute_dtype(self.args, self.fxzero)
        )
        device = self.args.device
        if plugin.mesh is None and several and device.type != "cpu":
            # The model is still on the CPU: the ranks' device says where it shall be.
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            plugin = dataclasses.replace(plugin, mesh=mesh)
        plugin.shard(model)
        plugin.compile_forward(model)
        if several:
            save_whole(model)
        generate_together(
            model, self.autocast_smart_context_manager, synced=several and plugin.zero > 0
        )
        # By this accelerate knows a model that it shall not wrap, move or compile.
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        if self.is_world_process_zero():
            log.warning("%s", plugin.sentence(model))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Refuse an ``optim=`` that is wrong on shards."""
        has_own = self.optimizer is not None
        if not has_own and getattr(self, "optimizer_cls_and_kwargs", None) is None:
            arguments.check_optimizer_name(self.args, self.fxzero.zero)
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        return optimizer

    # -- the step

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of an update, seen before the first is trained on."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if self._whole is not None:
            self._whole.look_at(batches)
        return batches, count

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Reduce gradients where DistributedDataParallel would: in the last micro-batch."""
        if self._whole is None:
            return self.train_by_loop(*args, **kwargs)
        if self._whole.takes_next:
            return self._whole.with_owed(self._training_step_of_whole(*args, **kwargs))
        return self._whole.with_owed(self.train_by_loop(*args, **kwargs))

    def train_by_loop(self, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-batch, as Trainer's own loop trains on it."""
        with self._reducing():
            loss: Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.gradient_state.sync_gradients:
            reduce_leftovers(self.model)  # of what only micro-batches before this one have used
        return loss

    def _training_step_of_whole(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """What Trainer's does, but for what the graph does."""
        assert self._whole is not None
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # of those without a schedule
            self.optimizer.train()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return self._whole.train(self._prepare_inputs(inputs), num_items_in_batch)

    def _reducing(self) -> contextlib.AbstractContextManager[None]:
        """At ZeRO 2 and 3 every micro-batch is reduced: no full gradient outlives it."""
        gradients = self.accelerator.gradient_state
        each = gradients.plugin_kwargs.get("sync_each_batch", False)
        if self.fxzero.zero >= 2 or gradients.sync_gradients or each:
            return contextlib.nullcontext()
        return no_sync(self.model)

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """As accelerate would around the forward of a model that it has wrapped."""
        if not self.args.bf16:
            return contextlib.nullcontext()
        return torch.autocast(
            self.args.device.type, dtype=torch.bfloat16, cache_enabled=bool(cache_enabled)
        )

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """A count is a whole number: as a float it would be cast with the model's inputs."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        if isinstance(count, Tensor) and count.is_floating_point():
            return count.round().to(torch.int64)
        return count
