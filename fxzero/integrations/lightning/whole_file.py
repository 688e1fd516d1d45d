"""A checkpoint in one file, as DDP writes and reads it: no shard is in it.

    rank 0   gathers tensor after tensor to its host's memory, and writes
    others   help to gather, and hold one tensor at a time
    reading  every rank maps the file, and copies the rows that it has

The file is the one that Lightning's own strategies write: `load_from_checkpoint` takes it, and so
does any number of ranks, under DDP or here. One key is ours: the generators of each rank, so that
dropout goes on as it would have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import LBFGS, Optimizer

from fxzero._compat import dtensor_like
from fxzero.checkpoint.random_state import RandomState
from fxzero.checkpoint.values import decode, encode
from fxzero.errors import CheckpointError
from fxzero.runtime.delayed import use_gradients
from fxzero.sharding.shard_state import rows_here
from fxzero.sharding.whole_value import replaced

_OURS = "fxzero"
"""The key of what Lightning does not write."""
_LARGE = ("state_dict", "optimizer_states")
"""What is copied from the file where it is loaded, and not before."""


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict without shards: on rank 0 whole, in the host's memory; on the others on meta,
    so that hooks find the names and shapes that they look for. A collective.

    The dict itself is changed, which keeps what modules note on theirs; what is in it is not.
    """
    for name, value in state.items():
        state[name] = replaced(value, DTensor, _gather)
    return state


def refuse_flat(optimizer: Optimizer) -> None:
    """Refuse a state that is not laid out as the parameters are, of which ranks have parts.

    Raises:
        CheckpointError: it is that of LBFGS.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if isinstance(optimizer, LBFGS) and any(isinstance(p, DTensor) for p in parameters):
        raise CheckpointError(
            "LBFGS keeps vectors over all parameters, of which each rank has its own rows: "
            "no checkpoint can be resumed from them. Save weights alone "
            "(ModelCheckpoint(save_weights_only=True)), or train by LBFGS with zero=0."
        )


def _gather(tensor: DTensor) -> Tensor:
    full = tensor.full_tensor().detach()
    return full.cpu() if dist.get_rank() == 0 else full.to("meta")


def add_random_state(checkpoint: dict[str, Any]) -> None:
    """Note the generators of all ranks, in a checkpoint that a run can go on from. A collective."""
    if "optimizer_states" not in checkpoint:
        return
    mine = json.dumps(encode(RandomState().state_dict(), "rng"))
    states: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(states, mine)
    checkpoint[_OURS] = {"rng": states}


def restore_random_state(checkpoint: Mapping[str, Any], world_size: int) -> None:
    """Let this rank's generators go on from a checkpoint, if as many ranks have written it."""
    states = checkpoint.get(_OURS, {}).get("rng", ())
    if len(states) == world_size:
        RandomState().load_state_dict(decode(json.loads(states[dist.get_rank()])))


def read(path: str, checkpoint_io: Any, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint's content, on every rank. Of the model and its optimizers nothing is in memory
    yet, where the file is one that can be mapped."""
    if not Path(path).is_file():
        return dict(checkpoint_io.load_checkpoint(path, weights_only=weights_only))
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError:  # not a zip file: written long ago
        return dict(checkpoint_io.load_checkpoint(path, weights_only=weights_only))
    rest = {key: value for key, value in found.items() if key not in _LARGE}
    # The file may be overwritten while somebody holds a tensor of it.
    return {**found, **replaced(rest, Tensor, Tensor.clone)}


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's whole state: each rank takes the part of it that it updates."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {
        index: {key: _part(key, value, parameters[index]) for key, value in values.items()}
        if index < len(parameters)  # else torch says that the groups differ
        else values
        for index, values in state["state"].items()
    }
    use_gradients(optimizer)
    optimizer.load_state_dict({**state, "state": states})


def _part(key: str, value: Any, parameter: Tensor) -> Any:
    """What this rank has of a parameter's state: laid out as the parameter, or whole."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(parameter, DTensor) or key == "step":
        return value.clone()
    if value.shape == parameter.shape:
        return dtensor_like(rows_here(value, parameter), parameter)
    if not value.dim():
        return value.clone()
    mesh = parameter.device_mesh
    return DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
