"""Steps that Dynamo cannot trace as one graph: they train in several, with the same numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fxzero
from fxzero.errors import CaptureError
from tests.parity.harness import Pools
from tests.parity.sharded import FLOAT64, TIGHT, on_two_ranks
from tests.parity.training import Tensors, assert_same, full_parameters, mean_over_ranks
from tests.tiers import in_two_tiers

OPTIONS = {"lower_regions": {"backend": "eager"}}


class Breaks(nn.Module):
    """A graph break in the middle of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return (self.last(hidden) * self.scale).square().mean()


def model() -> nn.Module:
    """The same values each time."""
    torch.manual_seed(0)
    return Breaks().to(FLOAT64)


def batch(seed: int) -> Tensor:
    """(8, 4), on all ranks alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator, dtype=FLOAT64)


def train_eagerly(clip: float) -> tuple[list[Tensors], dict[str, Any]]:
    """Losses and norms, and parameters, of the ordinary loop in one process."""
    reference = model()
    optimizer = torch.optim.AdamW(reference.parameters(), 1e-2)
    seen: list[Tensors] = []
    for seed in range(3):
        loss = reference(batch(seed))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        seen.append({"loss": loss.detach(), "norm": norm})
    return seen, dict(full_parameters(reference))


@on_two_ranks
@pytest.mark.parametrize(
    ("micro_batches", "zero"),
    in_two_tiers([*product([1, 2], range(4))], always=[(2, 0), (2, 3)]),
)
def test_several_graphs_have_the_numbers_of_one(
    ranks: Pools, world: int, zero: int, micro_batches: int
) -> None:
    """With micro-batches and clipping, and a warning that gives the reason."""
    ranks(world).run(train_in_several_graphs, zero, micro_batches)


def train_in_several_graphs(zero: int, micro_batches: int) -> None:
    """Job."""
    expected, parameters = train_eagerly(clip=0.05)
    mine = fxzero.shard(model(), zero=zero)
    optimizer = torch.optim.AdamW(mine.parameters(), 1e-2)
    step = fxzero.compile_step(
        mine, optimizer, micro_batches=micro_batches, clip_grad_norm=0.05, options=OPTIONS
    )
    for seed in range(3):
        rows = batch(seed).chunk(dist.get_world_size())[dist.get_rank()]
        if seed == 0:
            with pytest.warns(fxzero.FxZeroWarning, match="several graphs"):
                out = step(rows)
        else:
            out = step(rows)
        assert out.grad_norm is not None
        assert out.grad_norm > 0.05, "nothing was clipped"
        found = {"loss": mean_over_ranks(out.loss), "norm": out.grad_norm}
        assert_same(found, expected[seed], TIGHT)
    assert_same(full_parameters(mine), parameters, TIGHT)


def test_strict_stays_strict() -> None:
    """An error, before anything has changed."""
    mine = model()
    before = full_parameters(mine)
    optimizer = torch.optim.AdamW(mine.parameters())
    step = fxzero.compile_step(mine, optimizer, options={**OPTIONS, "strict": True})
    with pytest.raises(fxzero.CaptureError, match="one graph"):
        step(batch(0))
    assert_same(full_parameters(mine), before, rtol=0)


@pytest.mark.parametrize("zero", [None, 0, 3])
def test_micro_batches_in_one_process(zero: int | None) -> None:
    """Step after step: where nobody has to reduce, nothing is kept back either."""
    _, expected = train_eagerly(clip=0.05)
    mine = model() if zero is None else fxzero.shard(model(), zero=zero)
    optimizer = torch.optim.AdamW(mine.parameters(), 1e-2)
    step = fxzero.compile_step(
        mine, optimizer, micro_batches=2, clip_grad_norm=0.05, options=OPTIONS
    )
    with pytest.warns(fxzero.FxZeroWarning, match="several graphs"):
        step(batch(0))
    for seed in (1, 2):
        step(batch(seed))
    assert_same(full_parameters(mine), expected, rtol=1e-12)


@pytest.mark.parametrize("budget", ["none", "1GiB"])
def test_of_what_a_memory_budget_is_no_bound(budget: str) -> None:
    """The warning says so, where there is one."""
    torch._dynamo.reset()  # after several shapes a graph is for any, which has a warning of its own
    mine = model()
    optimizer = torch.optim.AdamW(mine.parameters())
    step = fxzero.compile_step(mine, optimizer, options={**OPTIONS, "memory_budget": budget})
    with pytest.warns(fxzero.FxZeroWarning, match="several graphs") as warned:
        step(batch(0))
    text = str(warned[0].message)
    assert ("eager code (all of a function with a graph break in a loop)" in text) == (
        budget != "none"
    )


def test_a_gradient_that_is_not_finite_stops_the_loop_too() -> None:
    """``stop_unless_finite`` names the parameters and changes nothing."""
    mine = model()
    optimizer = torch.optim.AdamW(mine.parameters())
    options = {**OPTIONS, "stop_unless_finite": True}
    step = fxzero.compile_step(mine, optimizer, options=options)
    with pytest.warns(fxzero.FxZeroWarning, match="several graphs") as warned:
        step(batch(0))
    ours = [warning for warning in warned if warning.category is fxzero.FxZeroWarning]
    assert [warning.filename for warning in ours] == [__file__]  # where the step is called
    before = full_parameters(mine)
    with pytest.raises(fxzero.NonFiniteGradientError, match=r"last\.weight"):
        step(batch(1) * float("nan"))
    assert_same(full_parameters(mine), before, rtol=0)


class Wrapper(Optimizer):
    """An optimizer around another one, of the kind that accelerate makes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        """The inner one's."""
        return self.optimizer.param_groups


def test_a_wrapped_optimizer_is_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step updates through the inner optimizer, whose state it makes, where the wrapper is of
    a package that is known to add nothing."""
    mine = nn.Linear(4, 1).to(FLOAT64)
    inner = torch.optim.AdamW(mine.parameters(), 1e-2)
    with pytest.raises(CaptureError, match=r"Wrapper wraps AdamW.* Wrapper\.step does besides"):
        fxzero.compile_step(mine, Wrapper(inner), options=OPTIONS)
    monkeypatch.setattr(Wrapper, "__module__", "accelerate.optimizer")
    step = fxzero.compile_step(
        mine, Wrapper(inner), lambda output, _: output.mean(), options=OPTIONS
    )
    step(batch(0), torch.zeros(8))
    assert step.optimizer is inner
    assert len(inner.state) == 2


class Output:
    """What a model returns, with its loss as an attribute."""

    def __init__(self, loss: Tensor, hidden: Tensor) -> None:
        self.loss = loss
        self.hidden = hidden


class Returns(nn.Module):
    """Returns its loss in different company."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        """(B, 4) to something that holds a scalar."""
        hidden = self.linear(x)
        loss = hidden.square().mean()
        if self.how == "attribute":
            return Output(loss, hidden)
        return {"loss": loss, "hidden": hidden} if self.how == "mapping" else (loss, hidden)


@pytest.mark.parametrize("how", ["attribute", "mapping", "tuple"])
def test_a_loss_is_found_in_what_a_model_returns(how: str) -> None:
    """By its name, or as the one scalar that comes first."""
    torch.manual_seed(0)
    mine = Returns(how).to(FLOAT64)
    expected = mine.linear(batch(0)).square().mean()
    optimizer = torch.optim.SGD(mine.parameters(), 0.1)
    loss = fxzero.compile_step(mine, optimizer, options=OPTIONS)(batch(0)).loss
    assert_same({"loss": loss}, {"loss": expected.detach()}, TIGHT)


class KeepsAttributes(nn.Module):
    """Binds what it computed to attributes, as old weight_norm and recurrent states do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = torch.zeros(4, dtype=FLOAT64)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        hidden = self.linear(x) + self.state
        self.state = hidden.detach().mean(0)
        return hidden.square().mean()


def test_what_outlives_a_step_is_computed_in_several_graphs() -> None:
    """With the numbers of the ordinary loop."""
    torch.manual_seed(0)
    mine = KeepsAttributes().to(FLOAT64)
    torch.manual_seed(0)
    reference = KeepsAttributes().to(FLOAT64)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (mine, reference)]
    step = fxzero.compile_step(mine, optimizers[0], options=OPTIONS)
    for seed in range(3):
        if seed == 0:
            with pytest.warns(fxzero.FxZeroWarning, match="tensors that outlive it"):
                step(batch(seed))
        else:
            step(batch(seed))
        reference(batch(seed)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_same(full_parameters(mine), full_parameters(reference), TIGHT)
    assert_same({"state": mine.state}, {"state": reference.state}, TIGHT)
