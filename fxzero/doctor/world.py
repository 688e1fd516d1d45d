"""The ranks that the doctor was started on: one, or as many as torchrun says.

Nothing is started here: under torchrun this process joins the others, and leaves them at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxzero.doctor.verdicts import Checked, Verdict, fail, ok, reason
from fxzero.errors import ConfigError
from fxzero.ranks.groups import init_distributed, leave

ALONE_LIMIT_S = 20.0
"""For a group of one rank to be there, and to sum."""
_COUNTS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""Torchrun's variables that are numbers, and the least of each."""


@dataclass(frozen=True)
class World:
    """Who takes part, as torchrun's variables have it."""

    rank: int = 0
    size: int = 1
    per_node: int = 1
    """Ranks of each host."""

    @property
    def num_nodes(self) -> int:
        """Hosts, taking each launcher's for one."""
        return self.size // self.per_node

    @staticmethod
    def of_environment() -> World:
        """What torchrun says; one rank without it.

        Raises:
            ConfigError: it says what cannot be.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return World()
        found = {}
        for name, least in _COUNTS.items():
            text = os.environ.get(name)
            if text is None or not text.isdecimal() or int(text) < least:
                raise ConfigError(
                    f"{name}={text!r}: torchrun sets it to a number from {least} on. Start with "
                    "torchrun --nproc-per-node 2 -m fxzero doctor, or unset RANK and WORLD_SIZE to "
                    "look at this rank alone."
                )
            found[name] = int(text)
        rank, size, per_node = found["RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]
        if rank >= size:
            raise ConfigError(f"rank {rank} is not in a world of {size} ranks (RANK, WORLD_SIZE)")
        if size % per_node:
            raise ConfigError(
                f"{size} ranks are not a whole number of hosts of {per_node} ranks (WORLD_SIZE, "
                "LOCAL_WORLD_SIZE): a cluster is one of equal nodes"
            )
        return World(rank, size, per_node)

    def meet(self) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            dist.barrier()

    def first_of_all(self, value: Any) -> Any:
        """What rank 0 has, on every rank."""
        held = [value]
        if self.size > 1:
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def all_of(self, value: Any) -> list[Any]:
        """What each rank has, by rank."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found


@contextlib.contextmanager
def joined(world: World, device: torch.device) -> Iterator[None]:
    """Be one of the ranks of torchrun's, over NCCL on GPUs and gloo elsewhere.

    Raises:
        RuntimeError: they do not come together.
    """
    mine = world.size > 1 and not dist.is_initialized()
    if mine:
        init_distributed(device.type)
    try:
        yield
    finally:
        if mine:
            leave()


def check_sum(world: World, device: torch.device) -> Checked:
    """Whether the ranks that there are can sum a number: of one rank, a group of one."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        total = _sum(device) if world.size > 1 else _sum_alone(backend, device)
    except Exception as error:
        return fail(backend, f"an all-reduce raised {reason(error)}", _ADVICE[backend])
    if total != world.size:
        found = f"an all-reduce of {world.size} ranks gave {total:g}"
        return fail(backend, found, _ADVICE[backend])
    ranks = "one rank" if world.size == 1 else f"{world.size} ranks"
    return ok(backend, f"an all-reduce of {ranks} works")


_ADVICE = {
    "gloo": "Gloo speaks TCP by the address of the host's own name: name an interface that is up, "
    "GLOO_SOCKET_IFNAME=lo on a machine by itself.",
    "nccl": "NCCL_DEBUG=INFO says more; name an interface by NCCL_SOCKET_IFNAME, and see that all "
    "ranks have the same driver and torch.",
}


def _sum(device: torch.device) -> float:
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    return float(one)


def _sum_alone(backend: str, device: torch.device) -> float:
    if dist.is_initialized():
        return 1.0
    store = dist.HashStore()  # type: ignore[attr-defined]
    limit = timedelta(seconds=ALONE_LIMIT_S)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    try:
        return _sum(device)
    finally:
        leave()


def check_backends() -> Iterator[Checked]:
    """What torch was built with."""
    if not dist.is_available() or not dist.is_gloo_available():
        yield fail("gloo", "torch was built without it", "Install torch from PyPI.")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield fail("nccl", "torch was built without it", "Install torch for CUDA.")
    if torch.cuda.is_available() and dist.is_nccl_available():
        version: Any = torch.cuda.nccl.version()
        yield ok("nccl version", ".".join(map(str, version)))


def told_by_all(world: World, own: Sequence[Checked]) -> list[Checked]:
    """Rank 0's checks, and what went wrong on other ranks alone."""
    first, *others = world.all_of(list(own))
    found = list(first)
    for rank, checks in enumerate(others, 1):
        known = {(c.name, c.verdict) for c in found}
        found += [
            Checked(f"{c.name} (rank {rank})", c.verdict, c.found, c.advice)
            for c in checks
            if c.verdict is not Verdict.OK and (c.name, c.verdict) not in known
        ]
    return found
