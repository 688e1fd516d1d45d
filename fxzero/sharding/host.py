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
        if mesh.device_type != "cpu" and backend_of(name, "cpu") == "nccl":
            raise ShardingError(
                f"offload=True keeps shards and gradients in the host's memory, where "
                "clip_grad_norm_, full_tensor() and checkpoints communicate, and the process group "
                f"{name} carries tensors of {mesh.device_type} alone (nccl). Initialise it with "
                'init_process_group("cpu:gloo,cuda:nccl").'
            )
