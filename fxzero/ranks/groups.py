"""Which processes share a parameter: from a mesh, or from what torchrun says.

A one-axis mesh shards over all of its ranks. On a two-axis mesh (HSDP) parameters
are sharded along the second axis and replicated along the first, the order that
`torch.distributed.fsdp.fully_shard` uses too.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fxzero._compat import attempt, resolve_process_group
from fxzero.errors import ShardingError
from fxzero.ranks.status import say_timeout
from fxzero.ranks.status import timeout_s as timeout_s_of_ranks

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Group:
    """One axis of a mesh as this rank sees it."""

    name: str
    """The process group's name, by which functional collectives find it."""
    size: int
    """How many ranks it has."""
    rank: int
    """This process's place in it."""
    ranks: frozenset[int] = field(repr=False)
    """Whose they are, by their place in the world."""

    @cached_property
    def stride(self) -> int:
        """How far apart in the world two neighbours of it are, the nearest ones; 1 of one rank."""
        return min((b - a for a, b in pairwise(sorted(self.ranks))), default=1)

    @staticmethod
    def of(process_group: dist.ProcessGroup) -> Group:
        """Describe a torch process group."""
        ranks = frozenset(dist.get_process_group_ranks(process_group))
        return Group(process_group.group_name, process_group.size(), process_group.rank(), ranks)


def backend_of(group_name: str, device_type: str) -> str:
    """What carries a group's collectives for a device: ``"nccl"``, ``"gloo"``, ``"fake"``."""
    backend = dist.get_backend(resolve_process_group(group_name))
    for entry in backend.split(","):
        device, _, name = entry.rpartition(":")
        if device in ("", device_type):
            return name
    return backend


_FREED_S = 0.1
"""What gloo's threads get to free the tensors of a collective that has ended."""


def init_distributed(
    device_type: str | None = None, *, from_host: bool = False, timeout_s: float | None = None
) -> dist.ProcessGroup | None:
    """Join the process group that torchrun's variables describe, unless one exists.

    NCCL on CUDA, gloo on CPU. Without torchrun's variables this is a single process:
    nothing is made and ``None`` is returned.

    Args:
        from_host: on CUDA let it carry tensors of the host too, by gloo.
        timeout_s: how long a rank may wait for others before all of them end, with who is late and
            where each is: longer than any may be late, which compiles or reads its first batch,
            say. A group of NCCL's gets it as its own too. The default is the environment's
            FXZERO_TIMEOUT_S; without it a rank is waited for as long as the group's own timeout.

    Raises:
        ConfigError: a timeout that is no positive number.
        ShardingError: some of torchrun's variables are set and others are not.
    """
    if timeout_s is not None:
        say_timeout(timeout_s)
    if dist.is_initialized():
        if timeout_s is not None:
            _watch_again()
        return dist.group.WORLD
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if missing:
        found = ", ".join(name for name in _TORCHRUN if name not in missing)
        raise ShardingError(
            f"cannot join a process group: {', '.join(missing)} missing from the environment "
            f"(found {found}). Start with torchrun, which sets all of them."
        )
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    backend, device = "gloo", None
    if device_type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl" if from_host else "nccl"
        device = torch.device("cuda", local_rank)
    store, rank, size = next(rendezvous("env://"))
    store.set_timeout(default_pg_timeout)
    # Addresses of ranks that torchrun has restarted are still in its store.
    store = PrefixStore(attempt(store, rank, size), store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        device_id=device,
        timeout=_timeout_of(backend),
    )
    leave_at_exit()
    return dist.group.WORLD


def _watch_again() -> None:
    """Let a watch that has begun know of another timeout."""
    from fxzero.ranks import watch  # which compares over groups

    if watch.current() is not None:
        watch.start()


def _timeout_of(backend: str) -> timedelta | None:
    """The timeout of a process group: NCCL's waits, of which the host sees nothing, end by it.

    On gloo `fxzero.ranks.watch` ends waits, which can say more. NCCL's watchdog then writes what
    torch's flight recorder has, where that is left on.
    """
    seconds = timeout_s_of_ranks()
    if "nccl" not in backend or not math.isfinite(seconds):
        return None
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    return timedelta(seconds=seconds)


def leave() -> None:
    """Leave all process groups, if there are any.

    A thread of gloo's frees the tensors of the last collective under a lock for which the group's
    end waits, and needs the interpreter for it, which the caller has: both would wait for ever.
    """
    if dist.is_initialized():
        time.sleep(_FREED_S)
        dist.destroy_process_group()


def leave_at_exit() -> None:
    """Leave all process groups at the end of a script that has not failed: gloo's threads abort
    some clean exits otherwise."""
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if not hasattr(sys, "last_value"):
        leave()


def resolve_mesh(
    mesh: DeviceMesh | None, device_type: str, *, from_host: bool = False
) -> DeviceMesh | None:
    """The mesh to shard over; ``None`` in a single process without a process group.

    Args:
        from_host: see `init_distributed`.

    Raises:
        ShardingError: the mesh has more than two axes, or not as many ranks as the world.
    """
    if mesh is None:
        if init_distributed(device_type, from_host=from_host) is None:
            return None
        return init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.ndim > 2 and "pipeline" not in (mesh.mesh_dim_names or ()):
        raise ShardingError(
            f"a mesh of {mesh.ndim} axes was given; fxzero.shard takes one axis (shard) or two "
            "(replicate, shard). Pass the sub-mesh of those axes: mesh['replicate', 'shard']."
        )
    world_size = dist.get_world_size()
    if mesh.size() != world_size:
        raise ShardingError(
            f"the mesh has {mesh.size()} ranks {tuple(mesh.shape)}, the world has {world_size}. "
            "Make the mesh over all ranks, or start as many processes as it has."
        )
    return mesh


def axes_of(mesh: DeviceMesh) -> tuple[Group, ...]:
    """The group of each axis that this rank is in, outermost first."""
    return tuple(Group.of(mesh.get_group(axis)) for axis in range(mesh.ndim))


def group_beside(mesh: DeviceMesh, axis: int) -> Group:
    """Another process group of the ranks of a mesh's axis: all ranks of the mesh call this.

    On NCCL collectives of one group run one after the other, on a stream of its own. What goes
    through another group does not wait behind them.
    """
    along = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    made = [dist.new_group(members) for members in along]  # of others' too, in one order
    (mine,) = (g for g, members in zip(made, along, strict=True) if dist.get_rank() in members)
    return Group.of(mine)
