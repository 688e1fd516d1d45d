"""Which gathers are left to the step before, and where it starts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import step_passes
from fxzero.graph import Role, StepGraph
from fxzero.graph.stamps import stamp_of
from tests import stepping
from tests.stepping import EAGER, chain_of


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that exist only in name are lowered as gloo's would be."""
    monkeypatch.setattr("fxzero.passes.lower_transfers.backend_of", lambda *_: "gloo")


def test_a_host_that_moves_the_bytes_itself_starts_nothing() -> None:
    """Two ranks on one machine: there is nothing to hide, and memory to save."""
    options = {**EAGER, "cost": {"cluster": "laptop"}}
    graph = step_graph(chain_of(4, 1024), options=options, world_size=2)
    assert names(graph, Role.AHEAD) == []


SLOW_LINK = {**EAGER, "cost": {"cluster": "pair_1gbit"}}


def step_graph(build: Any, **settings: Any) -> StepGraph:
    """A scheduled step over a link that is worth hiding."""
    return stepping.step_graph(build, **{"options": SLOW_LINK, **settings})


def names(graph: StepGraph, role: Role) -> list[str]:
    """Layers of the nodes of a role, in launch order."""
    return [stamp_of(node).layer for node in graph.nodes(role=role)]


def test_the_first_gathers_start_behind_their_updates() -> None:
    """Each after the last change of its parameters, and never twice."""
    graph = step_graph(chain_of(4), clip_grad_norm=1.0)
    order = list(graph.nodes())
    ahead = names(graph, Role.AHEAD)
    assert ahead == ["layers.0", "layers.1"]  # distance 1: two before the first compute
    for node in graph.nodes(role=Role.AHEAD):
        (update,) = (
            n
            for n in graph.nodes(role=Role.UPDATE)
            if stamp_of(node).params[0] in stamp_of(n).params
        )
        assert order.index(update) + 1 == order.index(node)


def test_under_clipping_their_updates_go_first() -> None:
    """So that the gathers run while the other layers are updated."""
    graph = step_graph(chain_of(4), clip_grad_norm=1.0)
    assert names(graph, Role.UPDATE)[:2] == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    "settings",
    [{"options": {**SLOW_LINK, "gather_ahead": {"enabled": False}}}, {"zero": 0}],
)
def test_nothing_to_start(settings: dict[str, Any]) -> None:
    """Switched off, or nothing is gathered."""
    assert names(step_graph(chain_of(3), **settings), Role.AHEAD) == []


def test_frozen_parameters_are_gathered_by_their_own_step() -> None:
    """They never change: nothing in the step says when they are ready."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
            self.layers[0].weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    graph = step_graph(lambda: (Frozen(), (torch.randn(4, 8),)))
    assert names(graph, Role.AHEAD) == ["layers.1"]


def test_cuda_graphs_leave_nothing_in_flight() -> None:
    """A replay uses the same memory again."""
    passes = step_passes(Config(cuda_graph=True)).lowering
    (found,) = (p for p in passes if p.name == "gather_ahead")
    assert found.enabled is False  # type: ignore[attr-defined]
