"""Regions that are planned: no more than the peak needs, and as they would be compiled."""

from __future__ import annotations

import threading
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxzero._compat import fresh_tracing_context, held_bytes, inductor_compile, inductor_wrapper
from fxzero.cost import library_workspace, region_memory
from fxzero.cost.cluster import load_cluster
from fxzero.cost.model import FixedCosts
from fxzero.cost.region_memory import Bounds
from fxzero.errors import ConfigError, FxZeroWarning
from fxzero.graph import StepGraph
from fxzero.inspect.estimate import estimate
from fxzero.inspect.targets import Target
from fxzero.regions.cutout import PIECE
from fxzero.regions.region import ready_to_lower, regions_to_look_at
from fxzero.schedule import region_plans
from fxzero.schedule.region_plans import plan_at_peak
from fxzero.schedule.simulate import simulate_memory, tasks_of
from tests.stepping import chain_of, compiled_step

LOOKED_AT: dict[str, Any] = {"gather_ahead": {"enabled": False}}


class Classes(nn.Module):
    """A loss over many classes: its regions are most of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        self.head = nn.Linear(32, 1024)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(B, 32) and (B,) to a loss."""
        x = self.layers(x).relu()
        return nn.functional.cross_entropy(self.head(x), labels)


def classes() -> Any:
    """A model and its batch."""
    return Classes(), (torch.randn(512, 32), torch.randint(1024, (512,)))


def graph_to_look_at(build: Any = classes) -> StepGraph:
    """A step that is lowered, and not compiled."""
    with regions_to_look_at():
        compilation = compiled_step(build, world_size=2, zero=3, options=LOOKED_AT)
    assert compilation.joint is not None
    return compilation.joint


def plan_for(graph: StepGraph) -> None:
    """Plan what its peak needs, for a CPU."""
    program = tasks_of(graph, FixedCosts(0.0, latency_us=0.0), fuses=True)
    plan_at_peak(graph, program, on_cpu=True)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pieces that were planned, as if none had been before."""
    names: list[str] = []
    plan = region_memory.plan

    def noted(piece: Any, *arguments: Any, **settings: Any) -> None:
        names.append(piece.__name__)
        plan(piece, *arguments, **settings)

    monkeypatch.setattr(region_plans, "plan", noted)
    monkeypatch.setattr(region_memory, "_planned", {})
    return names


@pytest.mark.exhaustive
def test_what_is_planned_is_what_would_be_compiled() -> None:
    """Each region of a step, to the byte."""
    graph = graph_to_look_at()
    pieces = list({n.meta[PIECE]: None for n in graph.graph.nodes if PIECE in n.meta})
    assert len(pieces) > 4
    for piece in pieces:
        found = []
        for lower in (inductor_wrapper, inductor_compile):
            module = piece.module("region")
            inputs = ready_to_lower(module)
            with fresh_tracing_context(graph.fake_mode):
                found.append(held_bytes(lower(module, inputs)))
        assert found[0] == found[1]


def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, planned: list[str]) -> None:
    """No kernel, whatever Inductor asks a compiler."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("this was compiled")

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", never)
    compile_to_module = GraphLowering.compile_to_module
    graph = graph_to_look_at()
    plan_for(graph)
    pieces = [n.meta[PIECE] for n in graph.graph.nodes if PIECE in n.meta]
    known = [piece.__name__ for piece in pieces if piece.facts.get("planned_bytes") is not None]
    assert planned
    assert {*known} == {*planned}
    assert GraphLowering.compile_to_module is compile_to_module


def test_another_thread_compiles_meanwhile(
    monkeypatch: pytest.MonkeyPatch, planned: list[str]
) -> None:
    """It gets a module, and not what is written to be read."""
    from torch._inductor.graph import GraphLowering

    write, others = GraphLowering.codegen, []

    def codegen(self: GraphLowering) -> Any:
        other = SimpleNamespace(_compile_to_module=lambda: "compiled")
        thread = threading.Thread(
            target=lambda: others.append(GraphLowering.compile_to_module(other))  # type: ignore[arg-type]
        )
        thread.start()
        thread.join()
        return write(self)

    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    plan_for(graph_to_look_at())
    assert others
    assert set(others) == {"compiled"}


def test_only_what_the_peak_needs_is_planned(planned: list[str]) -> None:
    """Equal layers once; and nothing where states are all that counts."""
    graph = graph_to_look_at()
    before = simulate_memory(graph, fuses=True)
    plan_for(graph)
    assert 0 < len(planned) == len(set(planned)) <= 3
    after = simulate_memory(graph, fuses=True)
    assert after.peak_bytes != before.peak_bytes
    again = len(planned)
    plan_for(graph)
    assert len(planned) == again
    planned.clear()
    plan_for(graph_to_look_at(chain_of(64, 128, 2)))
    assert planned == []


def test_the_peak_is_that_of_all_plans(monkeypatch: pytest.MonkeyPatch, planned: list[str]) -> None:
    """Planning everything finds no higher one, whatever estimates say: up to twice of them."""
    graph = graph_to_look_at()
    pieces = list({n.meta[PIECE]: None for n in graph.graph.nodes if PIECE in n.meta})
    exact = {piece: region_memory._planned_bytes(piece, graph.fake_mode, True) for piece in pieces}
    for wrong in (1.9, 0.52, 1.0):
        for piece in pieces:
            piece.facts.clear()
            held = exact[piece]
            assert held is not None
            guess = int(held * wrong)
            piece.facts["bounds"] = Bounds(guess // 3, guess, 4 * guess)
        plan_for(graph)
        found = simulate_memory(graph, fuses=True).peak_bytes
        for piece in pieces:
            piece.facts = {"planned_bytes": exact[piece]}
        expected = simulate_memory(graph, fuses=True).peak_bytes
        assert expected <= (1 + region_plans.SURE) * found
        assert found <= (1 + region_plans.SURE) * expected


def test_what_inductor_cannot_plan_stays_an_estimate(
    monkeypatch: pytest.MonkeyPatch, planned: list[str]
) -> None:
    """Nobody has asked for a compiled region."""

    def fails(*_: Any) -> str:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(region_memory, "inductor_wrapper", fails)
    graph = graph_to_look_at()
    before = simulate_memory(graph, fuses=True).peak_bytes
    with pytest.warns(FxZeroWarning, match="Inductor does not plan it .no such operator"):
        plan_for(graph)
    assert planned
    assert simulate_memory(graph, fuses=True).peak_bytes == before


def test_a_convolution_is_run_and_nobody_else_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN takes for it depends on the processor; a large one would take too long."""
    monkeypatch.setattr(library_workspace, "_measured", {})

    def node_of(size: int) -> fx.Node:
        x, weight = torch.empty(4, 32, size, size), torch.empty(32, 32, 3, 3)
        module = make_fx(nn.functional.conv2d, tracing_mode="fake")(x, weight)
        return next(n for n in module.graph.nodes if "convolution" in n.name)

    assert library_workspace.seen_bytes(node_of(16)) is not None
    assert library_workspace.seen_bytes(node_of(1024)) is None
    assert not library_workspace.is_measuring()


def test_sums_over_cpus_are_made_in_place(tmp_path: Path) -> None:
    """As gloo makes them; NCCL's are beside what they are of: one of four buckets and, as the last
    two are on their way at once, one more."""
    build = chain_of(4, 512, 4)
    text = (resources.files("fxzero.conf") / "cluster" / "laptop.yaml").read_text()
    assert load_cluster("laptop").device.type == "cpu"
    (tmp_path / "gpu.yaml").write_text(text.replace("type: cpu", "type: cuda"))
    on_cpu, on_gpu = (
        estimate(
            Target("here", build),
            world_size=2,
            stages=[0],
            cluster=cluster,
            clip_grad_norm=1.0,
            options=LOOKED_AT,
        ).stages[0]
        for cluster in ("laptop", str(tmp_path / "gpu.yaml"))
    )
    bucket = 512 * 512 * 4
    assert on_gpu.peak_bytes - on_cpu.peak_bytes == pytest.approx(2 * bucket, rel=0.02)


def test_a_device_has_a_type_that_torch_knows(tmp_path: Path) -> None:
    """Another one is refused with its name."""
    text = (resources.files("fxzero.conf") / "cluster" / "laptop.yaml").read_text()
    (tmp_path / "tpu.yaml").write_text(text.replace("type: cpu", "type: tpu"))
    with pytest.raises(ConfigError, match=r"device.type='tpu' must be one of"):
        load_cluster(str(tmp_path / "tpu.yaml"))


def test_a_convolution_may_hold_thrice_its_result(planned: list[str]) -> None:
    """A transposed one, which no formula covers: not the layers that follow, where the peak seems
    to be, but this."""

    class Upsampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(16, 64, 2, 2).requires_grad_(False)
            self.inner = nn.Linear(64, 128)
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """(B, 16, H, W) to a loss."""
            x = self.inner(self.up(x).mean((2, 3))).repeat(512, 1)
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

    graph = graph_to_look_at(lambda: (Upsampled(), (torch.randn(8, 16, 32, 32),)))
    before = simulate_memory(graph, fuses=True)
    plan_for(graph)
    assert any(name.startswith("up_forward") for name in planned)
    after = simulate_memory(graph, fuses=True)
    assert not before.peak_node.startswith("up")
    assert after.peak_bytes >= before.peak_bytes
