"""What keeping a forward's values takes, what they hold once repeated, when they are read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxzero.cost.analytic import AnalyticCosts
from fxzero.cost.cluster import load_cluster
from fxzero.graph import Phase
from fxzero.schedule.candidates import Read
from fxzero.schedule.forward_values import ForwardValues, forward_values
from fxzero.schedule.repetition import Value
from tests.tracing import of, scheduled

COSTS = AnalyticCosts(load_cluster("laptop"))
ROWS, WIDTH = 64, 32
NUM_BYTES = ROWS * WIDTH * 4


class Mixed(nn.Module):
    """A product reads gelu's result, and so does its gradient; all that reads exp's is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, W) to a scalar."""
        return torch.exp(self.down(F.gelu(self.up(x)))).sum()


def found(*, fuses: bool) -> ForwardValues:
    """Its values."""
    graph = scheduled(of(Mixed, ROWS, WIDTH), "stamp", zero=0, world_size=1)
    values = forward_values(graph, COSTS, fuses=fuses)
    places = {node: i for i, node in enumerate(graph.nodes(phase=Phase.BACKWARD))}
    for node, read in zip(values.nodes, values.reads, strict=True):
        of_node = [places[user] for user in node.users if user in places]
        assert read == (Read(min(of_node), max(of_node)) if of_node else Read())
    return values


def named(values: ForwardValues, name: str) -> Value:
    """One of them."""
    (value,) = (v for v in values.values if v.name == name)
    return value


def test_what_is_fused_is_written_only_to_be_kept() -> None:
    """gelu's result is written for the product anyway, and read again; exp's is written and read
    for backward alone. Once repeated, the product's gradient still reads it from memory."""
    values = found(fuses=True)
    once_us = COSTS.stream_us(NUM_BYTES)
    device = load_cluster("laptop").device
    assert once_us == NUM_BYTES / (device.memory_bytes_per_s * device.memory_efficiency) * 1e6
    assert named(values, "gelu").keep_us == once_us
    assert named(values, "exp").keep_us == 2 * once_us
    assert named(values, "mm").keep_us == 0.0  # nothing computes it where it is read
    assert [named(values, n).repeat_bytes for n in ("gelu", "exp", "mm")] == [
        NUM_BYTES,
        0,
        NUM_BYTES,
    ]


def test_nothing_is_fused_by_torchs_own_kernels() -> None:
    """All is written, and keeping takes nothing more."""
    values = found(fuses=False)
    assert not any(value.keep_us for value in values.values)
    assert named(values, "exp").repeat_bytes == NUM_BYTES
