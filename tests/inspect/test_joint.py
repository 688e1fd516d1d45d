"""The joint graph before any pass, for somebody who runs passes by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxzero.compiler.compilation import observers
from fxzero.compiler.run import run_passes
from fxzero.errors import CaptureError
from fxzero.graph import Role
from fxzero.graph.stamps import has_stamp
from fxzero.inspect import joint_graph
from fxzero.passes import Context, Recompute, ShardParams, StampNodes
from tests.tracing import chain


def test_no_pass_has_seen_it() -> None:
    """No stamp and no collective; of both phases."""
    graph = joint_graph(chain(2), zero=3, world_size=8)
    assert not any(has_stamp(node) for node in graph.nodes())
    targets = [node.target for node in graph.nodes()]
    assert targets.count(torch.ops.fxzero.unshard.default) == 2
    assert targets.count(torch.ops.fxzero.reshard_grad.default) == 2


def test_passes_can_be_run_on_it() -> None:
    """When its ranks are gone: forward gathers both, and backward too."""
    graph = joint_graph(chain(2), zero=3, world_size=8)
    run_passes([StampNodes(), Recompute(), ShardParams()], graph, Context())
    assert len(list(graph.nodes(role=Role.LAUNCH))) == 4


class Breaks(nn.Module):
    """Reads a value where Dynamo cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → (B, 4)."""
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_step_of_several_graphs_is_refused() -> None:
    """With what to do; nobody goes on listening."""
    before = list(observers)
    with pytest.raises(CaptureError, match="2 graphs, of which none is the whole"):
        joint_graph(lambda: (Breaks(), (torch.randn(2, 4),)), zero=3, world_size=2)
    assert observers == before
