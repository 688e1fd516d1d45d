"""What `no_sync` keeps of parameters that no synchronised backward has used, reduced nevertheless.

A kept gradient joins the next backward that reduces its parameter's. A head that only an earlier
micro-batch uses has none in its step: `reduce_leftovers` reduces it behind the last micro-batch,
before anybody clips or updates. Ranks may have used different parameters, so they compare what is
left: it is reduced on all of them if it is kept on one, which is what a mean over ranks is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxzero._compat import dtensor_like
from fxzero.ranks.agree import agree_eagerly, channel_of
from fxzero.ranks.lost import explaining
from fxzero.sharding.ops import kept_of, local_of
from fxzero.sharding.params import GradSync, ModelState, ParamSpec
from fxzero.sharding.shard import model_state, param_specs


@explaining
def reduce_leftovers(model: nn.Module) -> None:
    """Reduce into ``.grad`` what `no_sync` still keeps. A collective: all ranks call it alike,
    behind a backward that has reduced gradients. Inside of `no_sync`, or where that was not used
    since the last time, it does nothing; nor does it for a model that nobody sharded.
    """
    state = model_state(model)
    if state is None or not _has_accumulated(state):
        return
    # By key: a parameter that has two names is there once.
    specs = list({spec.key: spec for spec in param_specs(model).values()}.values())
    kept = [spec.key in state.kept and kept_of(spec) is not None for spec in specs]
    for spec, somewhere in zip(specs, _on_any_rank(specs, kept), strict=True):
        if somewhere:
            _reduce(spec)
    state.kept.clear()
    state.synchronised = False
    state.sync = GradSync.REDUCE.value


def _has_accumulated(state: ModelState) -> bool:
    """Whether something may be kept, on any rank: each has been under `no_sync`, and has left."""
    if state.sync == GradSync.ACCUMULATE.value:
        return False
    return state.synchronised or state.sync == GradSync.REDUCE_ACCUMULATED.value


def _on_any_rank(specs: Sequence[ParamSpec], kept: list[bool]) -> list[bool]:
    groups = {g.name: g for s in specs for g in (s.shard_group, *s.replica_groups) if g is not None}
    found = torch.tensor(kept, dtype=torch.int32)
    for name in groups:
        channel = channel_of(name)
        if channel is not None:
            agree_eagerly(name, "compare what fxzero.no_sync has kept")
            dist.all_reduce(found, dist.ReduceOp.MAX, group=channel)
    return [bool(each) for each in found.tolist()]


def _reduce(spec: ParamSpec) -> None:
    parameter = spec.parameter() if spec.parameter is not None else None
    if parameter is None:
        return
    mine = kept_of(spec)
    device = spec.device or local_of(parameter).device
    with torch.no_grad():
        if mine is not None:
            full = mine.grad
        else:
            full = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        part = torch.ops.fxzero.reshard_grad(full, spec.key, GradSync.REDUCE.value)
        if parameter.grad is not None:
            local_of(parameter.grad).add_(part)
        elif isinstance(parameter, DTensor):
            parameter.grad = dtensor_like(part, parameter)
        else:
            parameter.grad = part
