"""The protocol that all cost models follow, and the one with fixed figures for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import fx

from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import Lane
from fxzero.graph.step_graph import StepGraph, Transfer


class Collective(StrEnum):
    """What a message does."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


@dataclass(frozen=True)
class Message:
    """One collective, as a cost model sees it."""

    kind: Collective
    num_bytes: int
    """Bytes of the full tensors that it assembles or takes apart."""
    size: int
    """How many ranks take part."""
    num_tensors: int = 1


@dataclass(frozen=True)
class TransferCost:
    """What one collective takes."""

    wire_us: float
    """From its start to its end, with the link to itself."""
    host_us: float = 0.0
    """What it takes away from compute on the same device: the overhead o of LogGP
    (Alexandrov et al. 1995), and a processor's time per byte where it moves the bytes itself."""

    @property
    def is_worth_hiding(self) -> bool:
        """Whether compute can go on for most of its time. A host that moves the bytes itself
        wins nothing by an early start."""
        return self.wire_us >= 2 * self.host_us


class CostModel(Protocol):
    """How long things take. Equal on all ranks: decisions are made by it."""

    @property
    def name(self) -> str:
        """Where the figures come from."""
        ...

    def compute_us(self, nodes: Sequence[fx.Node]) -> float:
        """Microseconds of nodes that run one after the other, as one region where they can."""
        ...

    def transfer(self, message: Message) -> TransferCost:
        """What a collective takes."""
        ...


def message_of(graph: StepGraph, transfer: Transfer) -> Message:
    """Describe a transfer, lowered or not."""
    gathers = transfer.stamp.lane is Lane.GATHER
    full = transfer.waits if gathers else transfer.tensors
    if gathers:
        kind = Collective.ALL_GATHER
    elif _scatters(transfer):
        kind = Collective.REDUCE_SCATTER
    else:
        kind = Collective.ALL_REDUCE
    group = group_of(transfer.launch)
    size = graph.group_sizes.get(group, 1)
    return Message(kind, sum(num_bytes(n) for n in full), size, max(len(transfer.waits), 1))


def group_of(launch: fx.Node) -> str:
    """The name of the process group that a launch runs in."""
    ahead = getattr(launch.target, "ahead", None)
    if ahead is not None:
        return str(ahead.group)
    return next((a for a in reversed(launch.args) if isinstance(a, str)), "")


def _scatters(transfer: Transfer) -> bool:
    """Whether a rank keeps less than was reduced."""
    return sum(map(num_bytes, transfer.waits)) < sum(map(num_bytes, transfer.tensors))


@dataclass(frozen=True)
class FixedCosts:
    """Costs that somebody made up: for tests, and for what-if questions."""

    compute: Callable[[Sequence[fx.Node]], float] | float = 1.0
    """Microseconds of a run, or a function of it."""
    wire_us_per_byte: float = 0.0
    latency_us: float = 1.0
    host_us: float = 0.0
    name: str = "fixed"

    def compute_us(self, nodes: Sequence[fx.Node]) -> float:
        """See `CostModel`."""
        return self.compute if isinstance(self.compute, (int, float)) else self.compute(nodes)

    def transfer(self, message: Message) -> TransferCost:
        """See `CostModel`."""
        wire_us = self.latency_us + message.num_bytes * self.wire_us_per_byte
        return TransferCost(wire_us, self.host_us)
