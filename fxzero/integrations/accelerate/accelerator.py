"""An `accelerate.Accelerator` whose models are sharded and compiled by fxzero.

    prepare        a model is sharded and compiled in place; nothing is wrapped around it
    accumulate     at ZeRO 0 and 1 gradients are reduced once; at 2 and 3 with each micro-batch
    save_state     each rank's part, by `fxzero.checkpoint`; any number of ranks loads it
    get_state_dict full tensors, on the main process

All else is accelerate's own: backward, clipping, gathering, schedulers, loaders, trackers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_compiled_module, recursively_apply
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxzero.errors import ConfigError
from fxzero.integrations.accelerate.refusals import (
    asked_precision,
    refuse_other_engines,
    refuse_precision,
)
from fxzero.integrations.accelerate.saved_state import Trained, trained
from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.integrations.whole import whole, whole_weights
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.shard import model_state, no_sync

_REDUCES_ONCE = 1
"""The highest stage at which full gradients outlive a micro-batch."""


class FxZeroAccelerator(Accelerator):
    """accelerate's Accelerator, with fxzero in the place of DistributedDataParallel.

        accelerator = FxZeroAccelerator(fxzero=FxZeroPlugin(zero=3), gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Args:
        args: as accelerate's.
        fxzero: how models are sharded and compiled; default: ZeRO-3, compiled.
        kwargs: as accelerate's.

    Raises:
        ConfigError: another engine or another compiler is asked for beside it, or two precisions.
    """

    _optimizers: list[Any]
    _custom_objects: list[Any]

    def __init__(self, *args: Any, fxzero: FxZeroPlugin | None = None, **kwargs: Any) -> None:
        """See the class."""
        self.fxzero = fxzero if fxzero is not None else FxZeroPlugin()
        self.fxzero.refuse_whole_step(
            "accelerate", "the loop is your own: call fxzero.compile_step, or leave it as it is"
        )
        given = inspect.signature(Accelerator.__init__).bind(self, *args, **kwargs).arguments
        refuse_other_engines(given)
        refuse_precision(asked_precision(given), self.fxzero)
        self._saves: list[Any] | None = None
        super().__init__(*args, **kwargs)
        refuse_precision(self.mixed_precision, self.fxzero)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard a model and compile its forward, in place.

        Args:
            model: any module; one that `fxzero.shard` has seen stays as it is.
            device_placement: whether to move it to this rank's device before it is sharded.
            evaluation_mode: leave it whole, on every rank, and do not compile it.

        Raises:
            ConfigError: it is compiled already, and not by fxzero.
            ShardingError: it cannot be sharded.
        """
        prepared = getattr(model, "_is_accelerate_prepared", False)
        is_sharded = model_state(model) is not None
        if prepared or (evaluation_mode and not is_sharded):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not is_sharded:
            _refuse_compiled(model)
            if self._moves(model, device_placement):
                model.to(self.device)
        self.fxzero.shard(model)
        # What accelerate does in evaluation mode is all it does here: autocast, and no wrapper.
        super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if not is_compiled_module(model) and model._compiled_call_impl is None:
            self.fxzero.compile_forward(model)
        self.print(self.fxzero.sentence(model))
        return model

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Let the forwards run inside, and their backwards, not reduce gradients.

        ZeRO 2 and 3 keep no full gradients: there each micro-batch is reduced, into shards.
        """
        state = model_state(model)
        if state is None:
            with super().no_sync(model):
                yield
        elif state.zero <= _REDUCES_ONCE:
            with no_sync(model):
                yield
        else:
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As accelerate's; the last of a step also reduces gradients of parameters that only
        micro-batches before it have used."""
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            for model in self._models:
                reduce_leftovers(model)

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce in a backward whose forward ran under `no_sync`: at ZeRO 2 and 3 it does anyway.

        Raises:
            ConfigError: at ZeRO 0 and 1, where the forward has decided.
        """
        state = model_state(model)
        if state is not None and state.zero <= _REDUCES_ONCE:
            raise ConfigError(
                "trigger_sync_in_backward: whether a backward reduces is decided by its forward "
                f"at zero={state.zero}. Run the last forward outside of no_sync (accumulate does), "
                "or use zero=2."
            )
        with Accelerator.trigger_sync_in_backward(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """As accelerate's, for what is not sharded.

        Raises:
            ConfigError: ranks with fewer batches would leave the others waiting.
        """
        sharded = [m for m in joinables if isinstance(m, nn.Module) and model_state(m) is not None]
        if sharded and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs: a sharded model's ranks take equally many steps, as each has "
                "a part of the parameters. Leave it out, and let the loaders be even "
                "(DataLoaderConfiguration(even_batches=True), the default)."
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def gather(self, tensor: Any) -> Any:
        """Gather a tensor of each rank; one that ranks have in parts is whole on each first, as a
        gradient, or its norm, would be under DDP."""
        return super().gather(_whole(tensor))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce a tensor over ranks; see `gather`."""
        return super().reduce(_whole(tensor), reduction, scale)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict, on the CPU of the main process; elsewhere it is empty.

        A collective: all ranks call it.
        """
        if model_state(model) is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        if self._saves is not None:  # `save_state` asks, and writes the shards itself
            self._saves.append(model.state_dict())
            shards: dict[str, Any] = self._saves[-1]
            return shards
        inner = self.unwrap_model(model) if unwrap else model
        return whole_weights(inner, keep=self.is_main_process)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save all that was prepared and registered, each rank its part. A collective.

        Arguments, names of folders, and hooks are accelerate's. Hooks get each rank's shards.

        Raises:
            CheckpointError: something cannot be written.
        """
        found = self._trained()
        if not found.pairs:
            return super().save_state(output_dir, safe_serialization, **kwargs)

        def write(_models: list[nn.Module], weights: list[Any], folder: str) -> None:
            ours = {id(state) for state in self._saves or ()}
            weights[:] = [state for state in weights if id(state) not in ours]
            found.save(Path(folder))

        handle = self.register_save_state_pre_hook(write)
        self._saves = []
        try:
            with self._without(found):
                return super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            self._saves = None
            handle.remove()

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any
    ) -> None:
        """Go on from what `save_state` has written, on any number of ranks. A collective.

        Raises:
            CheckpointError: it is not whole, or of something else.
            ConfigError: settings of ``load_state_dict``, which reads no shards.
        """
        found = self._trained()
        if not found.pairs:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        if settings := sorted(kwargs.keys() - {"map_location"}):
            raise ConfigError(
                f"load_state({settings[0]}=…) is for load_state_dict, and sharded models are read "
                "by fxzero.checkpoint.load, which wants every tensor. Leave it out."
            )

        def read(models: list[nn.Module], folder: str) -> None:
            ours = {id(model) for model in found.models}
            models[:] = [model for model in models if id(model) not in ours]
            found.load(Path(folder))

        handle = self.register_load_state_pre_hook(read)
        try:
            with self._without(found):
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            handle.remove()
        self.step = found.steps.step

    def _trained(self) -> Trained:
        models = [model for model in self._models if model_state(model) is not None]
        return trained(models, self._optimizers, self._custom_objects, self.step)

    @contextlib.contextmanager
    def _without(self, found: Trained) -> Iterator[None]:
        """Hide from accelerate what fxzero saves."""
        optimizers, registered = self._optimizers, self._custom_objects
        ours = {id(item) for item in (*found.prepared, *found.registered.values())}
        self._optimizers = [item for item in optimizers if id(item) not in ours]
        self._custom_objects = [item for item in registered if id(item) not in ours]
        try:
            yield
        finally:
            self._optimizers, self._custom_objects = optimizers, registered

    def _moves(self, model: nn.Module, asked: bool | None) -> bool:
        """Whether a whole model goes to this rank's device."""
        if self.fxzero.offload or any(p.is_meta for p in model.parameters()):
            return False
        return bool(self.device_placement if asked is None else asked)


def _whole(values: Any) -> Any:
    """Plain tensors of those that ranks have in parts, however they are nested."""
    return recursively_apply(whole, values, test_type=lambda value: isinstance(value, DTensor))


def _refuse_compiled(model: nn.Module) -> None:
    if is_compiled_module(model) or model._compiled_call_impl is not None:
        raise ConfigError(
            "the model is compiled, and not sharded: fxzero shards before it compiles. Give "
            "prepare the model as it is, which compiles it; or call fxzero.shard, then "
            "torch.compile(backend='fxzero'), then prepare."
        )
