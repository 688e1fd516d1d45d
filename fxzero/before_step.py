"""What is looked at before an optimizer updates anything.

a parameter beside sharded ones that `shard` has not seen    refused: nobody reduces its gradient
replicas that are not replicas any more                      found before steps 1, 10, 100, …

A new head, an adapter or a criterion with parameters of its own trains alone on every rank; so
does a replica that was initialised anew where ranks are seeded differently. Neither shows in a
gradient, so the optimizer is asked: it holds everything that is trained.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fxzero._compat import call_before_steps, is_fake, local_tensor
from fxzero.errors import ShardingError
from fxzero.params import ParamSpec, is_known, spec_of_parameter
from fxzero.runtime.agree import agree_eagerly, channel_of

_OFTEN = 1000
"""Replicas are compared before steps 1, 10, 100 and from then on each so many."""
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
    """Look at an optimizer that is about to step. A collective before steps 1, 10, 100, ….

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
        _compare_replicas(optimizer, seen.num_steps)


def _is_due(step: int) -> bool:
    return step in (1, 10, 100) or step % _OFTEN == 0


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


def _compare_replicas(optimizer: Optimizer, step: int) -> None:
    """See that what every rank of a group should hold alike is alike. A collective."""
    by_group: dict[str, list[tuple[ParamSpec, Tensor]]] = {}
    for parameter in _parameters(optimizer):
        spec = spec_of_parameter(parameter)
        if spec is None or is_fake(parameter) or not parameter.is_floating_point():
            continue
        for group in spec.replica_groups:
            by_group.setdefault(group.name, []).append((spec, parameter))
    for name, replicas in by_group.items():
        channel = channel_of(name)
        if channel is not None:
            agree_eagerly(name, "compare replicas")
            found = _gather([_digest(p) for _, p in replicas], channel)
            _refuse_differences({s.name: p for s, p in replicas}, found, channel, step, optimizer)


def _digest(parameter: Tensor) -> Tensor:
    """The sum of this rank's elements, and their norm."""
    values = parameter.detach()
    if isinstance(values, DTensor):
        values = local_tensor(values)
    norm = torch.linalg.vector_norm(values) if values.numel() else values.sum()
    return torch.stack([values.sum(dtype=torch.float64), norm.double()])


def _gather(digests: Sequence[Tensor], channel: Any) -> list[Tensor]:
    """Every rank's digests, (parameters, 2) each."""
    mine = torch.stack(list(digests)).cpu()
    found = [torch.empty_like(mine) for _ in range(channel.size())]
    dist.all_gather(found, mine, group=channel)
    return found


def _refuse_differences(
    replicas: Mapping[str, Tensor],
    found: Sequence[Tensor],
    channel: Any,
    step: int,
    optimizer: Optimizer,
) -> None:
    first = found[0]
    for rank, theirs in enumerate(found):
        for index, (name, parameter) in enumerate(replicas.items()):
            allowed = torch.finfo(parameter.dtype).eps * _ROUNDINGS * math.sqrt(step)
            difference = float((theirs[index, 0] - first[index, 0]).abs())
            # Not finite: that is another story, told elsewhere.
            if difference > min(allowed, 0.1) * float(max(theirs[index, 1], first[index, 1])):
                ranks = [dist.get_global_rank(channel, r) for r in (0, rank)]
                raise ShardingError(
                    f"{name} differs between ranks {ranks[0]} and {ranks[1]} before step {step} of "
                    f"{type(optimizer).__name__}: they should be replicas, and would train apart. "
                    "Was it written on one rank alone, or with random numbers (nn.init, noise) "
                    "where ranks are seeded differently? Initialise before fxzero.shard, which "
                    "takes rank 0's values, or broadcast what was written."
                )
