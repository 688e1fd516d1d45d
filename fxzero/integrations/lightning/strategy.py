"""A strategy for Lightning's Trainer: the same script, sharded and compiled.

    Trainer(strategy="ddp", devices=2)                     every rank has the whole model
    Trainer(strategy=FxZeroStrategy(zero=3), devices=2)    every rank has a half of it

Processes, process group, samplers, barriers and reductions of what is logged are those of
Lightning's own DDPStrategy. What differs: the LightningModule is sharded in place and nobody wraps
it, optimizers are made after that, micro-batches before the last are not reduced at stages 0 and
1, and checkpoints are written from shards: one file, as DDP has it, or a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from fxzero.compiler.config import Config
from fxzero.errors import CheckpointError
from fxzero.integrations.lightning import set_up, sharded_folder, whole_file
from fxzero.integrations.plugin import FxZeroPlugin
from fxzero.integrations.whole import whole
from fxzero.sharding.buffers import sync_buffers
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.shard import model_state, no_sync

_TIMEOUT = timedelta(minutes=30)
_HOST_AND_CUDA = "cpu:gloo,cuda:nccl"
"""Shards in the host's memory have their collectives there."""


class FxZeroStrategy(DDPStrategy):
    """ZeRO stages 0 to 3 under a Trainer, compiled by fxzero.

    Args:
        zero: ZeRO stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also
            parameters.
        mesh: one axis to shard over (default: all ranks), or two: replicate, shard. As a tuple
            ``(replicate, shard)`` where the process group is not there yet.
        param_dtype: compute in this dtype: shards are cast before they are gathered. It is beside
            the Trainer's ``precision``, whose autocast gathers in the parameters' own dtype.
        reduce_dtype: dtype in which gradients are reduced; default: the compute dtype.
        offload: keep shards in the host's memory, where the optimizer updates them.
        options: the compiler's, as of ``torch.compile(backend="fxzero", options=…)``.
        compile: False runs the sharded model as it is, one operator after another.
        save_distributed_checkpoint: True writes a folder, each rank its own part; False gathers
            all on rank 0, in one file that any strategy and ``load_from_checkpoint`` read. Either
            is read, whatever is set here, on any number of ranks.
        process_group_backend: default: gloo, or nccl where there is CUDA.
        timeout: of the process group's collectives.
        settings: accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin: as of Lightning's ParallelStrategy.

    Raises:
        ConfigError: a stage, an option or a precision that does not exist or does not go with the
            others.
    """

    strategy_name = "fxzero"
    _process_group_backend: str | None
    _is_restored = False
    """Whether the last checkpoint was a folder, of which all is loaded."""
    _given: Mapping[str, Any] = {}
    """The model's state that is about to be saved, as hooks get it."""

    def __init__(
        self,
        zero: int = 3,
        *,
        mesh: DeviceMesh | tuple[int, int] | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        offload: bool = False,
        options: Mapping[str, Any] | Config | None = None,
        compile: bool = True,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = _TIMEOUT,
        **settings: Any,
    ) -> None:
        """See the class."""
        set_up.refuse_unknown(settings)
        self._mesh_shape = mesh if isinstance(mesh, tuple) else None
        self.plugin = FxZeroPlugin(
            zero=zero,
            mesh=mesh if isinstance(mesh, DeviceMesh) else None,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            offload=offload,
            options=options,
            compile=compile,
        )
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._compiled: WeakSet[nn.Module] = WeakSet()
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **settings)

    @property
    def precision_plugin(self) -> Precision:
        """How numbers are kept and computed with."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            set_up.check_precision(precision_plugin, self.plugin.param_dtype)
        self._precision_plugin = precision_plugin

    def setup_environment(self) -> None:
        """Join the process group, and lay the ranks out."""
        if self.plugin.offload and self.root_device.type == "cuda":
            self._process_group_backend = self._process_group_backend or _HOST_AND_CUDA
        super().setup_environment()
        if self.plugin.mesh is None:
            kind = self.root_device.type
            shape = self._mesh_shape or (self.world_size,)
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
            self.plugin = replace(self.plugin, mesh=mesh)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where a model is made: ``trainer.init_module(empty_init=True)`` makes it on meta, and
        set-up gives it memory, module after module, of which each rank keeps its part."""
        where = torch.device("meta") if empty_init else nullcontext()
        with where, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Shard and compile the LightningModule, and let it make its optimizers.

        Raises:
            ConfigError: something of the Trainer or the module that would go wrong in silence.
            ShardingError: it cannot be sharded.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        set_up.check(module, trainer, self.plugin, self.world_size)
        if self.save_distributed_checkpoint:
            set_up.check_folder(self.checkpoint_io)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._layer_sync and model_state(module) is None:
            module = self._layer_sync.apply(module)
        self.model = module = self.precision_plugin.convert_module(module)
        set_up.shard(self.plugin, module, self.root_device)
        for part in set_up.called_by_steps(module):
            if part not in self._compiled:
                self._compiled.add(part)
                self.plugin.compile_forward(part)
        rank_zero_info(self.plugin.sentence(module))
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Nothing: `setup` has put every part where it belongs."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Of micro-batches before the last of a step: stages 0 and 1 reduce once for all of them;
        2 and 3, which keep no full gradients, reduce each."""
        state = model_state(self.lightning_module)
        keeps = state is not None and state.zero < 2
        with no_sync(self.lightning_module) if keeps else nullcontext():
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        """Behind the last backward of a step reduce gradients of parameters that only micro-batches
        before it have used."""
        super().post_backward(closure_loss)
        if self.lightning_module is not None:
            reduce_leftovers(self.lightning_module)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; buffers that it has changed are then rank 0's, as under DDP, also where
        it calls a child and not the forward of the whole."""
        output = super().training_step(*args, **kwargs)
        state = model_state(self.lightning_module)
        if state is not None:
            sync_buffers(state)
        return output

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce what is logged; of a norm, or a penalty on weights, each rank gives the whole."""
        return super().reduce(whole(tensor), group, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather a tensor of each rank; one that ranks have in parts is whole on each first."""
        return super().all_gather(whole(tensor), group, sync_grads)

    def teardown(self) -> None:
        """Let go. The model stays sharded, where it is: it may be validated next."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A model on meta, and one in parts, can be loaded into after set-up alone."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Of a folder, the optimizers were restored with the model."""
        return not self._is_restored

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state: whole, on rank 0, for a file; this rank's parts, for a folder."""
        state: dict[str, Any] = self.lightning_module.state_dict()
        if not self.save_distributed_checkpoint:
            return whole_file.gathered(state)
        self._given = dict(state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, as the model's.

        Raises:
            CheckpointError: it cannot be loaded again.
        """
        inner = getattr(optimizer, "optimizer", optimizer)
        whole_file.refuse_flat(inner)
        state: dict[str, Any] = inner.state_dict()
        return state if self.save_distributed_checkpoint else whole_file.gathered(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint. All ranks call it.

        Raises:
            CheckpointError: it cannot be written, or says what a folder cannot hold.
        """
        path: str = self.broadcast(str(filepath))
        if not self.save_distributed_checkpoint:
            whole_file.add_random_state(checkpoint)
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if storage_options is not None:
            raise CheckpointError(
                "a folder is written by fxzero.checkpoint, which has no use for storage_options=. "
                "Leave it out, or write one file: save_distributed_checkpoint=False."
            )
        step = int(checkpoint["global_step"])
        given, self._given = self._given, {}
        sharded_folder.refuse_changed(given, checkpoint["state_dict"])
        sharded_folder.save(self.lightning_module, self.optimizers, checkpoint, path, step)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint: a file, whose parts the Trainer then asks to load; or a folder, which
        is loaded at once.

        Raises:
            CheckpointError: it is of something else, or not whole.
        """
        path: str = self.broadcast(str(checkpoint_path))
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        self._is_restored = self.broadcast(Path(path).is_dir())
        if not self._is_restored:
            checkpoint = whole_file.read(path, self.checkpoint_io, weights_only)
            if fits:
                whole_file.restore_random_state(checkpoint, self.world_size)
            return checkpoint
        if not self.lightning_module.strict_loading:
            raise CheckpointError(
                f"strict_loading=False, and {path} is a folder, which is loaded whole or not at "
                "all. Make a file of it by fxzero.integrations.lightning.consolidate."
            )
        optimizers = self.optimizers if fits else []
        return sharded_folder.load(self.lightning_module, optimizers, path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model: of each tensor the rows that this rank has."""
        if not self._is_restored:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, each tensor as its parameter lies.

        Raises:
            CheckpointError: they are others than those that were saved.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint has {len(states)} optimizers, and configure_optimizers returns "
                f"{len(self.optimizers)}. Configure those that were saved."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            whole_file.load_optimizer(optimizer, state)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: importing `fxzero.integrations.lightning` registers it, once."""
