"""What a transfer is, as data: written on its launch's stamp by the pass that makes it.

    gather_h_0 = all_gather_into_tensor_coalesced([w, b], 8, "0")

    Transfer(all_gather, 12.6 MB, 8 ranks, group "0", 2 tensors, f32, over "link")

Whoever prices, schedules, lowers, verifies or shows a transfer reads its record, not the
arguments of a call; `verify` sees that the call does what the record says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

LINK = "link"
"""The resource that transfers between ranks share unless a group has a stream of its own."""
PCIE_UP = "pcie_up"
"""The resource of copies to the device."""
PCIE_DOWN = "pcie_down"
"""The resource of copies from the device."""
DISK_READ = "disk_read"
"""The resource of what is read from disk."""
DISK_WRITE = "disk_write"
"""The resource of what is written there."""
SENT = "sent"
"""The resource of what goes to another stage."""
RECEIVED = "received"
"""The resource of what comes from one: links carry both ways at once."""


class TransferKind(StrEnum):
    """What a transfer does."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    """To one other rank, which receives."""
    RECEIVE = "receive"
    COPY = "copy"
    """From one pool of this rank's to another: no other rank takes part."""


def sent_share(kind: TransferKind, num_ranks: int) -> float:
    """What each rank sends to others, in the full tensors that a transfer assembles or takes apart:
    (n − 1)/n of them in a ring of n ranks, twice that of an all-reduce."""
    match kind:
        case TransferKind.COPY | TransferKind.RECEIVE:
            return 0.0
        case TransferKind.SEND:
            return 1.0
    rounds = 2 if kind is TransferKind.ALL_REDUCE else 1
    return rounds * (num_ranks - 1) / num_ranks


class Pool(StrEnum):
    """Where bytes are held."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Form(NamedTuple):
    """How a tensor lies in memory where it is kept, or travels: without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """A tensor's own, without gaps if it has some."""
        dense = torch.empty_like(tensor, device="meta")
        return Form(tuple(tensor.shape), tuple(dense.stride()), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """What it takes: there are no gaps in it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def at(self, memory: Tensor, offset: int) -> Tensor:
        """Such a tensor in some bytes, from one of them on."""
        flat = memory[offset : offset + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Transfer:
    """One transfer, before and after its operators are lowered."""

    kind: TransferKind
    full_bytes: int
    """Bytes of the full tensors that it assembles or takes apart."""
    size: int = 1
    """How many ranks take part."""
    group: str = ""
    """The name of their process group."""
    stride: int = 1
    """How far apart in the world two neighbours of it are: 1 where its ranks follow each other, and
    along an outer axis of a mesh as many as are along the inner ones."""
    num_tensors: int = 1
    dtype: torch.dtype = torch.float32
    op: str = ""
    """How a reduction combines: ``"avg"`` or ``"sum"``."""
    alike: str = ""
    """What every rank that takes part must have computed alike, as a digest: ranks compare it with
    the rest of what they run."""
    axis: str = ""
    """The role of the mesh axis that it runs along; empty for a model's own transfers."""
    resource: str = LINK
    """What it occupies while it runs."""
    source: Pool = Pool.DEVICE
    target: Pool = Pool.DEVICE
    bytes_per_s: float = 0.0
    """What it is held back to, for tests and benchmarks; 0 for as fast as it goes."""

    @property
    def combines(self) -> tuple[object, ...]:
        """Equal for transfers that one collective can carry."""
        return (self.kind, self.group, self.op, self.dtype, self.resource, self.source, self.target)

    def joined(self, *others: Transfer) -> Transfer:
        """One transfer of the tensors of several."""
        every = (self, *others)
        assert len({transfer.combines for transfer in every}) == 1
        return replace(
            self,
            full_bytes=sum(transfer.full_bytes for transfer in every),
            num_tensors=sum(transfer.num_tensors for transfer in every),
        )

    def __str__(self) -> str:
        if self.kind in (TransferKind.SEND, TransferKind.RECEIVE):
            return f"{self.kind} over {self.group}"
        if self.kind is TransferKind.COPY:
            return f"{self.kind} from {self.source} to {self.target}"
        return f"{self.kind} over {self.group} of {self.size}"
