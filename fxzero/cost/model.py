"""The protocol that all cost models follow, and the one with fixed figures for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from fxzero.graph.pieces import spelled_out
from fxzero.transfer import Transfer


@dataclass(frozen=True)
class TransferCost:
    """What one transfer takes."""

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

    def operator_us(self, node: fx.Node) -> float:
        """Microseconds of one operator by itself: never measured, as there are thousands."""
        ...

    def stream_us(self, num_bytes: int) -> float:
        """Microseconds in which so many bytes are read from the device's memory, or written."""
        ...

    def update_us(self, update: fx.Node) -> float:
        """Microseconds of an update that runs on the host."""
        ...

    def transfer(self, transfer: Transfer) -> TransferCost:
        """What a transfer takes."""
        ...


@dataclass(frozen=True)
class FixedCosts:
    """Costs that somebody made up: for tests, and for what-if questions."""

    compute: Callable[[Sequence[fx.Node]], float] | float = 1.0
    """Microseconds of a run, or a function of its operators."""
    wire_us_per_byte: float = 0.0
    latency_us: float = 1.0
    host_us: float = 0.0
    name: str = "fixed"

    def compute_us(self, nodes: Sequence[fx.Node]) -> float:
        """See `CostModel`."""
        if isinstance(self.compute, (int, float)):
            return self.compute
        return self.compute(spelled_out(nodes))

    def operator_us(self, node: fx.Node) -> float:
        """See `CostModel`."""
        return self.compute_us([node])

    def stream_us(self, num_bytes: int) -> float:
        """See `CostModel`: a run's time is its bytes' too."""
        return 0.0

    def update_us(self, update: fx.Node) -> float:
        """See `CostModel`."""
        return self.compute_us([update])

    def transfer(self, transfer: Transfer) -> TransferCost:
        """See `CostModel`."""
        wire_us = self.latency_us + transfer.full_bytes * self.wire_us_per_byte
        return TransferCost(wire_us, self.host_us)
