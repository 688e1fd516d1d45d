"""The one line by which somebody sees that fxzero is at work under a tool that he knows.

fxzero: ZeRO-3 over 2 ranks, 842,496 parameters, of which 421,248 here; compiled by torch.compile
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxzero.errors import ShardingError
from fxzero.sharding.shard import model_state


def at_work(model: nn.Module, how: str) -> str:
    """What became of a model.

    Args:
        how: how its steps run: ``compiled by torch.compile``.

    Raises:
        ShardingError: nothing did: `fxzero.shard` has not seen it.
    """
    state = model_state(model)
    if state is None:
        raise ShardingError("this model was never sharded: call fxzero.shard(model, zero=…) first")
    parameters = list(model.parameters())
    here = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return (
        f"fxzero: ZeRO-{state.zero} over {ranks} rank{'s' * (ranks > 1)}, "
        f"{sum(p.numel() for p in parameters):,} parameters, of which {here:,} here; {how}"
    )
