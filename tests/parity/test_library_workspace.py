"""A budget bounds what libraries allocate for themselves, of operators that no formula follows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxzero
from fxzero._compat import allocations_on
from fxzero.compiler.compilation import Compilation
from fxzero.cost import library_workspace
from tests.parity import test_memory_budget as budgets
from tests.parity.test_memory_budget import SLACK, least_budget, train
from tests.tiers import exhaustive
from tests.tracing import observed

_one_thread = budgets._one_thread


class Turned(nn.Module):
    """An activation of what does not lie in memory as it is read."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return F.gelu(x.transpose(1, 2)).transpose(1, 2)


class Ends(nn.Module):
    """Layers, and a loss of what they make."""

    def __init__(self, *layers: nn.Module, loss: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.loss = loss or (lambda h: h.square())

    def forward(self, x: Tensor) -> Tensor:
        """``(…) → scalar``."""
        return self.loss(self.layers(x)).mean()


def twice(first: nn.Module, second: nn.Module) -> Ends:
    """Two of a kind, each behind something that backward reads."""
    return Ends(first, nn.Sigmoid(), second, nn.Sigmoid())


def determinant(h: Tensor) -> Tensor:
    """Of a matrix for each element of a batch."""
    return torch.linalg.slogdet(h.mT @ h + 64 * torch.eye(64))[1]


CASES: dict[str, tuple[Callable[[], Ends], tuple[int, ...]]] = {
    "strided": (
        lambda: twice(nn.Conv2d(16, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)),
        (4, 16, 64, 64),
    ),
    "few channels": (lambda: twice(nn.Conv2d(3, 4, 1, 2), nn.Conv2d(4, 4, 1)), (4, 3, 128, 128)),
    "transposed": (
        lambda: twice(nn.ConvTranspose2d(3, 4, 3, 1, 1), nn.ConvTranspose2d(4, 4, 3, 1, 1)),
        (4, 3, 64, 64),
    ),
    "transposed and strided": (
        lambda: twice(nn.ConvTranspose2d(16, 16, 3, 2), nn.ConvTranspose2d(16, 3, 3, 2)),
        (4, 16, 16, 16),
    ),
    "volumes": (
        lambda: twice(nn.ConvTranspose3d(3, 4, 3), nn.Conv3d(4, 4, 3, 2)),
        (2, 3, 16, 16, 16),
    ),
    "views": (
        lambda: Ends(nn.Linear(64, 64), Turned(), nn.Linear(64, 64), Turned()),
        (16, 64, 64),
    ),
    "distances": (
        lambda: Ends(nn.Linear(64, 64), nn.Sigmoid(), loss=lambda h: torch.cdist(h, h.flip(0))),
        (512, 64),
    ),
    "matrices": (lambda: Ends(nn.Linear(64, 64), nn.Sigmoid(), loss=determinant), (8, 64, 64)),
    "sorted": (
        lambda: Ends(nn.Linear(64, 64), nn.Sigmoid(), loss=lambda h: h.sort(0)[0].cumsum(0)),
        (512, 64),
    ),
    "logsumexp": (
        lambda: Ends(nn.Linear(64, 512), nn.Sigmoid(), loss=lambda h: h.logsumexp(-1)),
        (512, 64),
    ),
}


@pytest.mark.parametrize(
    ("name", "regions"),
    [
        *((name, "eager") for name in CASES),
        ("matrices", "inductor"),  # Inductor calls operators that the graph does not have
        *exhaustive(*((name, "inductor") for name in CASES if name != "matrices")),
    ],
)
def test_the_least_is_held(name: str, regions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated in a step of the least budget is within it, and not far below."""
    build, shape = CASES[name]
    model = lambda: (build(), [torch.randn(shape)])  # noqa: E731
    monkeypatch.setitem(budgets.SPECIAL, name, model)
    least = least_budget(name, "step", regions=regions)
    found = train(name, "step", least, regions=regions)
    assert found.peak_bytes <= least
    assert 0.95 * least <= found.measured_bytes <= least + SLACK


def test_nobody_elses_profile_is_touched() -> None:
    """Where somebody is profiling, formulas have to do."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        with pytest.raises(RuntimeError):
            allocations_on("cpu", lambda: torch.ones(1000))
        torch.ones(5)
    assert any(event.key == "aten::ones" for event in profiler.key_averages())


def test_allocations_in_order() -> None:
    """Of what is called; nobody's random numbers are used up by it."""
    result, changes = allocations_on("cpu", lambda: torch.ones(1000) + torch.ones(1000))
    assert result.shape == (1000,)
    assert sorted(changes) == [-4000, -4000, 4000, 4000, 4000]
    assert changes[0] == 4000


def test_a_size_that_is_any_is_not_decided_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has one is not made, and so not measured: batches of all sizes stay one graph."""
    torch._dynamo.reset()
    ran: list[str] = []

    def record(node: fx.Node) -> int:
        ran.extend(str(n.meta.get("val")) for n in (node, *node.all_input_nodes))
        return 0

    monkeypatch.setattr(library_workspace, "_measured", {})
    monkeypatch.setattr(library_workspace, "_run", record)
    model = fxzero.shard(nn.Sequential(nn.Linear(7, 11), nn.Sigmoid(), nn.Linear(11, 7)), zero=0)
    options = {"memory_budget": "1GiB", "lower_regions": {"backend": "eager"}}
    compiled = torch.compile(model, backend="fxzero", dynamic=True, options=options)
    found: list[Compilation] = []
    with observed(found.append), warnings.catch_warnings():
        warnings.simplefilter("ignore", fxzero.FxZeroWarning)  # fitted to the first of them
        for rows in (6, 9, 12):
            compiled(torch.randn(rows, 7)).sum().backward()
    assert len(found) == 1
    assert not [value for value in ran if re.search(r"\bs\d+\b", value)]


def test_a_region_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever compiles it again."""
    asked: list[int | None] = []
    measured = library_workspace.measured_region_bytes

    def counted(*arguments: Any) -> int | None:
        asked.append(measured(*arguments))
        return asked[-1]

    monkeypatch.setattr("fxzero.cost.region_memory.measured_region_bytes", counted)
    monkeypatch.setattr(library_workspace, "_measured", {})  # as if no test had had a budget

    def model() -> tuple[Ends, list[Tensor]]:
        layers = nn.Linear(64, 61), nn.Sigmoid(), nn.Linear(61, 61)
        return Ends(*layers), [torch.randn(33, 64)]

    monkeypatch.setitem(budgets.SPECIAL, "asked", model)
    free = train("asked", "step", "none", regions="inductor")
    assert asked == []
    found = train("asked", "step", free.peak_bytes + SLACK, regions="inductor")
    times = len(asked)
    again = train("asked", "step", free.peak_bytes + SLACK, regions="inductor")
    assert asked
    assert None not in asked
    assert len(asked) == times
    assert found.peak_bytes == again.peak_bytes == free.peak_bytes


def test_a_region_that_cannot_do_with_made_up_numbers_is_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    assert library_workspace.measured_region_bytes(lambda inputs: inputs, [x]) is None
    x.meta["val"] = torch.empty(3)

    def raises(inputs: list[Tensor]) -> None:
        inputs.clear()
        raise RuntimeError("no such index")

    def doubles(inputs: list[Tensor]) -> Tensor:
        return torch.cat([*inputs, *inputs])

    assert library_workspace.measured_region_bytes(raises, [x]) is None
    assert library_workspace.measured_region_bytes(doubles, [x]) == 24
