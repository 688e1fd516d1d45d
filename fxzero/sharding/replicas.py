"""Replicas must start equal: a cheap check for models that nobody sharded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
import torch.distributed as dist

from fxzero._compat import default_store
from fxzero.errors import ShardingError

_models = itertools.count()
"""Models are met in the same order on all ranks; equal names in two of them may differ."""


def fingerprint(parameter: torch.Tensor) -> str:
    """A few digits that differ when initial values differ: sum, sum of squares, ends."""
    flat = parameter.detach().reshape(-1).double()
    if flat.numel() == 0:
        return "empty"
    numbers = (flat.sum(), flat.square().sum(), flat[0], flat[-1])
    return " ".join(f"{float(n):.17g}" for n in numbers)


def check_equal(parameters: Mapping[str, torch.Tensor]) -> None:
    """Compare each parameter with the first rank that asked. Nothing is waited for.

    Raises:
        ShardingError: a rank's values differ: the replicas would drift apart silently.
    """
    store = default_store()
    if store is None or not parameters:
        return
    model = next(_models)
    rank = dist.get_rank()
    for name, parameter in parameters.items():
        if type(parameter.data) is not torch.Tensor:
            continue  # fake tensors have no values
        mine = f"{fingerprint(parameter)} rank {rank}"
        first = store.compare_set(f"fxzero/replicas/{model}/{name}", "", mine).decode()
        if first.rpartition(" rank ")[0] != mine.rpartition(" rank ")[0]:
            raise ShardingError(
                f"parameter {name} differs between rank {rank} and rank "
                f"{first.rpartition(' ')[2]} before the first step. Seed all ranks alike, load one "
                "checkpoint on all, or call fxzero.shard(model, zero=0), which takes rank 0's "
                "values."
            )
