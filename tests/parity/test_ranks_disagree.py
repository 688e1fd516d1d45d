"""Ranks that take different paths: an error on all of them, which names both, and no mixed numbers.

Each case is something that training code does. Rank 1 deviates; the job returns what was raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero.errors import RankLostError, RanksDisagreeError
from fxzero.ranks import agree, watch
from tests.parity.harness import Pools, RanksFailedError
from tests.parity.sharded import compile_eagerly, first_and_last_stage, on_two_ranks
from tests.runtime.test_watch import SOON
from tests.tiers import exhaustive, in_two_tiers

WIDTH = 6


class Heads(nn.Module):
    """A body, and a head that Python picks by what is in the batch; they differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1 + 40 * i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → scalar."""
        h = self.body(x).tanh()
        return self.heads[int(x.sum() > 0)](h).square().sum()


class Experts(nn.Module):
    """Each row goes to the expert that its first number says; experts without rows are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → scalar."""
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = x[:, 0] == i
            if chosen.any():
                out[chosen] = expert(x[chosen])
        return out.square().sum()


class LayerDrop(nn.Module):
    """Leaves out the layers that somebody has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) → scalar."""
        for i, layer in enumerate(self.layers):
            if i not in self.dropped:
                x = layer(x).tanh()
        return x.square().sum()


def said(action: Callable[[], None]) -> str:
    """The message of the error that all ranks must raise; empty where none was."""
    try:
        action()
    except RanksDisagreeError as error:
        return str(error)
    return ""


def run_model(kind: str, zero: int, compiled: bool, deviates: bool) -> str:
    """Job: a step that all ranks take alike, then one where rank 1 takes another path."""
    torch.manual_seed(0)
    model: nn.Module = {"heads": Heads, "experts": Experts, "layers": LayerDrop}[kind]().double()
    model = fxzero.shard(model, zero=zero)
    inner = model
    if compiled:
        model = compile_eagerly(model)
    odd = deviates and dist.get_rank() == 1
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    model(x).backward()
    if kind == "heads":
        x = -x if odd else x
    elif kind == "experts":
        x = 2 * x if odd else x
    else:
        inner.dropped = {1} if odd else set()
    return said(lambda: model(x).backward())


@on_two_ranks
@pytest.mark.parametrize(
    ("kind", "door", "zero"),
    in_two_tiers(
        [*itertools.product(("heads", "experts", "layers"), ("compiled", "eager"), (0, 3))],
        always=[
            *(("heads", door, 0) for door in ("compiled", "eager")),
            *((kind, "compiled", 3) for kind in ("experts", "layers")),
        ],
    ),
)
def test_another_path_on_one_rank(
    ranks: Pools, world: int, zero: int, door: str, kind: str
) -> None:
    """Both ranks stop, and each names what the two run."""
    messages = ranks(world).run(run_model, kind, zero, door == "compiled", True)
    names = {
        "heads": ("heads.0", "heads.1"),
        "experts": ("experts.1", "experts.2"),
        "layers": ("layers.1", "layers."),
    }[kind]
    for message in messages:
        assert "ranks are about to run different things" in message
        assert "rank 0: " in message
        assert "rank 1: " in message
        assert all(name in message for name in names), message
        if door == "compiled":
            assert "test_ranks_disagree.py" in message, message
    assert all(messages)


@on_two_ranks
@pytest.mark.parametrize("zero", [3, *exhaustive(0)])
@pytest.mark.parametrize("kind", ["heads", "experts", "layers"])
def test_the_same_path_on_all_ranks(ranks: Pools, world: int, zero: int, kind: str) -> None:
    """Nothing is said."""
    assert ranks(world).run(run_model, kind, zero, True, False) == ["", ""]


def clip_differently(axis: str, of_rank_0: float | None) -> str:
    """Job: a whole step whose ranks clip at other norms, or one of them not at all."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    stages = {"stages": {"0": 0, "1": 1}} if axis == "pipeline" else {"zero": 2}
    fxzero.shard(model, mesh=mesh, **stages)
    step = fxzero.compile_step(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        nn.functional.mse_loss,
        micro_batches=2,
        clip_grad_norm=1.0 if dist.get_rank() else of_rank_0,
        options={"lower_regions": {"backend": "eager"}},
    )
    before = [p.to_local().clone() for p in model.parameters()]
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    message = said(lambda: step(x, 2 * x))
    assert all(
        torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)
    )
    return message


@on_two_ranks
@pytest.mark.parametrize("of_rank_0", [0.1, None])
@pytest.mark.parametrize("axis", ["shard", "pipeline"])
def test_another_norm_on_one_rank(
    ranks: Pools, world: int, axis: str, of_rank_0: float | None
) -> None:
    """Both say so, before anything was updated: the norm itself is the same on both."""
    for message in ranks(world).run(clip_differently, axis, of_rank_0):
        assert "rank 1: step graph" in message or "rank 1: forward graph" in message
        assert "clip_grad_norm=1.0" in message
        assert of_rank_0 is None or f"clip_grad_norm={of_rank_0}" in message
        assert "it did not say what" not in message


def evaluate_on_one(zero: int) -> str:
    """Job: rank 1 evaluates once while rank 0 trains."""
    model = compile_eagerly(fxzero.shard(LayerDrop().double(), zero=zero))
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    model(x).backward()

    def go_on() -> None:
        for _ in range(2):
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model(x)
            model(x).backward()

    return said(go_on)


@on_two_ranks
def test_an_evaluation_on_one_rank(ranks: Pools, world: int) -> None:
    """At stage 3 it gathers: both ranks are told. At stage 0 it is its own affair."""
    messages = ranks(world).run(evaluate_on_one, 3)
    for message in messages:
        assert "forward graph" in message
        assert "backward graph" in message
        assert "in the same mode, on all ranks" in message
    assert ranks(world).run(evaluate_on_one, 0) == ["", ""]


def eager_beside_compiled(zero: int) -> str:
    """Job: rank 1 calls the model without compiling it."""
    torch.manual_seed(0)
    model = fxzero.shard(LayerDrop().double(), zero=zero)
    compiled = compile_eagerly(model)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    compiled(x).backward()
    return said(lambda: (model if dist.get_rank() == 1 else compiled)(x).backward())


@on_two_ranks
@first_and_last_stage
def test_an_eager_call_beside_a_compiled_one(ranks: Pools, world: int, zero: int) -> None:
    """Both are told which is which."""
    for message in ranks(world).run(eager_beside_compiled, zero):
        assert "graph, 1 collective" in message
        assert "rank 1: gather" in message if zero else "rank 1: reduce the gradient" in message
        assert "outside of compiled graphs" in message


def step_with_other_rows(zero: int) -> list[float]:
    """Job: whole steps in which rank 1's batches are smaller."""
    torch.manual_seed(0)
    model = fxzero.shard(LayerDrop().double(), zero=zero)
    step = fxzero.compile_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        options={"lower_regions": {"backend": "eager"}},
    )
    rows = [4, 4, 4] if dist.get_rank() == 0 else [4, 3, 2]
    for n in rows:
        step(torch.ones(n, WIDTH, dtype=torch.float64))
    return [p.full_tensor().sum().item() if zero else p.sum().item() for p in model.parameters()]


@on_two_ranks
@first_and_last_stage
def test_other_rows_on_one_rank(ranks: Pools, world: int, zero: int) -> None:
    """The collectives are the same: nobody is stopped, and the ranks stay equal."""
    first, second = ranks(world).run(step_with_other_rows, zero)
    assert first == second


def drop_in_a_step(zero: int) -> str:
    """Job: a whole step whose model leaves out a layer on rank 1."""
    torch.manual_seed(0)
    model = LayerDrop().double()
    if dist.get_rank() == 1:
        model.dropped = {1}
    fxzero.shard(model, zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"lower_regions": {"backend": "eager"}}
    step = fxzero.compile_step(model, optimizer, options=options)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    return said(lambda: step(x))


@on_two_ranks
@first_and_last_stage
def test_another_path_in_a_whole_step(ranks: Pools, world: int, zero: int) -> None:
    """The step is the graph that is named."""
    for message in ranks(world).run(drop_in_a_step, zero):
        assert "only here: layers.1" in message
        assert "graph, 1 collective" in message or "step graph" in message


def drop_on_the_last(zero: int) -> tuple[str, str]:
    """Job: two groups of two ranks; the last rank leaves out a layer."""
    watch.start(SOON)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2))
    inner = fxzero.shard(LayerDrop().double(), zero=zero, mesh=mesh)
    model = compile_eagerly(inner)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    model(x).backward()
    inner.dropped = {1} if dist.get_rank() == 3 else set()
    try:
        model(x).backward()
    except (RanksDisagreeError, RankLostError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("zero", [3, *exhaustive(0)])
def test_a_rank_that_shares_no_group_with_the_odd_one(ranks: Pools, world: int, zero: int) -> None:
    """It is told by those that do, instead of waiting for them."""
    with pytest.raises(RanksFailedError) as caught:
        ranks(world).run(check_all_told, zero)
    assert str(caught.value).count("AssertionError: as expected") == world, caught.value


def check_all_told(zero: int) -> None:
    """Job: every rank has heard of it."""
    kind, message = drop_on_the_last(zero)
    others = 2 if zero == 3 else 1  # at stage 3 the forward of the other group goes well
    lost = dist.get_rank() < others
    assert kind == ("RankLostError" if lost else "RanksDisagreeError"), message
    assert "ranks are about to run different things" in message
    raise AssertionError(f"as expected: {kind}")  # the groups are of no more use


def over_a_side_group(deviates: bool) -> str:
    """Job: a group whose backend is said to carry no CPU tensors, as NCCL does not."""
    with mock.patch.object(agree, "backend_of", return_value="nccl"):
        torch.manual_seed(0)
        inner = fxzero.shard(LayerDrop().double(), zero=3)
        assert agree.channel_of(dist.group.WORLD.group_name) is not dist.group.WORLD
        model = compile_eagerly(inner)
        x = torch.ones(4, WIDTH, dtype=torch.float64)
        model(x).backward()
        inner.dropped = {1} if deviates and dist.get_rank() == 1 else set()
        return said(lambda: model(x).backward())


@on_two_ranks
def test_ranks_compare_over_a_side_group(ranks: Pools, world: int) -> None:
    """Made of gloo, where the group itself cannot tell."""
    assert ranks(world).run(over_a_side_group, False) == ["", ""]
    messages = ranks(world).run(over_a_side_group, True)
    assert all("ranks are about to run different things" in message for message in messages)
    assert "only here: layers.1" in messages[0]
    ranks.close()
