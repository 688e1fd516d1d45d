"""A shard's state belongs to its rank.

    torch.save(model.state_dict(), "rank0.pt")     on rank 0: its rows alone
    torch.load("rank0.pt")                         on rank 1: refused, with the right call

Parameters of a sharded model are DTensors, and so are an optimizer's moments: what torch.save
writes of one is the local rows, and nothing says whose. Here a shard is pickled with its place on
the mesh, and unpickled at that place only; that holds for state dicts of models and optimizers
alike, and for objects that are sent to another rank. Tensors on meshes that `fxzero.shard` has
not seen are pickled as torch does it.

Full tensors may be loaded into a sharded model: each rank takes its own rows of them.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fxzero._compat import dtensor_like, local_tensor, plain_reduce, rebuild_function
from fxzero.errors import ShardingError

_CALLS = 6
"""How far up whoever asks for a tensor's memory is looked for."""
_ACCELERATE_SAVES = ("save_accelerator_state", "save_custom_state")
"""Functions of accelerate that write one rank's state for all."""
_meshes: set[DeviceMesh] = set()
"""Meshes over which models were sharded."""


def guard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let a model's shards, and those of its optimizer, be loaded by their own ranks only.

    `fxzero.shard` calls it at stages 1 to 3.
    """
    _meshes.add(mesh)
    copyreg.pickle(DTensor, _reduce)
    model.register_load_state_dict_pre_hook(take_rows)


def _reduce(tensor: DTensor) -> tuple[Any, ...]:
    """How a DTensor is pickled."""
    plain = plain_reduce(tensor)
    mesh = tensor.device_mesh
    if mesh not in _meshes or not any(isinstance(p, Shard) for p in tensor.placements):
        return plain
    _refuse_accelerate(sys._getframe(1))
    place = tuple(mesh.get_coordinate() or ())
    function, arguments = plain
    return rebuild_shard, (place, tuple(mesh.mesh.shape), function, arguments)


def rebuild_shard(
    place: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    function: Callable[..., Tensor],
    arguments: tuple[Any, ...],
) -> Tensor:
    """Unpickle a shard at its own place.

    Args:
        place: of the rank that saved it, on its mesh.
        mesh_shape: of that mesh.
        function: torch's own way to rebuild a tensor subclass.
        arguments: what that takes.

    Raises:
        ShardingError: this process is another rank, or the world has another size. A process
            without a process group may look at every file.
    """
    assert function is rebuild_function()
    if dist.is_initialized():
        _check_place(tuple(place), tuple(mesh_shape))
    return function(*arguments)


def _check_place(place: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    """Refuse a shard of another rank."""
    mine = {tuple(m.mesh.shape): tuple(m.get_coordinate() or ()) for m in _meshes}
    if mine.get(mesh_shape, place) == place and (not mine or mesh_shape in mine):
        return
    here = ", ".join(f"{p} of a mesh of {shape}" for shape, p in mine.items())
    raise ShardingError(
        f"this state is a shard: it holds the rows of the rank at {place} of a mesh of "
        f"{mesh_shape}, and rank {dist.get_rank()} is at {here}. Loaded here it would replace this "
        "rank's rows by another's. Save with torch.distributed.checkpoint (dcp.save on all ranks), "
        "or the full state with get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True)), and get_optimizer_state_dict alike; or "
        "let every rank save and load a file of its own."
    )


def _refuse_accelerate(frame: FrameType | None) -> None:
    """See that accelerate does not write the shards of its main process as if they were all.

    Raises:
        ShardingError: its own save_state does, with the class whose save_state is right.
    """
    depth = 0
    while frame is not None and depth < 2 * _CALLS:
        if frame.f_code.co_name in _ACCELERATE_SAVES and _is_in(frame, "accelerate"):
            raise ShardingError(
                "accelerate's save_state writes what the main process has, and of a sharded model "
                "and its optimizer that is one rank's part. Make the Accelerator by "
                "fxzero.integrations.accelerate.FxZeroAccelerator, whose save_state has every "
                "rank's, or call fxzero.checkpoint.save(fxzero.TrainState(model, optimizer), …)."
            )
        frame, depth = frame.f_back, depth + 1


def _is_in(frame: FrameType, package: str) -> bool:
    """Whether a frame runs code of a package."""
    return package in frame.f_code.co_filename.replace("\\", "/").split("/")


def refuse_bytes(func: Callable[..., Any], value: Any) -> None:
    """See that nobody writes the bytes of a shard to a file that does not say whose they are.

    Safetensors asks for a tensor's memory, and ends as "invalid python storage".

    Raises:
        ShardingError: it asks for that of a shard, with the calls that are right.
    """
    if func not in (Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr):
        return
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None and depth < _CALLS:
        if _is_in(frame, "safetensors"):
            raise ShardingError(
                f"safetensors asks for the memory of a tensor of shape {list(value.shape)}, of "
                "which this rank has a part: a file of it would not say which. Write the whole "
                "weights by fxzero.checkpoint.save on all ranks and `fxzero export`, or save what "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
                "returns on rank 0."
            )
        frame, depth = frame.f_back, depth + 1


def take_rows(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any, **__: Any
) -> None:
    """Cut this rank's rows out of full tensors that are about to be loaded."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
            continue
        if isinstance(value, DTensor) or value.shape != parameter.shape:
            continue  # torch compares the layouts, or says that the shapes differ
        state_dict[prefix + name] = dtensor_like(rows_here(value, parameter), parameter)


def rows_here(full: Tensor, parameter: DTensor) -> Tensor:
    """The part of a full tensor that this rank has of a parameter."""
    local = local_tensor(parameter)
    if parameter.device_mesh.get_coordinate() is None:  # of another stage of a pipeline
        return torch.empty_like(local)
    part = full.detach()
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            size = parameter.device_mesh.size(axis)
            chunk = -(-part.shape[placement.dim] // size)
            place = parameter.device_mesh.get_local_rank(axis)
            start = min(place * chunk, part.shape[placement.dim])
            length = min(chunk, part.shape[placement.dim] - start)
            part = part.narrow(placement.dim, start, length)
    assert part.shape == local.shape, (part.shape, local.shape)
    return part.to(local.device).clone()


torch.serialization.add_safe_globals([rebuild_shard])  # torch.load with weights_only, its default
