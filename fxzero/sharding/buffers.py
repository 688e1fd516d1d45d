"""Buffers that a forward changes are rank 0's on every rank, as in DistributedDataParallel.

DDP broadcasts all buffers before a forward; here those that a forward has changed (BatchNorm's
running statistics) are broadcast right after it. A forward reads the same values either way,
and evaluation, or a checkpoint, after the last step reads them too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxzero._compat import is_fake, version_of
from fxzero.ranks.agree import channel_of
from fxzero.sharding.params import GradSync, ModelState


class BufferSync:
    """What is known of a model's buffers: which tensor, and at which version."""

    def __init__(self, model: nn.Module, groups: Sequence[str], *, in_stages: bool = False) -> None:
        self._model = weakref.ref(model)
        self._in_stages = in_stages
        """Whether ranks run other stages of a pipeline, and change other buffers."""
        self._groups = tuple(groups)
        """Names of the process groups of the mesh's axes."""
        self._owners: list[tuple[nn.Module, str]] = []
        self._seen: list[tuple[Tensor | None, int]] = []
        self.find()

    def find(self) -> None:
        """Look for buffers that were registered since."""
        model = self._model()
        known = {(id(module), name) for module, name in self._owners}
        for module in model.modules() if model is not None else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and (id(module), name) not in known:
                    self._owners.append((module, name))
                    self._seen.append((None, 0) if known else _now(module, name))

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __call__(self) -> None:
        """Broadcast the buffers that have changed on any rank since the last call. A collective."""
        now = [_now(module, name) for module, name in self._owners]
        if any(is_fake(buffer) for buffer, _ in now):
            return
        changed = [
            buffer is not seen or version != before or (_counts(module) and not self._in_stages)
            for (buffer, version), (seen, before), (module, _) in zip(
                now, self._seen, self._owners, strict=True
            )
        ]
        for index, rank in any_rank(changed, self._groups).items():
            buffer = now[index][0]
            if buffer is not None:
                _broadcast(buffer, rank if self._in_stages else 0)
        self._seen = [_now(module, name) for module, name in self._owners]


def _now(module: nn.Module, name: str) -> tuple[Tensor | None, int]:
    buffer = module._buffers.get(name)
    return buffer, 0 if buffer is None else version_of(buffer)


def any_rank(changed: Sequence[bool], groups: Sequence[str]) -> dict[int, int]:
    """Positions of what has changed on any rank, and the first such rank: ranks may write to other
    buffers than rank 0."""
    behind = dist.get_world_size() - dist.get_rank()  # from the last rank, which has 1
    flags = torch.tensor([behind if flag else 0 for flag in changed], dtype=torch.int32)
    for group in groups:  # along one axis after the other: then all ranks know of all
        channel = channel_of(group)
        if channel is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=channel)
    size = dist.get_world_size()
    return {index: size - flag for index, flag in enumerate(flags.tolist()) if flag}


def _counts(module: nn.Module) -> bool:
    """Whether a module keeps running statistics: torch's eager kernel writes them unseen."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def _broadcast(buffer: Tensor, rank: int) -> None:
    values = buffer.detach().contiguous()
    dist.broadcast(values, src=rank)
    if values.data_ptr() != buffer.data_ptr():
        with torch.no_grad():
            buffer.copy_(values)


def sync_buffers(state: ModelState) -> None:
    """Broadcast what a forward has changed, unless inside of `fxzero.no_sync`."""
    if state.buffers is not None and state.sync != GradSync.ACCUMULATE.value:
        state.buffers()


def forward_then_sync(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: ModelState
) -> Any:
    """An eager forward that ends in `sync_buffers`.

    Compiled graphs do so when they have run: see `fxzero.backend`.
    """
    output = forward(*args, **kwargs)
    if not torch.compiler.is_compiling():
        if isinstance(state.buffers, BufferSync):
            state.buffers.find()
        sync_buffers(state)
    return output
