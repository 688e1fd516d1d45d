"""Compile a training step for any number of ranks in one process, with no memory.

Parameters, batch and collectives are fake: shapes and dtypes flow, values do not. The
backend that runs here is the one that runs in training.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fxzero import _compat
from fxzero._compat import pytree, reset_dynamo
from fxzero.compiler.compilation import Compilation, observers
from fxzero.compiler.config import Config
from fxzero.compiler.dump_folder import only_looked_at
from fxzero.compiler.plan import Plan
from fxzero.errors import CaptureError, ConfigError
from fxzero.inspect.optimizer import adamw
from fxzero.inspect.targets import DEFAULT_ROWS, Batch, Sizes, model_and_batch, raised_at
from fxzero.inspect.targets.pretrained import weights_left_out
from fxzero.regions.region import regions_to_look_at
from fxzero.sharding.params import unread_beside
from fxzero.sharding.precision import Precision
from fxzero.sharding.shard import shard
from fxzero.step.train_step import TrainStep


@dataclass
class SharedModel:
    """A model that is made once, of which each of several captures gets a copy: to make one of
    eighty layers takes a fifth of what it takes to compile it for a stage."""

    mode: Any = field(default_factory=_compat.fake_tensors)
    made: tuple[nn.Module, Batch] | None = None

    def copied(self, make: Callable[[], tuple[nn.Module, Batch]]) -> tuple[nn.Module, Batch]:
        """The model and its batch; made by the first who asks."""
        if self.made is None:
            made = make()
            check_memory(*made)
            if any(map(_closes_over, made[0].modules())):
                return made  # a copy of it would compute with this one's parameters
            self.made = made
        model, batch = self.made
        memo: dict[int, Any] = {id(self.mode): self.mode}
        try:
            with _compat.building_on_fakes():
                return copy.deepcopy(model, memo), batch
        except Exception:  # it keeps a lock, a file, a tensor that was computed
            self.made = None
            return make()


def _closes_over(module: nn.Module) -> bool:
    """Whether a module holds a function that knows a module or a tensor by its closure: a copy of
    the module would hold the same function, and that the same tensors."""
    held = list(vars(module).values())
    held += [inner for value in held if isinstance(value, dict) for inner in value.values()]
    held += [inner for value in held if isinstance(value, list | tuple) for inner in value]
    return any(_knows_tensors(value, frozenset()) for value in held if callable(value))


def _knows_tensors(value: Any, seen: frozenset[int]) -> bool:
    if id(value) in seen:
        return False
    seen |= {id(value)}
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        return any(_knows_tensors(part, seen) for part in parts if isinstance(part, _FUNCTIONS))
    if not isinstance(value, FunctionType):
        return False
    for cell in value.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if isinstance(inner, nn.Module | Tensor | MethodType | list | dict | tuple):
            return True
        if isinstance(inner, _FUNCTIONS) and _knows_tensors(inner, seen):
            return True
    return False


_FUNCTIONS = (FunctionType, functools.partial)


@dataclass(frozen=True)
class Capture:
    """What a compilation left to look at."""

    compilations: tuple[Compilation, ...]
    """One per graph; a graph break makes several."""
    num_parameters: int
    world_size: int
    zero: int
    batch: Batch = field(default_factory=Batch)
    """What the model was called with, on each rank: shapes without values."""
    trained: frozenset[str] = frozenset()
    """The names of parameters that require a gradient."""
    rank: int = 0
    """Whose graphs these are."""
    num_shards: int = 1
    """Ranks along the axis that ZeRO shards over; at stage 0 they replicate as all others do."""
    is_whole: bool = True
    """Whether the step that was asked for is one graph, updates and all."""
    names: Mapping[str, str] = field(default_factory=dict)
    """By each name that a parameter has in the model, the first one: a graph knows it by that."""

    def plan(self, settings: Config) -> Plan:
        """What was decided for its graphs, to be written and replayed."""
        contexts = [compilation.context for compilation in self.compilations]
        return Plan.of([(c.decisions, c.costs.name) for c in contexts], settings.filled)


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """A process group of `world_size` ranks that exist only in name.

    Raises:
        ConfigError: a process group exists already, or the rank is not in the world.
    """
    if dist.is_initialized():
        raise ConfigError(
            "inspecting needs a process without a process group; this one has joined one of "
            f"{dist.get_world_size()} ranks. Run it outside of torchrun."
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a world of {world_size} ranks")
    _compat.init_fake_process_group(world_size, rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _observed() -> Iterator[list[Compilation]]:
    """Collect the compilations that start meanwhile, graphs included."""
    found: list[Compilation] = []

    def observe(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        compilation.context.decisions.keep_digest = True
        found.append(compilation)

    observers.append(observe)
    try:
        yield found
    finally:
        observers.remove(observe)


@_compat.with_room_for_frames
def capture(
    build: Callable[[], Any],
    *,
    zero: int,
    world_size: int,
    rank: int = 0,
    batch_size: int | None = None,
    seq_len: int | None = None,
    inputs: str | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    offload: bool = False,
    options: Mapping[str, Any] | Config | None = None,
    training: bool = True,
    step: bool = False,
    micro_batches: int = 1,
    clip_grad_norm: float | None = 1.0,
    mesh: tuple[int, ...] = (),
    shared: SharedModel | None = None,
) -> Capture:
    """Compile one step of a model for `world_size` ranks.

    Args:
        build: returns a module, or a pair of a module and its inputs: see
            `fxzero.inspect.targets`. It runs on fake tensors.
        batch_size: rows of this rank's batch; the default is 2 for each micro-batch.
        seq_len: tokens of each row; the default is the model's.
        inputs: all of them by hand: `fxzero.inspect.targets.batches.parse`.
        offload: keep shards in the host's memory, as ``fxzero.shard(offload=True)`` does.
        options: the backend's. Regions are formed, and not compiled: nothing will run.
        training: also compile backward, from the model's loss: a scalar output, its
            ``loss``, or else the sum of its first output.
        step: compile the whole step, as `fxzero.compile_step` does, with AdamW.
        micro_batches: of a whole step.
        clip_grad_norm: of a whole step; None does not clip.
        mesh: how many ranks are along each axis that parameters lie on, (replicate, shard);
            without it all ranks are along one.
        shared: what captures of the same `build` and sizes make once.

    Raises:
        CaptureError: the model has nothing to train, or its step cannot be traced.
        ConfigError: `build` returned no model with inputs; an option that there is not; a mesh of
            another number of ranks; see `fake_ranks`.
        BatchError: a batch that does not divide by the number of micro-batches.
    """
    settings = Config.from_options({} if options is None else options)
    sizes_of_mesh = mesh or (world_size,)
    if math.prod(sizes_of_mesh) != world_size:
        raise ConfigError(f"mesh={sizes_of_mesh} is not one of {world_size} ranks")
    reset_dynamo()
    with fake_ranks(world_size, rank):
        device_mesh = init_device_mesh("cpu", sizes_of_mesh)
        with (
            shared.mode if shared is not None else _compat.fake_tensors(),
            regions_to_look_at(),
            only_looked_at(),
            _observed() as compilations,
        ):
            sizes = Sizes(batch_size, seq_len, inputs)
            make = functools.partial(_built, build, sizes, micro_batches)
            model, batch = make() if shared is None else shared.copied(make)
            check_memory(model, batch)
            num_parameters = sum(p.numel() for p in model.parameters())
            first: dict[int, str] = {}
            names = {
                name: first.setdefault(id(parameter), name)
                for name, parameter in model.named_parameters(remove_duplicate=False)
            }
            trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
            shard(
                model,
                zero,
                mesh=device_mesh,
                param_dtype=param_dtype,
                reduce_dtype=reduce_dtype,
                offload=offload,
            )
            is_whole = True
            if step:
                is_whole = _run_step(model, batch, micro_batches, clip_grad_norm, settings)
            else:
                _run(model, batch, training, settings)
            _tell_of_unread(compilations)
    reset_dynamo()
    if not compilations:
        raise CaptureError(
            f"nothing of {type(model).__name__} was compiled: its forward runs in Python alone "
            "(torch.compiler.disable, or a module that Dynamo leaves alone, as nn.LSTM). Look at "
            "the whole step, which is one graph: --step."
        )
    return Capture(
        tuple(compilations),
        num_parameters,
        world_size,
        zero,
        batch,
        trained,
        rank,
        sizes_of_mesh[-1],
        is_whole,
        names,
    )


def _tell_of_unread(compilations: Sequence[Compilation]) -> None:
    """Let each graph know what no graph reads of the model."""
    graphs = [one.joint for one in compilations if one.joint is not None]
    unread = unread_beside({key: spec for graph in graphs for key, spec in graph.specs.items()})
    for graph in graphs:
        graph.unread = unread


def _built(build: Callable[[], Any], sizes: Sizes, micro_batches: int) -> tuple[nn.Module, Batch]:
    """The model and its batch; a size that nobody asked for is not held against the factory."""
    with _compat.building_on_fakes(), weights_left_out():
        built = build()
    if sizes.rows is None and micro_batches > 1 and isinstance(built, nn.Module):
        sizes = replace(sizes, rows=DEFAULT_ROWS * micro_batches)
    model, batch = model_and_batch(built, sizes)
    args, kwargs = pytree.tree_map(_off_meta, (tuple(batch.args), dict(batch.kwargs)))
    return model, Batch(args, kwargs)


def _off_meta(value: Any) -> Any:
    """An input that was made on the meta device, where `shard` will bring the model."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    return torch.empty_like(value, device="cpu").requires_grad_(value.requires_grad)


def check_memory(model: nn.Module, batch: Batch) -> None:
    """See that nothing was made before: here tensors have shapes, and no values.

    Raises:
        ConfigError: a tensor with values; the message names it.
    """
    held = {
        **{f"parameter {name}": value for name, value in model.named_parameters()},
        **{f"buffer {name}": value for name, value in model.named_buffers()},
        **{
            f"input {pytree.keystr(path)}": value
            for path, value in pytree.tree_leaves_with_path((batch.args, dict(batch.kwargs)))
        },
    }
    for what, value in held.items():
        if isinstance(value, Tensor) and not _compat.is_fake(value):
            raise ConfigError(
                f"{what} was made before the factory was called, and holds memory. Make the model "
                "and its inputs inside of the factory, where tensors have none."
            )


def _run(model: nn.Module, batch: Batch, training: bool, config: Config) -> None:
    """Compile forward and backward by running them."""
    # torch.compile passes options on as they are, but wants a mapping.
    options = {f.name: getattr(config, f.name) for f in fields(config)}
    compiled = torch.compile(model, backend="fxzero", options=options)
    try:
        with contextlib.nullcontext() if training else torch.no_grad():
            output = compiled(*batch.args, **batch.kwargs)
    except _compat.no_value_error() as error:
        raise CaptureError(
            f"{type(model).__name__} asks for a tensor's value in Python, at {raised_at(error)} "
            f"({error}), and here tensors have shapes alone. Let what depends on it be computed "
            "(torch.where), or look at a run: train with options={'dump': DIR}, which inspect, "
            "explain and diff read."
        ) from error
    if training:
        loss = scalar_of(output)
        if not loss.requires_grad:
            raise CaptureError(
                f"the loss of {type(model).__name__} depends on no parameter that requires a "
                "gradient: nothing to train. Compile its forward alone (--inference), or unfreeze."
            )
        loss.backward()


def _run_step(
    model: nn.Module,
    batch: Batch,
    micro_batches: int,
    clip_grad_norm: float | None,
    config: Config,
) -> bool:
    """Compile a whole step by running it: the graph that `compile_step` makes of the same model.
    Returns whether it is one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise CaptureError(
            f"{type(model).__name__} has no parameter that requires a gradient: nothing to train. "
            "Compile its forward alone (fxzero inspect --inference), or unfreeze."
        )
    step = TrainStep(
        model,
        adamw(trained),
        None,
        micro_batches=micro_batches,
        clip_grad_norm=clip_grad_norm,
        precision=Precision(),
        scheduler=None,
        config=config,
        find_loss=scalar_of,
        runs=False,
    )
    try:
        step(*batch.args, **batch.kwargs)
    except _compat.no_value_error():
        if step.loss_scale is None:
            raise
        # All that was left is to read whether gradients overflowed, and nothing here has values.
    return not step.falls_back


def scalar_of(output: Any) -> Tensor:
    """The scalar that a model's output is trained by.

    Raises:
        CaptureError: there is no tensor in it that could have a gradient.
    """
    found = output
    if isinstance(found, Mapping) and found:
        found = found.get("loss", next(iter(found.values())))
    found = getattr(found, "loss", found)
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, Tensor) or not found.dtype.is_floating_point:
        what = str(found.dtype) if isinstance(found, Tensor) else type(output).__name__
        raise CaptureError(
            f"the model returned {what}: no tensor to train by. Return a loss, a mapping or object "
            "that has one, or floating-point outputs, which are summed up."
        )
    return found if found.dim() == 0 else found.sum()
