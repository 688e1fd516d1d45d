"""Collectives that a model brings itself: transfers like those of the passes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import fxzero
from examples.benchmarks.measure import allocated_peak_bytes
from fxzero.compiler.compilation import Compilation, observers
from fxzero.cost import FixedCosts
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.verify import verify
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import lower_transfers
from fxzero.passes.lower_transfers import release_own
from fxzero.regions.cutout import is_lowerable
from fxzero.runtime.account import collectives_digest
from fxzero.schedule.inventory import Inventory
from fxzero.schedule.simulate import simulate, simulate_memory
from fxzero.transfer import TransferKind
from tests.parity.harness import Pools
from tests.tiers import exhaustive
from tests.tracing import Build, of, run, trace, up_to

WIDTH = 8


class Centred(nn.Module):
    """Takes the mean over all ranks' rows away, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        x = self.layers[0](x)
        means = funcol.all_gather_tensor_autograd(x.mean(0, keepdim=True), 0, _world())
        return (self.layers[1](x - means.mean(0)) ** 3).sum()


class Summed(nn.Module):
    """Adds up a statistic that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        largest = x.detach().abs().amax(0)
        total = funcol.all_reduce(largest, "sum", _world())
        return (self.layer(x / total) ** 2).sum()


class Both(nn.Module):
    """A coalesced collective: one launch, several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        seen = x.detach()
        first, second = funcol.all_reduce_coalesced([seen.amax(0), seen.amin(0)], "sum", _world())
        return (self.layer(x - first + second) ** 2).sum()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


MODELS = {"gathered": Centred, "summed": Summed, "coalesced": Both}
centred = of(Centred, 4, WIDTH)


def after(name: str, build: Build) -> StepGraph:
    """A graph after a pass, of one of eight ranks: who shares a group is asked for then."""
    graph = trace(build)
    with fake_ranks(8):
        run(graph, up_to(name))
    return graph


def own(graph: StepGraph) -> list[tuple[Phase, Lane, TransferKind]]:
    """The model's own transfers."""
    found = [t for t in graph.transfers() if not t.of_parameters]
    return [(t.stamp.phase, t.stamp.lane, t.record.kind) for t in found]


def test_they_are_stamped_with_what_they_do() -> None:
    """The gather in forward, its derivative in backward; each with one wait."""
    graph = after("stamp", centred)
    assert own(graph) == [
        (Phase.FORWARD, Lane.GATHER, TransferKind.ALL_GATHER),
        (Phase.BACKWARD, Lane.REDUCE, TransferKind.REDUCE_SCATTER),
    ]
    gather, reduce = graph.transfers()
    assert gather.record.full_bytes == reduce.record.full_bytes == 8 * WIDTH * 4
    assert gather.record.size == reduce.record.size == 8
    assert stamp_of(gather.wait).role is stamp_of(reduce.wait).role is Role.WAIT


def test_they_stay_out_of_regions_and_buckets() -> None:
    graph = after("prefetch", centred)
    transfers = list(graph.transfers())
    assert {bool(transfer.of_parameters) for transfer in transfers} == {False, True}
    for transfer in transfers:
        assert not is_lowerable(transfer.launch)
        assert not is_lowerable(transfer.wait)
        if not transfer.of_parameters:
            assert not transfer.stamp.bucket


def test_a_coalesced_one_has_one_wait() -> None:
    graph = after("stamp", of(Both, 4, WIDTH))
    (transfer,) = graph.transfers()
    assert len(transfer.parts) == len(transfer.tensors) == transfer.record.num_tensors == 2
    assert not graph.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.wait_tensor.default
    )


def test_one_that_nothing_joins_is_joined() -> None:
    """Whoever reads it reads what has arrived."""
    graph = trace(of(Summed, 4, WIDTH))
    (wait,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.wait_tensor.default
    )
    launch = wait.all_input_nodes[0]
    wait.replace_all_uses_with(launch)
    graph.graph.erase_node(wait)
    with fake_ranks(8):
        run(graph, up_to("stamp"))
    (transfer,) = graph.transfers()
    assert list(launch.users) == [transfer.wait]


def test_they_cost_what_they_take() -> None:
    """To the schedule, which takes them to be waited for at once, and to its simulation."""
    wire_us = 1000.0
    costs = FixedCosts(0.0, latency_us=wire_us)
    graph = after("prefetch", centred)
    assert sum(Inventory(graph, costs, cut=True, fuses=True).unit_us) == len(own(graph)) * wire_us
    assert simulate(graph, costs, fuses=True).busy_us == {
        "gather": sum(t.stamp.lane is Lane.GATHER for t in graph.transfers()) * wire_us,
        "reduce": sum(t.stamp.lane is Lane.REDUCE for t in graph.transfers()) * wire_us,
    }


def test_they_are_in_the_digest() -> None:
    """A rank whose model sums instead of gathering runs another graph."""
    graph = after("stamp", of(Summed, 4, WIDTH))
    plain = after("stamp", of(lambda: nn.Linear(WIDTH, WIDTH, bias=False), 4, WIDTH))
    assert collectives_digest(graph) != collectives_digest(plain)


def train(name: str, zero: int, door: str, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Job: two steps of the model, sharded and as it is, on this rank's rows."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    theirs = MODELS[name]().double()
    ours = fxzero.shard(copy.deepcopy(theirs), zero=zero)
    batches = [
        torch.randn(4, WIDTH, dtype=torch.float64) + dist.get_rank() + step for step in range(2)
    ]
    options = {"lower_regions": {"backend": backend}}
    theirs_by, ours_by = (torch.optim.SGD(m.parameters(), lr=1e-4) for m in (theirs, ours))
    step = fxzero.compile_step(ours, ours_by, options=options) if door == "step" else None
    run = torch.compile(ours, backend="fxzero", options=options)
    for batch in batches:
        theirs(batch).backward()
        for parameter in theirs.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        theirs_by.step()
        theirs_by.zero_grad()
        if step is not None:
            step(batch)
        else:
            run(batch).backward()
            ours_by.step()
            ours_by.zero_grad()
    full = [getattr(p, "full_tensor", lambda p=p: p)() for p in ours.parameters()]
    return [p.detach() for p in full], [p.detach() for p in theirs.parameters()]


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("backend", ["eager", *exhaustive("inductor")])
@pytest.mark.parametrize("door", ["loop", "step"])
@pytest.mark.parametrize(("name", "zero"), [("gathered", 3), ("summed", 1), ("coalesced", 3)])
def test_training_is_eager_training(
    ranks: Pools, world: int, name: str, zero: int, door: str, backend: str
) -> None:
    """Their places among the passes' own transfers are the same on every rank."""
    for ours, theirs in ranks(world).run(train, name, zero, door, backend):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()


class Reduced(nn.Module):
    """Adds its layers' results up over ranks, forward and backward, and returns the last."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, width) → scalar, and what nobody but the caller reads."""
        for layer in self.layers:
            x = x + funcol.all_reduce(layer(x), "sum", _world())
        return x.square().mean(), funcol.all_reduce(x.detach(), "sum", _world())


def test_what_gloo_has_brought_ends_behind_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is returned; on other backends nothing is added."""
    for backend in ("fake", "gloo"):
        monkeypatch.setattr(lower_transfers, "backend_of", lambda *_, name=backend: name)
        graph = trace(of(Reduced, 32, 64), zero=0)
        with fake_ranks(8):
            run(graph, up_to("prefetch"))
            released = release_own(graph, fuses=False)
        results = [
            result
            for transfer in graph.transfers()
            if stamp_of(transfer.launch).made_by == "capture"
            for result in transfer.results
        ]
        ends = [
            user
            for result in results
            for user in result.users
            if user.op == "call_function" and stamp_of(user).role is Role.RELEASE
        ]
        assert released == len(ends) == (len(results) - 1 if backend == "gloo" else 0)
        assert all(max(end.args[0][0].users) is end for end in ends)
        verify(graph, {"stamped", "gathered", "cut"}, after="lower_transfers")


def held_by_gloo() -> tuple[int, list[int]]:
    """Job: what a step is simulated to hold, and what several have held."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxzero.shard(Reduced(), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    observers.append(keep)
    settings = {"lower_regions": {"backend": "eager"}, "gather_ahead": {"enabled": False}}
    step = fxzero.compile_step(model, optimizer, lambda out, _: out[0], options=settings)
    batch = torch.randn(512, 64)
    try:
        step(batch, batch)
    finally:
        observers.remove(keep)
    (graph,) = [c.joint for c in found if c.joint is not None]
    memory = simulate_memory(graph, fuses=False)
    held = [
        allocated_peak_bytes(lambda: step(batch, batch)) + memory.resident_bytes for _ in range(4)
    ]
    return memory.peak_bytes, held


def test_gloo_holds_nothing_that_is_over(ranks: Pools) -> None:
    """Its threads let go of tensors when they are scheduled, which may be any time later."""
    for simulated, held in ranks(2).run(held_by_gloo):
        assert max(held) <= simulated
