"""The approach of SimpleFSDP (arXiv 2411.00284) on torch's public parts.

Each parameter is a `DTensor` shard, and reading it through a parametrization redistributes
it: an all-gather forward, a reduce-scatter backward, both traced by torch.compile. What was
gathered is recomputed in backward, by selective checkpointing. The compiler, Inductor, may
reorder collectives for overlap.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_GATHERS = {
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.wait_tensor.default,
}


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operator in _GATHERS:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _gather(shard: DTensor) -> Tensor:
    full = shard.redistribute(placements=[Replicate()])
    return full.to_local(grad_placements=[Partial("avg")])


class Gathered(nn.Module):
    """Shard → full parameter."""

    def forward(self, shard: DTensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(_gather, shard, use_reentrant=False, context_fn=contexts)


def shard_parameters(model: nn.Module, device: str) -> nn.Module:
    """Replace all parameters by shards that gather themselves when they are read."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in shards:
                shards[parameter] = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            module.register_parameter(name, shards[parameter])
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return model
