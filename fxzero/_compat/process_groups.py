"""Process groups by name, and the key-value stores behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional

from fxzero._compat.attempts import attempt


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives know by `name`."""
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def launch_all_reduce(tensor: torch.Tensor, group: str) -> Any:
    """Start summing a tensor over the ranks, in place; ``wait()`` on what is returned."""
    options = dist.distributed_c10d.AllreduceOptions()
    options.asyncOp = True
    return resolve_process_group(group).allreduce([tensor], options)


def launch_all_gather(fulls: list[torch.Tensor], parts: list[torch.Tensor], group: str) -> Any:
    """Start gathering the ranks' parts of tensors; ``wait()`` on what is returned."""
    return resolve_process_group(group).allgather_into_tensor_coalesced(fulls, parts)


def launch_reduce_scatter(
    rows: list[torch.Tensor], fulls: list[torch.Tensor], op: str, group: str
) -> Any:
    """Start reducing tensors, of which each rank gets its rows; ``wait()`` on what is returned."""
    options: Any = dist.distributed_c10d.ReduceScatterOptions()
    options.reduceOp = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}[op]
    return resolve_process_group(group).reduce_scatter_tensor_coalesced(rows, fulls, options)


def init_fake_process_group(world_size: int, rank: int = 0) -> None:
    """A process group of any size in one process, whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def default_store() -> Any:
    """The key-value store of the default process group; None without other processes."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    store = dist.distributed_c10d._get_default_store()
    prefix = attempt(store, dist.get_rank(), dist.get_world_size())
    return dist.distributed_c10d.PrefixStore(prefix, store)


def private_store() -> Any:
    """The default store by a connection of its own, so that a thread may wait on it.

    None without other processes.
    """
    store = default_store()
    clone = getattr(store, "clone", None)
    return clone() if clone is not None else store


def gloo_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process that run over gloo, the largest first."""
    if not dist.is_initialized():
        return []
    groups = [
        group
        for group, (backend, _) in dist.distributed_c10d._world.pg_map.items()
        if isinstance(group, dist.ProcessGroup) and "gloo" in str(backend).lower()
    ]
    return sorted(groups, key=lambda group: -group.size())


def flight_record() -> bytes | None:
    """What torch's flight recorder has of the last collectives, as ``torchfrtrace`` reads it.

    None where there is none. (torch 2.13 records gloo's and NCCL's, unless TORCH_FR_BUFFER_SIZE
    is 0; one that has no recorder for all backends has NCCL's, where it was built with it.)
    """
    from torch._C import _distributed_c10d

    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump: Callable[[], bytes] | None = getattr(_distributed_c10d, name, None)
        if dump is not None:
            return dump()
    return None
