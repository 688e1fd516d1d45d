"""Every micro-batch has its forward and backward, and gradients are added up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxzero.errors import ConfigError
from fxzero.graph import Phase, Role, Segment
from fxzero.graph.stamps import stamp_of
from fxzero.inspect import Analysis
from fxzero.inspect.capture import Capture
from fxzero.passes import Accumulate
from tests.pairwise import pairwise
from tests.stepping import chain_of, compiled_step, step_graph
from tests.tracing import find, of_role

_aten = torch.ops.aten


def test_segments() -> None:
    """Forward and backward of each micro-batch, one after the other."""
    graph = step_graph(chain_of(), micro_batches=2)
    order = [Segment(phase, i) for i in (0, 1) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    assert graph.segments() == order


def test_rows() -> None:
    """Each micro-batch is a view of its own rows of the batch."""
    graph = step_graph(chain_of(rows=6), micro_batches=3)
    rows = [n for n in find(graph, _aten.slice.Tensor) if n.all_input_nodes[0].op == "placeholder"]
    assert [(n.args[2], n.args[3]) for n in rows] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize(
    ("world_size", "micro_batches", "zero"), pairwise((2, 8, 1024), (1, 2, 4), (0, 1, 2, 3))
)
def test_traffic(zero: int, micro_batches: int, world_size: int) -> None:
    """Elements on the wire: 2P, 2P, (k + 1)P, 3kP.

    At stage 3, backward does not gather the first layer, whose input wants no gradient.
    """
    width = 1024 if world_size == 1024 else 8
    compilation = compiled_step(
        chain_of(width=width), zero=zero, micro_batches=micro_batches, world_size=world_size
    )
    num_parameters = sum(spec.num_elements for spec in compilation.specs.values())
    plan = Analysis.of(Capture((compilation,), num_parameters, world_size, zero))
    k = micro_batches
    factor = {0: 2, 1: 2, 2: k + 1, 3: 3 * k}[zero]
    not_read = k * width**2 if zero == 3 else 0
    assert plan.wire_elements() == factor * num_parameters - not_read


@pytest.mark.parametrize(("zero", "reduces"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_reductions(zero: int, reduces: int) -> None:
    """Stages 0 and 1 reduce the sum, in the last backward; the others every micro-step's."""
    graph = step_graph(chain_of(depth=1), zero=zero, micro_batches=4)
    launches = [t.stamp.micro_step for t in graph.transfers(name="reduce")]
    assert launches == list(range(4))[-reduces:]


@pytest.mark.parametrize(("zero", "gathers"), [(1, 1), (2, 1), (3, 8)])
def test_gathers(zero: int, gathers: int) -> None:
    """Stage 3 gathers in every phase of every micro-step, the others once."""
    graph = step_graph(chain_of(depth=2), zero=zero, micro_batches=4)
    last = [t for t in graph.transfers(name="gather") if t.stamp.layer == "layers.1"]
    assert len(last) == gathers


def test_sums_are_taken_as_soon_as_they_can_be() -> None:
    """A layer's gradient is added before the next layer's backward begins."""
    graph = step_graph(chain_of(depth=3), zero=1, micro_batches=2)
    nodes = list(graph.nodes(segment=Segment(Phase.BACKWARD, 1)))
    sums = [i for i, n in enumerate(nodes) if stamp_of(n).role is Role.ACCUMULATE]
    products = [i for i, n in enumerate(nodes) if n.target is _aten.mm.default]
    assert len(sums) == 3
    assert sums[0] < products[-1]


class Shared(nn.Module):
    """Two biases whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        return ((self.a + self.b) * x.sum(0)).square().sum()


def test_gradients_that_share_memory_are_not_added_to_in_place() -> None:
    """Or each would be counted in the other."""
    graph = step_graph(lambda: (Shared(), (torch.randn(4, 4),)), zero=1, micro_batches=2)
    targets = [n.args[0] for n in of_role(graph, Role.ACCUMULATE)]
    assert len(set(targets)) == 2
    assert all(len(n.users) <= 2 for n in targets)


def test_bad_settings() -> None:
    """No micro-batch is no step."""
    with pytest.raises(ConfigError, match="micro_batches=0"):
        Accumulate(0)
