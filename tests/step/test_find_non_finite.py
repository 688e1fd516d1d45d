"""`fxzero.find_non_finite`: which module and operator, parameter or argument; nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxzero
from fxzero.errors import BatchError, CaptureError, ConfigError, NonFiniteGradientError
from tests.parity.harness import Pools

EAGER = {"lower_regions": {"backend": "eager"}}


class Layer(nn.Module):
    """Grows what it is given."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


class Net(nn.Module):
    """Four layers, of which one may grow too much."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer(factor if i == 2 else 1.0) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def made(factor: float = 1.0, **settings: Any) -> tuple[Net, fxzero.TrainStep]:
    """A net, and a step that trains it."""
    torch.manual_seed(0)
    net = Net(factor)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    fxzero.shard(net, zero=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, fxzero.compile_step(net, optimizer, F.mse_loss, options=EAGER, **settings)


X, Y = torch.ones(4, 4), torch.zeros(4, 4)


def test_all_is_well() -> None:
    """Then there is nothing to find, and nothing has changed."""
    net, step = made()
    before = [p.detach().clone() for p in net.parameters()]
    state = torch.get_rng_state()
    assert fxzero.find_non_finite(step, X, Y) is None
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
    step(X, Y)


def test_a_layer_that_overflows_in_fp16() -> None:
    """By its name, operator and line, and how large its input was."""
    _, step = made(1e4, precision="fp16")
    assert step(X, Y).skipped
    found = fxzero.find_non_finite(step, X, Y)
    assert found is not None
    assert (found.phase, found.name, found.operator) == ("forward", "layers.2", "aten.mul.Tensor")
    assert "return self.linear(x) * self.factor" in found.line
    assert "infinity (16 of 16 numbers are not finite, float16[4, 4])" in found.about
    assert "of float16[4, 4] up to 11.5" in found.about
    assert str(found).startswith("forward of layers.2 on rank 0: aten.mul.Tensor makes infinity")


@pytest.mark.parametrize("name", ["layers.1.linear.weight", "layers.3.linear.bias"])
def test_a_parameter_that_is_none(name: str) -> None:
    """Before anything runs."""
    net, step = made()
    with torch.no_grad():
        dict(net.named_parameters())[name].view(-1)[1] = float("nan")
    found = fxzero.find_non_finite(step, X, Y)
    assert found is not None
    assert (found.phase, found.name) == ("parameter", name)
    assert "1 of " in str(found)


def test_an_argument_that_is_none() -> None:
    """By its place or its name."""
    _, step = made()
    bad = X.clone()
    bad[0, 0] = float("nan")
    found = fxzero.find_non_finite(step, bad, Y)
    assert str(found) == "batch [0] on rank 0: 1 of 16 numbers are not finite"
    found = fxzero.find_non_finite(nn.Linear(4, 1), input=bad)
    assert found is not None
    assert found.name == "input"


class Root(nn.Module):
    """The slope of a root at zero is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).abs().sqrt()


def test_a_backward_that_is_none() -> None:
    """The loss is finite: the module is found by what comes back."""
    net = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 1))
    found = fxzero.find_non_finite(net, X, Y[:, :1], loss_fn=F.mse_loss)
    assert found is not None
    assert (found.phase, found.name) == ("backward", "1")
    assert found.operator.startswith("aten.")


class Masked(nn.Module):
    """As attention is written by hand; its mask is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x) + self.mask
        scores = scores.masked_fill(torch.eye(4, dtype=torch.bool) & False, float("-inf"))
        top = torch.log(torch.zeros(4)).exp()  # minus infinity, taken back
        return (scores.softmax(-1) + top).sum()


def test_a_mask_is_none() -> None:
    """Infinity that a module takes back is no fault, and not in what is found behind it."""
    model = Masked()
    assert fxzero.find_non_finite(model, X) is None

    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Masked()

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * 200).exp()

    found = fxzero.find_non_finite(Over(), X)
    assert found is not None
    assert (found.name, found.operator) == ("", "aten.exp")
    assert "the model itself" in str(found)


def test_micro_batches() -> None:
    """Each part of a batch is looked at."""
    precision = fxzero.Precision(param_dtype=torch.float16, loss_scale=1.0)
    _, step = made(1e4, precision=precision, micro_batches=2)
    later = torch.cat([torch.full((2, 4), -0.4375), X[:2]])  # of which layer 2 makes zeros first
    found = fxzero.find_non_finite(step, later, Y)
    assert found is not None
    assert found.name == "layers.2"
    assert "float16[2, 4]" in found.about


def grows(y: Tensor, target: Tensor) -> Tensor:
    """A loss that does."""
    return (y * 1e38).exp().mean()


def test_the_error_says_how_to_find_it() -> None:
    """The step that stops has changed nothing, so that it can be looked for."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {**EAGER, "stop_unless_finite": True}
    step = fxzero.compile_step(
        net, optimizer, lambda y, t: (y * 1e38).exp().mean(), options=options
    )
    with pytest.raises(NonFiniteGradientError, match=r"fxzero\.find_non_finite\(step, \*batch\)"):
        step(X, Y)
    found = fxzero.find_non_finite(step, X, Y)
    assert found is not None
    assert (found.phase, found.name, found.operator) == ("forward", "", "aten.exp")
    assert "test_find_non_finite.py" in found.line


def test_what_cannot_be_looked_at() -> None:
    """Is said."""
    _, step = made()
    with pytest.raises(ConfigError, match="has its own"):
        fxzero.find_non_finite(step, X, Y, loss_fn=F.mse_loss)
    with pytest.raises(ConfigError, match="not int"):
        fxzero.find_non_finite(3, X)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="target"):
        fxzero.find_non_finite(nn.Linear(4, 4), X, loss_fn=F.mse_loss)
    with pytest.raises(CaptureError, match="scalar"):
        fxzero.find_non_finite(nn.Linear(4, 4), X)


def one_rank_overflows() -> None:
    """Job: only rank 1's batch is too large, and only in layer 2."""
    net, step = made(1e4, precision="fp16")
    x = X * (1.0 if dist.get_rank() == 1 else -1e-3) - (0.0 if dist.get_rank() == 1 else 1.0)
    found = fxzero.find_non_finite(step, x, Y)
    assert found is not None
    assert (found.rank, found.phase, found.name) == (1, "forward", "layers.2")
    assert all(p.grad is None for p in net.parameters())
    if dist.get_rank() == 1:
        with torch.no_grad():
            net.layers[3].linear.bias.fill_(float("inf"))  # type: ignore[union-attr]
    found = fxzero.find_non_finite(step, x, Y)
    assert found is not None
    assert (found.rank, found.phase, found.name) == (1, "parameter", "layers.3.linear.bias")


def test_on_one_rank_alone(ranks: Pools) -> None:
    """All ranks are told, and none waits for another."""
    ranks(2).run(one_rank_overflows)
