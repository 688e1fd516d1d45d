"""How ranks are laid out, who reads which rows, and the whole model of a pipeline's parts.

mesh=pipeline2, four ranks        stage 0: ranks 0, 1      stage 1: ranks 2, 3
                                  rows:    ranks 0 and 2 read the same, 1 and 3 the others
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from examples.failures import SettingsError
from examples.ranks import rank, world_size
from examples.settings import MeshSettings


def make_mesh(mesh: MeshSettings) -> DeviceMesh | None:
    """The mesh that the settings name; None for one axis of all ranks. A collective call."""
    if mesh.pipeline == mesh.replicate == 1:
        return None
    sizes = {"pipeline": mesh.pipeline, "replicate": mesh.replicate}
    axes = {name: size for name, size in sizes.items() if size > 1}
    shard = world_size() // (mesh.pipeline * mesh.replicate)
    if shard > 1 or "replicate" in axes:
        axes["shard"] = shard
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def check_ranks(mesh: MeshSettings, num_ranks: int) -> None:
    """See that the ranks fill the mesh.

    Raises:
        SettingsError: they do not.
    """
    wanted = mesh.pipeline * mesh.replicate
    if num_ranks % wanted:
        raise SettingsError(
            f"mesh.pipeline={mesh.pipeline} and mesh.replicate={mesh.replicate} need a multiple of "
            f"{wanted} ranks, and there are {num_ranks}: torchrun --nproc-per-node {wanted}"
        )


def reader(mesh: MeshSettings, num_ranks: int) -> tuple[int, int]:
    """Which part of a batch's rows this rank reads, and of how many: those of one pipeline read the
    same."""
    parts = num_ranks // mesh.pipeline
    return rank() % parts, parts


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, on rank 0; nothing on others. A collective call.

    Of a pipeline each rank has its stages' alone: whoever has one sends it to rank 0.
    """
    whole = {}
    state = model.state_dict()
    has = [name for name, value in state.items() if not _is_elsewhere(value)]
    owners: list[list[str]] = [has]
    if dist.is_initialized():
        owners = [[] for _ in range(world_size())]
        dist.all_gather_object(owners, has)
    for name, value in state.items():
        source = next(i for i, names in enumerate(owners) if name in names)
        full = None
        if name in has:
            full = value.full_tensor() if isinstance(value, DTensor) else value
        if source and rank() == 0:
            full = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            dist.recv(full, source)
        elif source and rank() == source:
            assert full is not None
            dist.send(full.contiguous(), 0)
        if rank() == 0:
            assert full is not None
            whole[name] = full
    return whole


def _is_elsewhere(value: Tensor) -> bool:
    """Whether a parameter is one of another stage's ranks."""
    return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None
