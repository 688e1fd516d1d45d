"""Compile a training step for any number of ranks in one process, with no memory.

Parameters, batch and collectives are fake: shapes and dtypes flow, values do not. The
backend that runs here is the one that runs in training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fxzero import _compat, backend
from fxzero.errors import CaptureError, ConfigError
from fxzero.runtime.regions import fresh_cache
from fxzero.sharding import shard
from fxzero.step import compile_step


@dataclass(frozen=True)
class Capture:
    """What a compilation left to look at."""

    compilations: tuple[backend.Compilation, ...]
    """One per graph; a graph break makes several."""
    num_parameters: int
    world_size: int
    zero: int


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
def _observed() -> Iterator[list[backend.Compilation]]:
    """Collect the compilations that start meanwhile, graphs included."""
    found: list[backend.Compilation] = []

    def observe(compilation: backend.Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    backend.observers.append(observe)
    try:
        yield found
    finally:
        backend.observers.remove(observe)


def capture(
    build: Callable[[], Any],
    *,
    zero: int,
    world_size: int,
    rank: int = 0,
    batch_size: int = 2,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
    training: bool = True,
    step: bool = False,
    micro_batches: int = 1,
) -> Capture:
    """Compile one step of a model for `world_size` ranks.

    Args:
        build: returns a module that has ``example_inputs(batch_size)``, or a pair of a
            module and the tuple of its inputs. It runs on fake tensors.
        batch_size: passed to ``example_inputs``.
        options: the backend's; regions are not compiled unless asked for.
        training: also compile backward, from the model's loss: a scalar output, its
            ``loss``, or else the sum of its first output.
        step: compile the whole step by `fxzero.compile_step`, with AdamW and clipping.
        micro_batches: of a whole step.

    Raises:
        CaptureError: what `build` returned cannot be called.
        ConfigError: see `fake_ranks`.
    """
    settings: dict[str, Any] = {"lower_regions": {"backend": "eager"}, **(options or {})}
    torch._dynamo.reset()
    with fake_ranks(world_size, rank):
        mesh = init_device_mesh("cpu", (world_size,))
        with _compat.fake_tensors(), fresh_cache(), _observed() as compilations:
            model, batch = _model_and_batch(build(), batch_size)
            num_parameters = sum(p.numel() for p in model.parameters())
            shard(model, zero, mesh=mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            if step:
                _run_step(model, batch, micro_batches, settings)
            else:
                _run(model, batch, training, settings)
    torch._dynamo.reset()
    return Capture(tuple(compilations), num_parameters, world_size, zero)


def _run(
    model: nn.Module, batch: tuple[Any, ...], training: bool, settings: Mapping[str, Any]
) -> None:
    """Compile forward and backward by running them."""
    compiled = torch.compile(model, backend="fxzero", options=dict(settings))
    with contextlib.nullcontext() if training else torch.no_grad():
        output = compiled(*batch)
    if training:
        loss_of(output).backward()


class _Loss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Any) -> Tensor:
        return loss_of(self.model(*batch))


def _run_step(
    model: nn.Module, batch: tuple[Any, ...], micro_batches: int, settings: Mapping[str, Any]
) -> None:
    """Compile a whole step by running it."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = compile_step(
        _Loss(model),
        optimizer,
        micro_batches=micro_batches,
        clip_grad_norm=1.0,
        options=settings,
    )
    step(*batch)


def _model_and_batch(built: Any, batch_size: int) -> tuple[nn.Module, tuple[Any, ...]]:
    if isinstance(built, nn.Module):
        examples = getattr(built, "example_inputs", None)
        if not callable(examples):
            raise CaptureError(
                f"{type(built).__name__} has no example_inputs(batch_size) to make a batch with. "
                "Define it, or let the factory return (model, inputs)."
            )
        return built, tuple(examples(batch_size))
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        return built[0], tuple(built[1])
    raise CaptureError(
        f"the factory returned {type(built).__name__}; it must return a module, or (module, inputs)"
    )


def loss_of(output: Any) -> Tensor:
    """The scalar that a model's output is trained by."""
    if isinstance(output, Mapping):
        output = output.get("loss", next(iter(output.values())))
    loss = getattr(output, "loss", output)
    if isinstance(loss, (tuple, list)):
        loss = loss[0]
    if not isinstance(loss, Tensor):
        raise CaptureError(f"the model returned {type(output).__name__}: no tensor to train by")
    return loss if loss.dim() == 0 else loss.sum()
