"""What people compute from shards outside of a forward: logs, moments, averages, updates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import fxzero
from fxzero.errors import CaptureError, ShardingError
from tests.parity.harness import Pools
from tests.parity.sharded import FLOAT64, TIGHT, first_and_last_stage, on_two_ranks
from tests.parity.test_refusals import OPTIONS, rows
from tests.parity.training import assert_same, full_parameters
from tests.tiers import exhaustive

READINGS: dict[str, Callable[[Tensor], Any]] = {
    "norm of detach": lambda w: float(w.detach().norm()),
    "norm of clone": lambda w: w.clone().norm().item(),
    "sum of a moment": lambda w: float((torch.zeros_like(w) + w.detach()).abs().sum()),
    "average": lambda w: float(w.detach().clone().mul_(0.9).add_(w.detach(), alpha=0.1).norm()),
    "view": lambda w: float(w.detach().view(-1).norm()),
    "cast": lambda w: float(w.detach().float().double().norm()),
    "root mean square": lambda w: float(w.detach().pow(2).mean().sqrt()),
    "columns": lambda w: float(w.detach().norm(dim=0).sum()),
    "largest by column": lambda w: float(w.detach().max(dim=0).values.sum()),
    "smallest and largest": lambda w: [float(x) for x in torch.aminmax(w.detach())],
    "variance and mean": lambda w: [float(x) for x in torch.var_mean(w.detach())],
    "top two": lambda w: w.detach().flatten().topk(2).values.tolist(),
    "positive ones": lambda w: int((w.detach() > 0).sum()),
    "not zero": lambda w: int(w.detach().count_nonzero()),
    "histogram": lambda w: w.detach().float().histc(4).tolist(),
    "a row": lambda w: w.detach()[1].tolist(),
    "numpy": lambda w: float(w.detach().cpu().numpy().sum()),
    "concatenated": lambda w: float(torch.cat([w.detach().flatten()] * 2).norm()),
    "copied": lambda w: float(copy.deepcopy(w.detach()).norm()),
    "written": lambda w: float(f"{w.detach().norm():.12f}"),
    "meets a plain tensor": lambda w: float((w.detach() @ torch.ones(4, dtype=FLOAT64)).sum()),
    "exponential times plain": lambda w: float((w.detach().exp() * torch.ones(8, 4)).sum()),
    "expanded": lambda w: float(w.detach()[None].expand(2, -1, -1).sum()),
    "parts": lambda w: [float(part.norm()) for part in w.detach().chunk(3, dim=1)],
    "where it is not zero": lambda w: w.detach().nonzero().shape[0],
    "close": lambda w: torch.allclose(w.detach(), w.detach()),
    "not a number": lambda w: bool(torch.isnan(w.detach()).any()),
}


class Scaled(nn.Module):
    """Rows that two ranks share evenly and unevenly, a number, and a vector of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        return (self.last(self.first(x).tanh()) * self.scale * self.one).square().mean()

    def embed(self, x: Tensor) -> Tensor:
        """(B, 4) to (B, 8)."""
        rows = self.last.weight.expand(len(x), 3, 8).sum(1)
        return (x @ nn.functional.normalize(self.first.weight, dim=0).t() + rows) * self.scale.exp()


def scaled() -> Scaled:
    """Always the same weights."""
    torch.manual_seed(0)
    return Scaled().to(FLOAT64)


@on_two_ranks
def test_a_reading_is_of_all_ranks(ranks: Pools, world: int) -> None:
    """DTensor answers some with this rank's part, without a word."""
    for found in ranks(world).run(read_everything):
        assert not found


def read_everything() -> list[str]:
    """Job: the readings that are not those of the full parameters."""
    model, reference = fxzero.shard(scaled(), zero=3), scaled()
    wrong = []
    for name, read in READINGS.items():
        ours, theirs = read(model.first.weight), read(reference.first.weight)
        if ours != pytest.approx(theirs, rel=1e-12):
            wrong.append(f"{name}: {ours} instead of {theirs}")
    batch, mine = rows()
    with torch.no_grad():  # methods of the model's own, which no forward calls
        found, expected = model.embed(mine), reference.embed(batch)
    if not torch.allclose(found, expected.chunk(dist.get_world_size())[dist.get_rank()], 1e-12):
        wrong.append("a method of the model's own")
    for reduce in (torch.max, torch.argmin, lambda w: w.norm(float("inf"))):
        if float(reduce(model.one.detach())) != float(reduce(reference.one.detach())):
            wrong.append("a reduction of fewer rows than ranks")
    moment = torch.zeros_like(model.first.weight)
    torch._foreach_add_([moment], [torch.ones_like(moment)])
    if float(moment.sum()) != 32:
        wrong.append("a moment that is changed in place")
    return wrong


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": optim.AdamW,
    "AdamW, foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adagrad": optim.Adagrad,
    "RMSprop": optim.RMSprop,
    "NAdam": optim.NAdam,
    "RAdam, foreach": lambda p: optim.RAdam(p, foreach=True),
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
    "Adafactor": optim.Adafactor,
    "Rprop": optim.Rprop,
    "Muon": lambda p: optim.Muon([w for w in p if w.dim() == 2], lr=0.1),
}


@on_two_ranks
@first_and_last_stage
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch(ranks: Pools, world: int, zero: int, name: str) -> None:
    """Three clipped steps, its state copied and loaded after every one."""
    ranks(world).run(optimize, zero, name)


def optimize(zero: int, name: str) -> None:
    """Job."""
    make = OPTIMIZERS[name]
    model, reference = fxzero.shard(scaled(), zero=zero), scaled()
    ours, theirs = make(model.parameters()), make(reference.parameters())
    for seed in range(3):
        batch, mine = rows(seed)
        model(mine).backward()
        reference(batch).backward()
        for trained, optimizer in ((model, ours), (reference, theirs)):
            norm = nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            assert float(norm) > 0
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(full_parameters(model), full_parameters(reference), TIGHT)
    assert_same(state_of(ours), state_of(theirs), TIGHT)


def state_of(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's full state."""
    entries = optimizer.state_dict()["state"]
    return {
        f"{index} {name}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for index, entry in entries.items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }


class GoesOn(Scaled):
    """Reads a weight, lets the graph end, and reads it again."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        weight = self.first.weight
        transposed = weight.t()
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return (hidden @ weight @ transposed).square().mean()


class Adds(Scaled):
    """Writes to a weight that an earlier graph has gathered."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        rows = self.first.weight[1:]
        hidden = self.first(x)
        torch._dynamo.graph_break()
        with torch.no_grad():
            rows.mul_(2)
        return (hidden[:, 1:] @ rows).square().mean()


class AddsEagerly(Adds):
    """The same, in code that is not compiled."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        rows = self.first.weight[1:]
        hidden = self.first(x)
        double(rows)
        return (hidden[:, 1:] @ rows.clone()).square().mean()


@torch.compiler.disable
def double(rows: Tensor) -> None:
    """Change rows in place."""
    with torch.no_grad():
        rows.mul_(2)


class Assigns(Scaled):
    """Gives a weight other memory, which Dynamo leaves to Python."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        hidden = self.first(x)
        self.first.weight.data = torch.zeros(8, 4, dtype=FLOAT64)
        return self.last(hidden).square().mean()


@on_two_ranks
@pytest.mark.parametrize(
    ("door", "zero"), [("step", 0), ("compile", 3), *exhaustive(("compile", 0), ("step", 3))]
)
def test_a_weight_that_lives_on_between_graphs(
    ranks: Pools, world: int, zero: int, door: str
) -> None:
    """Read it and the numbers are eager's; write to it and it is refused, with its name."""
    ranks(world).run(use_between_graphs, zero, door)


def use_between_graphs(zero: int, door: str) -> None:
    """Job."""
    torch.manual_seed(0)
    reference = GoesOn().to(FLOAT64)
    batch, mine = rows()
    reference(batch).backward()
    optim.SGD(reference.parameters(), 0.1).step()
    assert_same(full_parameters(train(GoesOn, zero, door, mine)), full_parameters(reference), TIGHT)
    for kind in (Adds, AddsEagerly, Assigns):
        with pytest.raises((CaptureError, ShardingError), match=r"first\.weight"):
            train(kind, zero, door, mine)


def train(kind: type[Scaled], zero: int, door: str, batch: Tensor) -> nn.Module:
    """One step."""
    torch.manual_seed(0)
    model = fxzero.shard(kind().to(FLOAT64), zero=zero)
    optimizer = optim.SGD(model.parameters(), 0.1)
    if door == "step":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxzero.FxZeroWarning)  # the step has several graphs
            fxzero.compile_step(model, optimizer, options=OPTIONS)(batch)
        return model
    torch.compile(model, backend="fxzero", options=OPTIONS)(batch).backward()
    optimizer.step()
    return model
