"""What `compile_step` refuses, before anything has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fxzero._compat import is_fake, pytree, resolve_process_group
from fxzero.compiler.config import Config, MemoryPreset
from fxzero.errors import BatchError, ConfigError, RanksDisagreeError
from fxzero.ranks.agree import channel_of
from fxzero.settings import Auto
from fxzero.sharding.host import refuse_group_of_device
from fxzero.sharding.params import ParamSpec
from fxzero.sharding.pipeline import Pipeline


def check_micro_batches(count: int) -> int:
    """A number of micro-batches that there can be."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"micro_batches={count!r} must be a whole number, 1 or more")
    return count


def held_as_sharded(config: Config, specs: Mapping[str, ParamSpec]) -> Config:
    """Settings for a model whose parameters `fxzero.shard` keeps in the host's memory: those of a
    step that holds them there, ``memory="all_host"`` where nothing is said.

    Raises:
        ConfigError: the step would hold them elsewhere.
    """
    if all(spec.device is None for spec in specs.values()):
        return config
    states, params = config.filled.offload_states, config.filled.offload_params
    if config.memory is MemoryPreset.NONE and not states.share and not params.share:
        if states.share == 0 or params.share == 0:
            raise ConfigError(_HELD.format("offload_states.share=0 or offload_params.share=0"))
        return replace(config, memory=MemoryPreset.ALL_HOST)
    if isinstance(states.share, Auto):  # copies on the device and saved values are left to decide
        return replace(config, offload_states=replace(config.offload_states, share=1.0))
    if states.share != 1:
        raise ConfigError(_HELD.format(config.offloads or f"offload_states.share={states.share}"))
    return config


_HELD = (
    "{} holds parameters on the device, and the model was sharded with offload=True, which keeps "
    "them in the host's memory. Drop the setting, which leaves options={{'memory': 'all_host'}}; "
    "use memory='states_host', with which copies of them stay on the device; or shard without "
    "offload."
)


def refuse_without_group_for_state(config: Config, specs: Mapping[str, ParamSpec]) -> None:
    """State of a GPU's parameters that lives on the host communicates there, for a checkpoint say.

    Raises:
        ShardingError: a process group carries tensors of the GPU alone.
    """
    if not config.streams_states:
        return
    for spec in specs.values():
        parameter = spec.parameter() if spec.parameter is not None else None
        if parameter is not None and parameter.device.type != "cpu":
            for axis in spec.layout.axes:
                refuse_group_of_device(axis.group.name, parameter.device.type, _STATE_THERE)


_STATE_THERE = "offload_states.update=device keeps optimizer state"


def refuse_beside_pipeline(config: Config, specs: Mapping[str, ParamSpec], kernels: object) -> None:
    """See that nothing is asked of a pipeline that it cannot do.

    Raises:
        ConfigError: a setting that is not there yet for stages, or an optimizer without a fused
            update.
    """
    if not any(spec.stages for spec in specs.values()):
        return
    asked = {
        "cuda_graph=True": config.cuda_graph,
        f"plan={config.plan!r}": bool(config.plan),
        "tile_linear": bool(config.filled.tile_linear.max_bytes),
        "slab.enabled=True": config.slab.enabled,
    }
    wrong = [name for name, is_asked in asked.items() if is_asked]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} and a model in stages of a pipeline: this is not there yet. Drop the "
            "setting, or the mesh's axis 'pipeline'."
        )
    if not kernels:
        raise ConfigError(
            "the optimizer runs its own step(), which a pipeline does not: each rank has gradients "
            "of its own stages alone. Use SGD, Adam, AdamW or Adagrad."
        )


def refuse_other_batch(pipeline: Pipeline, arguments: Any) -> None:
    """See that all stages of a pipeline are given the same batch. A collective.

    Args:
        arguments: what the step was called with; None of a rank that does not take it.

    Raises:
        BatchError: they are not; on all of them.
        RanksDisagreeError: another rank does not take its own.
    """
    channel = channel_of(pipeline.group.name)
    tensors = [v for v in pytree.tree_leaves(arguments) if isinstance(v, Tensor)]
    if channel is None or any(map(is_fake, tensors)):
        return
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    takes = arguments is not None
    mine = torch.frombuffer(bytearray([*digest.digest(), takes]), dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(pipeline.group.size)]
    dist.all_gather(every, mine, group=channel)
    if not takes:
        return
    group = resolve_process_group(pipeline.group.name)
    without = [
        str(dist.get_global_rank(group, place))
        for place, other in enumerate(every)
        if not int(other) >> 56
    ]
    if without:
        raise RanksDisagreeError(
            f"rank {', '.join(without)} of this pipeline does not begin its step, and says why: "
            "without it this rank would wait for ever. Nothing was changed. Mend what it names."
        )
    if len({int(other) for other in every}) > 1:
        raise BatchError(
            "ranks of one pipeline were given different batches: the first stage would read one, "
            "and the last one another. Give all of them the same rows: let a sampler count "
            "replicas by the axes beside 'pipeline', num_replicas=mesh.size() // mesh.size(0)."
        )


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """A scheduler that can be stepped without a metric, and belongs to the optimizer."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric: call scheduler.step(metric) yourself, and leave "
            "compile_step(scheduler=None)."
        )
    other = getattr(scheduler, "optimizer", optimizer)
    if not callable(getattr(scheduler, "step", None)) or other is not optimizer:
        raise ConfigError(
            f"scheduler={type(scheduler).__name__} belongs to another optimizer than the one that "
            "compile_step was given; make it with the same optimizer."
        )


def optimized_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by name, in the model's order.

    Raises:
        ConfigError: one of them is not the model's.
    """
    wanted = {
        id(p): (g, i)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    found = {name: p for name, p in model.named_parameters() if id(p) in wanted}
    strange = [place for key, place in wanted.items() if key not in {id(p) for p in found.values()}]
    if strange:
        group, index = strange[0]
        raise ConfigError(
            f"the optimizer has {len(strange)} parameters that are not the model's, the first one "
            f"in group {group} at {index}. Was it made before fxzero.shard, or for another model? "
            "Make it with model.parameters() of the model that compile_step is given."
        )
    if not any(p.requires_grad for p in found.values()):
        raise ConfigError("no parameter of the optimizer requires a gradient: nothing to train")
    return found


def refuse_ignored(parameters: Mapping[str, nn.Parameter], specs: Mapping[str, ParamSpec]) -> None:
    """One norm for all ranks cannot hold gradients that every rank has for itself."""
    known = {id(s.parameter()) for s in specs.values() if s.parameter is not None}
    ignored = [n for n, p in parameters.items() if p.requires_grad and id(p) not in known]
    if ignored and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"fxzero.shard ignores {', '.join(ignored[:8])}, whose gradients differ from rank to "
            "rank. Clipping, fp16 and stop_unless_finite need one norm for all ranks: take these "
            "parameters out of ignored=, or out of the optimizer."
        )


def check_splits(arguments: Any, micro_batches: int) -> None:
    """Only tensors are split; a number or a string is the same for all micro-batches."""
    plain = (Tensor, int, float, complex, bool, str, type(None), torch.dtype, torch.device)
    for path, value in pytree.tree_leaves_with_path(arguments):
        if not isinstance(value, plain):
            raise BatchError(
                f"micro_batches={micro_batches} cannot split {pytree.keystr(path)}, a "
                f"{type(value).__name__}: every micro-batch would see all of it. Pass tensors, in "
                "tuples, lists or dicts."
            )


def check_divides(arguments: Any, micro_batches: int) -> None:
    """All tensors have one number of rows, which the micro-batches share equally."""
    rows = {
        pytree.keystr(path): value.shape[0]
        for path, value in pytree.tree_leaves_with_path(arguments)
        if isinstance(value, Tensor) and value.dim() > 0
    }
    if not rows:
        raise BatchError(f"micro_batches={micro_batches}, but the batch holds no tensor to split")
    different = len(set(rows.values())) > 1
    odd = {place: n for place, n in rows.items() if n % micro_batches}
    if different or odd:
        shown = ", ".join(f"{place}: {n}" for place, n in rows.items())
        problem = "tensors differ in dim 0" if different else f"do not divide by {micro_batches}"
        raise BatchError(
            f"micro_batches={micro_batches} splits every tensor of the batch along dim 0, whose "
            f"sizes {problem}: {shown}. Nothing was changed. Pad or drop rows, choose another "
            "number of micro-batches, or keep what is no batch out of the arguments."
        )
