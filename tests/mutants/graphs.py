"""Step graphs that hold every rule of `verify`, and break one under a fault. Fake ranks only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fxzero.compiler.run import run_passes
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import Bucket, Context, Fact, LowerTransfers, Prefetch, ReleaseSaved
from tests import tracing
from tests.stepping import EAGER, chain_of, step_graph
from tests.tracing import scheduled, sides

KEEP_ALL = 1 << 30
SLOW_LINK = {"cost": {"cluster": "pair_1gbit"}}
ON_HOST = {**EAGER, "memory": "states_host"}
ON_DISK = {**EAGER, "memory": "infinity"}
_SIDE = {Fact.STAMPED, Fact.GATHERED, Fact.CUT}


class Layers(nn.Module):
    """Layers whose parameters, four in a bucket, are of one shape; with dropout."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.others = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) to a scalar."""
        for first, second in zip(self.layers, self.others, strict=True):
            x = nn.functional.dropout(second(first(x)).relu(), 0.5)
        return x.square().sum()


class Crossing(nn.Module):
    """What one layer makes is read by others in backward, long after they looked at it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(width, width) to a scalar."""
        view = self.first(x).t()
        return (self.third(self.second(view)) * self.fourth(view)).square().sum()


class ReadsAhead(nn.Module):
    """The first layer's backward reads the second's parameter, whose gradient is there by then."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) to a scalar."""
        hidden = self.first(x) @ self.second.weight.detach()
        return self.second(hidden.tanh()).square().sum()


def reads_ahead() -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and a batch."""
    return ReadsAhead(), (torch.randn(4, 8),)


def layers() -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and an input that wants a gradient."""
    return Layers(), (torch.randn(8, 16, requires_grad=True),)


def layers_in_a_step() -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and a batch."""
    return Layers(), (torch.randn(8, 16),)


def _loop(**setup: Any) -> None:
    scheduled(layers, "prefetch", Bucket(), **setup)


def _step(**settings: Any) -> None:
    step_graph(layers_in_a_step, **{"options": {**EAGER, "bucket": {}}, **settings})


class ReadsTwice(nn.Module):
    """A weight that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) to a scalar."""
        return self.layer(self.layer(x).relu()).square().mean()


def reads_twice() -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and its batch."""
    return ReadsTwice(), (torch.randn(4, 16),)


def _kept() -> None:
    options = {**EAGER, **SLOW_LINK, "prefetch": {"budget_bytes": KEEP_ALL}}
    step_graph(chain_of(5, 16), options=options)


def _ahead() -> None:
    with mock.patch("fxzero.passes.lower_transfers.backend_of", return_value="gloo"):
        step_graph(chain_of(4), options={**EAGER, **SLOW_LINK})


def _released() -> None:
    side = sides(tracing.of(Crossing, 64, 64)).backward
    run_passes([ReleaseSaved()], side, Context(), given=_SIDE)


def _on_host(**setup: Any) -> None:
    scheduled(layers, "join_copies", Bucket(), offload=True, **setup)


def _lowered() -> None:
    graph = scheduled(layers, "prefetch", Bucket(), Prefetch(distance=1), zero=3)
    gloo = mock.patch("fxzero.passes.lower_transfers.backend_of", return_value="gloo")
    with fake_ranks(8), gloo:
        run_passes([LowerTransfers()], graph, Context(), given=_SIDE)


GRAPHS: dict[str, Callable[[], None]] = {
    "stage 0": functools.partial(_loop, zero=0),
    "stage 3": functools.partial(_loop, zero=3),
    "stage 3 on two axes": functools.partial(_loop, zero=3, mesh_shape=(2, 4)),
    "stage 0, shards on the host": functools.partial(_on_host, zero=0),
    "stage 3, shards on the host": functools.partial(_on_host, zero=3),
    "stage 3, lowered": _lowered,
    "stage 3, backward alone": _released,
    "step": functools.partial(_step, zero=3),
    "step of one process": functools.partial(step_graph, reads_ahead, zero=0, world_size=1),
    "step of 4 micro-batches, stage 1": functools.partial(_step, zero=1, micro_batches=4),
    "step of 4 micro-batches, stage 3": functools.partial(_step, zero=3, micro_batches=4),
    "step with state on the host": functools.partial(
        _step, zero=3, options={**ON_HOST, "bucket": {}}
    ),
    "step with state on the host, a bucket a layer": functools.partial(
        _step, zero=3, options=ON_HOST
    ),
    "step with state on the host, in 16 bits": functools.partial(
        _step, zero=3, options=ON_HOST, precision="bf16"
    ),
    "step with state on the host, of one process": functools.partial(
        step_graph, reads_ahead, zero=0, world_size=1, options=ON_HOST
    ),
    "step whose state streams": functools.partial(
        step_graph,
        chain_of(4),
        zero=0,
        world_size=1,
        options={**EAGER, "offload_states": {"share": 1.0, "update": "device"}},
    ),
    "step whose updates are late": functools.partial(
        step_graph,
        chain_of(3),
        zero=0,
        world_size=1,
        options={**ON_HOST, "offload_states": {"delay": 1}},
    ),
    "step with state on disk": functools.partial(_step, zero=3, options={**ON_DISK, "bucket": {}}),
    "step with state on disk, a bucket a layer": functools.partial(
        step_graph, chain_of(6, 16), zero=0, world_size=1, options=ON_DISK
    ),
    "step of weights in blocks": functools.partial(
        step_graph,
        reads_twice,
        micro_batches=2,
        options={**EAGER, "tile_linear": {"max_bytes": 256}},
    ),
    "step that keeps parameters": _kept,
    "step with gathers ahead": _ahead,
}
"""Each compiles a graph with everything verified on the way."""
