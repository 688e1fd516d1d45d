"""Which values several ranks have, and how ranks see that they mean the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxzero.graph import Phase, StepGraph
from fxzero.graph.same_on_ranks import Alongs, expression, same_on_ranks
from fxzero.graph.stamps import stamp_of
from fxzero.inspect.capture import fake_ranks
from tests.tracing import Build, find, of, run, trace, up_to

_aten = torch.ops.aten
WIDTH = 8


def world() -> dist.ProcessGroup:
    """All ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Several(nn.Module):
    """Values of all kinds."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH, WIDTH))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        scaled = self.weight.sin() * self.factor + torch.arange(WIDTH)
        moved = self.weight.cos() + self.get_buffer("shift")
        noisy = F.dropout(self.weight.tanh(), 0.5)
        mine = x.exp() @ scaled + (x @ moved) @ noisy
        every = funcol.all_gather_tensor_autograd(mine, 0, world())
        return (every.sigmoid() * every).sum()


several = of(Several, 4, WIDTH)
others = of(lambda: Several(3.0), 4, WIDTH)


def traced(
    build: Build = several, mesh_shape: tuple[int, ...] = ()
) -> tuple[StepGraph, dict[fx.Node, Alongs]]:
    """A graph of one of eight ranks before anything was decided, and what others have of it."""
    graph = trace(build, zero=3, mesh_shape=mesh_shape)
    with fake_ranks(8):  # who shares a group of the model's own is asked for
        run(graph, up_to("draw_masks"))
        return graph, same_on_ranks(graph)


def forward(graph: StepGraph, target: object) -> list[fx.Node]:
    """Forward's calls of an operator."""
    return find(graph, target, phase=Phase.FORWARD)


def test_what_is_the_same() -> None:
    """What is made of parameters and plain numbers, and what is behind a gather of all ranks; not
    what an input, a buffer or a random number is part of."""
    graph, found = traced()
    targets = {str(node.target) for node in found}
    assert {"aten.sin.default", "aten.cos.default", "aten.tanh.default"} <= targets
    assert "aten.sigmoid.default" in targets
    (exp,) = forward(graph, _aten.exp.default)
    (arange,) = [n for n in graph.nodes() if "iota" in str(n.target) or "arange" in str(n.target)]
    assert exp not in found
    assert arange not in found  # there is nothing to gather
    (cos,) = forward(graph, _aten.cos.default)
    (moved,) = (user for user in cos.users if stamp_of(user).phase is Phase.FORWARD)
    assert moved not in found
    (tanh,) = forward(graph, _aten.tanh.default)
    (dropped,) = (user for user in tanh.users if stamp_of(user).phase is Phase.FORWARD)
    assert dropped not in found


def test_along_which_ranks() -> None:
    """Every axis of a parameter's mesh by its role; a model's own transfer by its name."""
    graph, found = traced(mesh_shape=(2, 4))
    (sin,) = forward(graph, _aten.sin.default)
    (sigmoid,) = forward(graph, _aten.sigmoid.default)
    expected = {("replicate", 2), ("shard", 4), ("all_gather_into_tensor", 8)}
    assert {(a.name, a.group.size) for a in found[sin]} == expected
    assert found[sigmoid] == found[sin]


def test_other_numbers_are_another_expression() -> None:
    """A factor that differs between ranks is seen, whatever else is alike."""
    (first, _), (second, _), (again, _) = traced(), traced(others), traced()

    def sums(graph: StepGraph) -> list[str]:
        (sin,) = forward(graph, _aten.sin.default)
        (product,) = (user for user in sin.users if stamp_of(user).phase is Phase.FORWARD)
        return [expression(sin), expression(product)]

    assert sums(first) == sums(again)
    assert sums(first)[0] == sums(second)[0]
    assert sums(first)[1] != sums(second)[1]


class Twice(nn.Module):
    """Two gathers of equal shapes, of which one is read on."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        mine = self.layer(x)
        found = [
            funcol.all_gather_tensor_autograd(each, 0, world()) for each in (mine, mine.square())
        ]
        return found[0 if self.first else 1].sin().sum() + sum(each.sum() for each in found)


def test_another_transfer_is_another_expression() -> None:
    """Ranks that read different results of one sequence of transfers do not have the same."""

    def digest(first: bool) -> str:
        graph, _ = traced(of(lambda: Twice(first), 4, WIDTH))
        (sin,) = forward(graph, _aten.sin.default)
        return expression(sin)

    assert digest(True) == digest(True)
    assert digest(True) != digest(False)
