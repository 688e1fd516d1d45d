"""What optimizers hold that run their own step: found out on tensors without values."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fxzero
from fxzero._compat import allocations_on
from fxzero.cost import own_step
from fxzero.cost.own_step import OwnStepMemory, memory_of_own_step
from fxzero.errors import ConfigError, FxZeroWarning
from fxzero.graph import Role, StepGraph
from fxzero.schedule.simulate import simulate_memory
from tests.schedule.test_memory import allocated_peak_bytes
from tests.stepping import compiled_step, step_graph
from tests.tracing import of_role

optim = torch.optim
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": optim.NAdam,
    "radam": lambda p: optim.RAdam(p, foreach=True),
    "adamax": optim.Adamax,
    "adadelta": optim.Adadelta,
    "adafactor": optim.Adafactor,
    "rprop": optim.Rprop,
    "adam with foreach": lambda p: optim.Adam(p, foreach=True),
    "two groups": lambda p: optim.NAdam([{"params": [one], "lr": 0.1} for one in p]),
}
EAGER = {"lower_regions": {"backend": "eager"}, "gather_ahead": {"enabled": False}}
ROWS = 64


class Layers(nn.Module):
    """Mostly weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 256) → scalar."""
        return self.layers(x).square().mean()


def held_by(optimizer: Optimizer) -> int:
    states = optimizer.state.values()
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


def _graph_of(optimizer: Callable[[Any], Optimizer]) -> StepGraph:
    return step_graph(
        lambda: (Layers(), (torch.randn(ROWS, 256),)),
        zero=0,
        world_size=1,
        optimizer=optimizer,
        options=EAGER,
    )


def found(kind: str) -> OwnStepMemory:
    """As the graph of a whole step says it."""
    (update,) = of_role(_graph_of(KINDS[kind]), Role.UPDATE)
    memory = memory_of_own_step(update)
    assert memory is not None
    return memory


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_optimizer_allocates(kind: str) -> None:
    model = Layers()
    optimizer = KINDS[kind](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    _, changes = allocations_on("cpu", optimizer.step)
    memory = found(kind)
    state, most = held_by(optimizer), max(accumulate(changes))
    assert abs(memory.state_bytes - state) <= 1024
    assert abs(memory.workspace_bytes - most) <= 1024


@pytest.mark.parametrize("kind", ["rmsprop", "radam", "adafactor"])
def test_a_budget_bounds_it(kind: str) -> None:
    """The least that is named is enough, with all that is held beside the graph's own."""
    x = torch.randn(ROWS, 256)

    def step_of(budget: int) -> tuple[Any, nn.Module, Optimizer]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Layers()
        optimizer = KINDS[kind](model.parameters())
        options = {**EAGER, "memory_budget": budget}
        return fxzero.compile_step(model, optimizer, options=options), model, optimizer

    with pytest.raises(ConfigError, match="is the least that was found") as caught:
        step_of(1)[0](x)
    (least,) = map(int, re.findall(r"\((\d+) bytes\) is the least", str(caught.value)))
    step, model, optimizer = step_of(least)
    step(x)
    peak = min(allocated_peak_bytes(lambda: step(x)) for _ in range(2))
    total = sum(p.nbytes for p in model.parameters()) + held_by(optimizer) + x.nbytes + peak
    assert 0.9 * least <= total <= least + 4096


def test_each_rank_has_its_own_part() -> None:
    """Of shards, and the state of shards."""
    kinds = {"optimizer": KINDS["rmsprop"], "options": EAGER}
    graph = step_graph(lambda: (Layers(), (torch.randn(ROWS, 256),)), world_size=8, **kinds)
    (update,) = of_role(graph, Role.UPDATE)
    memory = memory_of_own_step(update)
    assert memory is not None
    counts = 8 * 4  # of the steps of eight parameters, which no rank has a part of
    assert memory.state_bytes - counts == (found("rmsprop").state_bytes - counts) // 8


def test_nobody_notices() -> None:
    """The optimizer's state, its groups, its hooks and its schedule are as they were."""
    called: list[str] = []
    model = Layers()
    optimizer = KINDS["nadam"](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    everybodys = register_optimizer_step_pre_hook(lambda *_: called.append("before any"))
    LambdaLR(optimizer, lambda i: 1.0)
    before = [*model.parameters()]
    step = own_step.OwnStep(optimizer, before)
    try:
        memory = own_step._rehearsed(step, before)
    finally:
        everybodys.remove()
    assert memory is not None
    assert memory.state_bytes > 2 * sum(p.nbytes for p in before)
    assert called == []
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == before
    assert all(p.grad is None for p in before)


class Odd(optim.NAdam):
    """Looks at a number, and decides."""

    def step(self, closure: Any = None) -> Any:
        """As the other one, where that is allowed."""
        (p, *_) = self.param_groups[0]["params"]
        if p.grad is not None and not p.grad.numpy().any():
            return None
        return super().step(closure)


class Keeps(optim.NAdam):
    """Has a list of its own, which a copy would fill with tensors without values."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        """As the other one, and remembers something."""
        self.seen.append(self.param_groups[0]["params"][0].detach().norm())
        return super().step(closure)


def patched(p: Any) -> Optimizer:
    """With somebody's own function in the place of its step."""
    optimizer = optim.NAdam(p)
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("kind", [Odd, Keeps, patched])
def test_what_cannot_be_found_out_is_said(kind: Callable[[Any], Optimizer]) -> None:
    options = {**EAGER, "memory_budget": "1GiB"}
    with pytest.warns(FxZeroWarning, match="leaves out what .* holds"):
        compiled_step(
            lambda: (Layers(), (torch.randn(ROWS, 256),)),
            zero=0,
            world_size=1,
            optimizer=kind,
            options=options,
        )
    torch._dynamo.reset()
    memory = simulate_memory(_graph_of(kind), fuses=True)
    name = "NAdam" if kind is patched else kind.__name__
    assert memory.left_out == (f"{name}_step",)
    assert "optimizer_state" not in memory.by_kind()
    assert not simulate_memory(_graph_of(optim.NAdam), fuses=True).left_out
