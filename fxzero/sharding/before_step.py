"""What is looked at before an optimizer updates anything.

a parameter beside sharded ones that `shard` has not seen    refused: nobody reduces its gradient
ranks that do not train one model any more                   found before steps 1, 10, 100, 200, …

A new head, an adapter or a criterion with parameters of its own trains alone on every rank; so
does a replica that was initialised anew where ranks are seeded differently, and a shard that was
loaded on rank 0 alone. None of it shows in a gradient, so the optimizer is asked: it holds
everything that is trained. Compared are its settings (a learning rate that follows this rank's
loss), how often each shard was written, and the values of replicas.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fxzero._compat import call_before_steps, is_fake, local_tensor, version_of
from fxzero.errors import ShardingError
from fxzero.ranks.agree import agree_eagerly, channel_of
from fxzero.ranks.lost import explaining
from fxzero.sharding.params import is_known, spec_of_parameter

_OFTEN = 100
"""Ranks are compared before steps 1 and 10, and then before each of so many."""
_ROUNDINGS = 16
"""What replicas may differ by: other machines may round an update otherwise."""


@dataclass
class _Seen:
    """What is known of an optimizer."""

    num_parameters: int = 0
    frozen: list[Tensor] = field(default_factory=list)
    """Parameters that `shard` has not seen, and that may be trained later."""
    num_steps: int = 0


_seen: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()


def watch_optimizers() -> None:
    """Look at every optimizer of this process before each of its steps. `shard` calls it."""
    call_before_steps(before_step)


def before_step(optimizer: Optimizer, *_: Any) -> None:
    """Look at an optimizer that is about to step. A collective before steps 1, 10, 100, 200, ….

    Raises:
        ShardingError: it updates what nobody reduces, or replicas that differ.
    """
    if torch.compiler.is_compiling():
        return
    seen = _seen.setdefault(optimizer, _Seen())
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count != seen.num_parameters or any(p.requires_grad for p in seen.frozen):
        seen.frozen = _strangers(optimizer)
        refuse_strangers(optimizer)
        seen.num_parameters = count
    seen.num_steps += 1
    if _is_due(seen.num_steps):
        _compare(optimizer, seen.num_steps)


def _is_due(step: int) -> bool:
    return step in (1, 10) or step % _OFTEN == 0


def refuse_strangers(optimizer: Optimizer) -> None:
    """See that every parameter that an optimizer trains is reduced by somebody.

    Raises:
        ShardingError: beside parameters of a sharded model there is one that nobody reduces.
    """
    strangers = [p for p in _strangers(optimizer) if p.requires_grad]
    if not strangers or not any(_communicates(p) for p in _parameters(optimizer)):
        return
    reduced = {id(p) for ddp in _ddp_modules() for p in ddp.parameters()}
    left = [p for p in strangers if id(p) not in reduced]
    if left:
        shapes = ", ".join(str(tuple(p.shape)) for p in left[:3])
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ShardingError(
            f"{type(optimizer).__name__} updates {len(left)} parameters (of shape {shapes}{more}) "
            "that fxzero.shard has not seen, beside those of a sharded model: nobody reduces their "
            "gradients, and each rank would train them alone. Were they added after shard, do they "
            "belong to a module around the sharded one, or to the criterion? Shard the outermost "
            "module when it is complete; give a module of its own fxzero.shard(module, zero=0); "
            "name in ignored= what you reduce yourself."
        )


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _strangers(optimizer: Optimizer) -> list[Tensor]:
    """Parameters that neither `shard` nor a compiled graph has taken note of."""
    return [
        p
        for p in _parameters(optimizer)
        if not is_known(p) and spec_of_parameter(p) is None and not isinstance(p, DTensor)
    ]


def _communicates(parameter: Tensor) -> bool:
    spec = spec_of_parameter(parameter)
    return spec is not None and bool(spec.shard_group or spec.replica_groups)


def _ddp_modules() -> list[DistributedDataParallel]:
    return [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]


@explaining
def _compare(optimizer: Optimizer, step: int) -> None:
    """See that all ranks of each group train the same model in the same way. A collective."""
    trained = [(s, p) for p in _parameters(optimizer) if (s := spec_of_parameter(p)) is not None]
    trained = [(spec, p) for spec, p in trained if not is_fake(p)]
    shared = {g.name: g for s, _ in trained for g in (s.shard_group, *s.replica_groups) if g}
    for name in shared:
        channel = channel_of(name)
        if channel is None:
            continue
        where = f"before step {step} of {type(optimizer).__name__}"
        settings = _settings(optimizer)
        sizes = f"{len(settings)} settings, {len(trained)} parameters"
        agree_eagerly(name, f"compare what {type(optimizer).__name__} updates ({sizes})")
        _refuse_settings(_gather(list(settings.values()), channel), list(settings), channel, where)
        # Replicas are compared by value: one rank may swap an average in, evaluate, and swap back.
        shards = [(spec.name, p) for spec, p in trained if spec.shard_group is not None]
        writes = [float(version_of(p)) for _, p in shards]
        _refuse_writes(_gather(writes, channel), [name for name, _ in shards], channel, where)
        replicas = [
            (spec.name, p)
            for spec, p in trained
            if p.is_floating_point() and any(g.name == name for g in spec.replica_groups)
        ]
        if replicas:
            digests = [number for _, p in replicas for number in _digest(p)]
            _refuse_differences(_gather(digests, channel), replicas, channel, step, where)


def _settings(optimizer: Optimizer) -> dict[str, float]:
    """The numbers that an optimizer was told, by name and group."""
    return {
        f"{name} of group {index}": float(value)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in sorted(group.items())
        if isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and not value.dim())
    }


def _refuse_settings(
    found: Sequence[Tensor], names: Sequence[str], channel: Any, where: str
) -> None:
    for rank, theirs in enumerate(found):
        different = (theirs != found[0]).nonzero().flatten().tolist()
        for index in different[:1]:
            raise ShardingError(
                f"{names[index]} is {float(found[0][index])} on rank {_member(channel, 0)} and "
                f"{float(theirs[index])} on rank {_member(channel, rank)} {where}: each would "
                "train its part of the model in another way. Decide it from what all ranks share: "
                "all-reduce the loss that a scheduler looks at."
            )


def _refuse_writes(found: Sequence[Tensor], names: Sequence[str], channel: Any, where: str) -> None:
    for rank, theirs in enumerate(found):
        different = (theirs != found[0]).nonzero().flatten().tolist()
        for index in different[:1]:
            raise ShardingError(
                f"{names[index]} was written {int(found[0][index])} times on rank "
                f"{_member(channel, 0)} and {int(theirs[index])} times on rank "
                f"{_member(channel, rank)} {where}: they do not hold one model any more. Load "
                "states, clamp, initialise and step on all ranks, not below `if rank == 0`."
            )


def _member(channel: Any, rank: int) -> int:
    return dist.get_global_rank(channel, rank)


def _digest(parameter: Tensor) -> tuple[float, float]:
    """The sum of this rank's elements, and their norm."""
    values = parameter.detach()
    if isinstance(values, DTensor):
        values = local_tensor(values)
    norm = torch.linalg.vector_norm(values) if values.numel() else values.sum()
    return float(values.sum(dtype=torch.float64)), float(norm)


def _gather(numbers: Sequence[float], channel: Any) -> list[Tensor]:
    """Every rank's numbers."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(channel.size())]
    dist.all_gather(found, mine, group=channel)
    return found


def _refuse_differences(
    found: Sequence[Tensor],
    replicas: Sequence[tuple[str, Tensor]],
    channel: Any,
    step: int,
    where: str,
) -> None:
    digests = [numbers.view(-1, 2) for numbers in found]
    for rank, theirs in enumerate(digests):
        for (name, parameter), mine, other in zip(replicas, digests[0], theirs, strict=True):
            allowed = min(torch.finfo(parameter.dtype).eps * _ROUNDINGS * math.sqrt(step), 0.1)
            # Where something is not finite this is false: that is told elsewhere.
            if float((other[0] - mine[0]).abs()) > allowed * float(max(other[1], mine[1])):
                raise ShardingError(
                    f"{name} differs between ranks {_member(channel, 0)} and "
                    f"{_member(channel, rank)} {where}: they should be replicas, and would train "
                    "apart. Was it written on one rank alone, or with random numbers (nn.init, "
                    "noise) where ranks are seeded differently? Initialise before fxzero.shard, "
                    "which takes rank 0's values, or broadcast what was written."
                )
