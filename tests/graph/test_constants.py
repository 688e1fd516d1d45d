"""Constants of a graph are those that it was traced with, wherever its nodes are copied to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing import assert_close

import fxzero
from fxzero.errors import VerificationError
from fxzero.graph import StepGraph, constants
from fxzero.graph.verify import check_constants
from tests.tracing import observed

EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}}


class Scaled(nn.Module):
    """A layer with a constant of its own."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → (B, 4)."""
        scale = torch.tensor(self.values, dtype=x.dtype)
        return x + (self.linear(x) * scale).tanh() * torch.tensor([0.5, 2.0], dtype=x.dtype)[0]


class Weighted(torch.autograd.Function):
    """Backward has constants of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad * torch.tensor([1.0, 1.5, 2.0, 2.5], dtype=grad.dtype)
        return grad + torch.tensor([0.1, 0.0, 0.2, 0.0], dtype=grad.dtype)


class Scales(nn.Module):
    """Two kinds of equal layers, which differ in a constant alone, and a model with others."""

    def __init__(self, between: bool = True) -> None:
        super().__init__()
        self.first = nn.ModuleList(Scaled([1.0, 2.0, 3.0, 4.0]) for _ in range(3))
        self.second = nn.ModuleList(Scaled([0.1, 0.2, 0.3, 0.4]) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → a loss."""
        if self.between:
            x = x * torch.tensor([3.0, 1.0, 2.0, 5.0], dtype=x.dtype)
        for layer in [*self.first, *self.second]:
            x = layer(x)
        if self.between:
            x = Weighted.apply(x * torch.tensor([7.0, 1.0, 2.0, 5.0], dtype=x.dtype))
        return x.square().mean()


@pytest.mark.parametrize("between", [True, False], ids=["model's too", "layers' only"])
@pytest.mark.parametrize("zero", [0, 3])
def test_equal_layers_keep_their_constants_in_both_doors(zero: int, between: bool) -> None:
    """Neither another layer's constant nor the model's, and the name need not exist there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected = Scales(between).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    loss = expected(x)
    loss.backward()
    in_loop, in_step = Scales(between).double(), Scales(between).double()
    for model in (in_loop, in_step):
        model.load_state_dict(expected.state_dict())
        fxzero.shard(model, zero=zero)
    found = torch.compile(in_loop, backend="fxzero", options=EAGER)(x)
    found.backward()
    assert_close(found, loss, rtol=1e-12, atol=0)
    for mine, theirs in zip(in_loop.parameters(), expected.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    step = fxzero.compile_step(
        in_step, torch.optim.SGD(in_step.parameters(), lr=0.1), options=EAGER
    )
    assert_close(step(x).loss, loss.detach(), rtol=1e-12, atol=0)
    with torch.no_grad():
        for mine, theirs in zip(in_step.parameters(), expected.parameters(), strict=True):
            assert theirs.grad is not None
            assert_close(mine, theirs - 0.1 * theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_constant_in_every_micro_batch() -> None:
    """Micro-steps are copies that read the same constants."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Scales().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    loss = torch.stack([model(part) for part in x.chunk(3)]).mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fxzero.compile_step(model, optimizer, micro_batches=3, options=EAGER)
    assert_close(step(x).loss, loss.detach(), rtol=1e-12, atol=0)


def scheduled_graphs() -> list[StepGraph]:
    """The joint graph of a step with constants, and the two sides that were lowered."""
    torch._dynamo.reset()
    found: list[Any] = []

    def keep(compilation: Any) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    model = Scales()
    with observed(keep):
        torch.compile(model, backend="fxzero", options=EAGER)(torch.randn(5, 4)).backward()
    (compilation,) = found
    assert compilation.joint is not None
    return [compilation.joint, *compilation.sides]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["joint", "forward", "backward"])
def test_a_constant_that_was_swapped_is_found(which: int) -> None:
    """Before the cut, and in both sides after it."""
    graph = scheduled_graphs()[which]
    check_constants(graph, "nothing")
    first, *others = graph.graph.find_nodes(op="get_attr")
    different = [
        n
        for n in others
        if constants.read(graph.module, n.target) is not constants.read(graph.module, first.target)
    ]
    first.target = different[0].target
    with pytest.raises(VerificationError, match=r"after pass 'swap': the constant .* is not the"):
        check_constants(graph, "swap")


def test_a_constant_that_was_written_to_is_found() -> None:
    """The same tensor with another value is another constant."""
    graph = scheduled_graphs()[0]
    (node, *_) = graph.graph.find_nodes(op="get_attr")
    constants.read(graph.module, node.target).add_(1)
    with pytest.raises(VerificationError, match="has been written to"):
        check_constants(graph, "write")


def test_a_constant_that_nobody_recorded_is_found() -> None:
    """A pass that reads something new from the module has to say what it is."""
    graph = scheduled_graphs()[0]
    graph.module.made_up = torch.ones(2)
    with graph.graph.inserting_before(graph.output):
        graph.graph.get_attr("made_up")
    with pytest.raises(VerificationError, match="nobody recorded"):
        check_constants(graph, "make")


def test_names_that_are_taken_are_passed_over() -> None:
    """One name for one value; none that stands for something else."""
    module = nn.Module()
    module.c = torch.ones(1)
    source = fx.GraphModule(module, fx.Graph())
    source.c = module.c
    node = source.graph.get_attr("c")
    constants.record(source)
    target = nn.Module()
    target.constant_c = torch.zeros(1)
    assert constants.adopt(target, node) == constants.adopt(target, node) == "constant_c_1"
    assert target.constant_c_1 is source.c
