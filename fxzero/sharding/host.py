"""Parameters that live in the host's memory: ``fxzero.shard(model, offload=True)``.

    device    full values, where a forward or a backward uses them; buffers, activations
    host      this rank's shards, their gradients, and what an optimizer keeps for them

A shard is cast before it is copied to the device, where the model computes in another dtype: the
same rounding, and fewer bytes. Where the device is a CPU both are one memory, and what is told
apart are the copies. Under the compiler they are transfers: see `fxzero.passes.offload_shards`.
What runs eagerly waits for each of its copies: nobody writes to what is still being read.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxzero._compat import is_fake
from fxzero.errors import FxZeroWarning, ShardingError
from fxzero.ranks.groups import backend_of

HOST = torch.device("cpu")


def at_home(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in the host's memory, pinned if copies go to a GPU; itself if it is there."""
    on_host = tensor.to(HOST)
    return pinned(on_host) if device.type == "cuda" and not is_fake(on_host) else on_host


def pinned(tensor: Tensor) -> Tensor:
    """A tensor of the host in memory that a GPU reads by itself, where the system gives some."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        _warn_of_pages(str(error).partition("\n")[0])
        return tensor


def pinned_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory of the host for a tensor, or for one of another dtype: such that a GPU reads and
    writes by itself, where the system gives some."""
    try:
        return torch.empty_like(tensor, dtype=dtype, device=HOST, pin_memory=True)
    except RuntimeError as error:
        _warn_of_pages(str(error).partition("\n")[0])
        return torch.empty_like(tensor, dtype=dtype, device=HOST)


@functools.cache
def _warn_of_pages(error: str) -> None:
    warnings.warn(
        f"no pinned memory for what offload=True keeps on the host ({error}): copies to and from "
        "the GPU are slower. Raise the limit of locked memory (ulimit -l).",
        FxZeroWarning,
        stacklevel=2,
    )


def refuse_without_host_group(mesh: DeviceMesh) -> None:
    """What communicates outside of a forward does so where shards are: on the host.

    Raises:
        ShardingError: a group of the mesh carries tensors of its device alone.
    """
    for axis in range(mesh.ndim):
        name = mesh.get_group(axis).group_name
        what = "offload=True keeps shards and gradients"
        refuse_group_of_device(name, mesh.device_type, what)


def refuse_group_of_device(name: str, device_type: str, what: str) -> None:
    """See that a process group carries the host's tensors too.

    Args:
        what: is kept in the host's memory, and by which setting.

    Raises:
        ShardingError: it carries those of a GPU alone.
    """
    if device_type != "cpu" and backend_of(name, "cpu") == "nccl":
        raise ShardingError(
            f"{what} in the host's memory, where clip_grad_norm_, full_tensor() and checkpoints "
            f"communicate, and the process group {name} carries tensors of {device_type} alone "
            '(nccl). Initialise it with init_process_group("cpu:gloo,cuda:nccl").'
        )
