"""All ranks of a job, as a checkpoint needs them: to compare notes, in a thread of its own."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch.distributed as dist

from fxzero.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """This rank and the others. A single process is the only one of its kind.

    Args:
        group: over gloo, of all ranks; None in a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank. A collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank. A collective."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def agree(self, error: BaseException | None) -> None:
        """Fail on all ranks if one has failed. A collective.

        Raises:
            CheckpointError: what the first of them met, and which rank; a rank's own error as it is
                on that rank.
        """
        said = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [rank for rank, text in enumerate(said) if text is not None]
        if failed:
            raise CheckpointError(f"rank {failed[0]} has failed. {said[failed[0]]}")


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ReferenceType[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""By the world's group. torch keeps them until they are destroyed: whoever kept one longer would
leave gloo's threads to the end of the process, which they abort."""


def all_ranks() -> Ranks:
    """The ranks of this job. The first call is a collective one: it makes a process group, beside
    those of training, so that a thread may wait in it.

    Raises:
        CheckpointError: the process group is a fake one, whose other ranks hold nothing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(None)
    world = dist.group.WORLD
    assert world is not None
    if "fake" in dist.get_backend():
        raise CheckpointError(
            f"a checkpoint of {dist.get_world_size()} ranks was asked for, and the process group "
            "is a fake one: there is one rank. Start the others with torchrun."
        )
    group = _made[world]() if world in _made else None
    if group is None:
        group = dist.new_group(backend="gloo")
        _made[world] = weakref.ref(group)
    return Ranks(group)
