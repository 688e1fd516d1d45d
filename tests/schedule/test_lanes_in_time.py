"""What lanes beside compute come to: closed forms, a host's pool, and an arena's size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import fxzero
from fxzero.compiler.compilation import Compilation, observers
from fxzero.cost import FixedCosts
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.lanes import aligned
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.runtime.arena import arena_of
from fxzero.schedule.engine import HOST, Hold, Task, TaskGraph, replay
from fxzero.schedule.simulate import Program, simulate, simulate_memory
from fxzero.schedule.storage import Kind
from fxzero.transfer import PCIE_DOWN, Pool
from tests.passes.test_offload_states import HOST as STATES_HOST
from tests.passes.test_offload_states import ONE_PROCESS, downloads, offloaded, uploads
from tests.stepping import EAGER
from tests.tracing import Chain


def ordered(*tasks: Task) -> TaskGraph:
    """Tasks in the order in which they are issued."""
    return TaskGraph(tasks)


# -- events


def slow_copy_and_update(by_event: bool) -> TaskGraph:
    """Compute, a copy of what it makes, an update by the copy, and compute again."""
    return ordered(
        Task("a", us=10),
        Task("down", Lane.D2H, 30, after=(0,), resource=PCIE_DOWN, by_event=by_event),
        Task("update", Lane.HOST, 5, after=(1,), resource=HOST, by_event=by_event),
        Task("b", us=10),
    )


def test_a_task_by_event_does_not_hold_up_compute() -> None:
    """Its own resource waits for what it needs."""
    found = replay(slow_copy_and_update(by_event=True), range(4))
    assert found.start_us == [0, 10, 40, 10]
    assert found.compute_us == 20
    assert found.makespan_us == 45
    assert found.stalls == {}


def test_another_task_does() -> None:
    """Compute, which issues it, waits until it may start."""
    found = replay(slow_copy_and_update(by_event=False), range(4))
    assert found.start_us == [0, 10, 40, 40]
    assert found.compute_us == 50
    assert found.stalls == {2: (Lane.D2H, 30)}


def test_what_a_task_by_event_takes_away_from_compute_counts() -> None:
    """From when it is issued on."""
    graph = slow_copy_and_update(by_event=True)
    tasks = [replace(t, host_us=3) if t.name == "update" else t for t in graph.tasks]
    found = replay(ordered(*tasks), range(4))
    assert found.start_us == [0, 10, 40, 13]


def test_a_resource_does_one_thing_after_the_other() -> None:
    """By events too."""
    lane = {"lane": Lane.HOST, "resource": HOST, "by_event": True}
    first, second = Task("u", us=20, **lane), Task("v", us=20, **lane)  # type: ignore[arg-type]
    found = replay(ordered(first, second, Task("a", us=5)), range(3))
    assert found.start_us == [0, 20, 0]


# -- a pipeline


def pipeline(units: int, compute_us: float, copy_us: float, update_us: float) -> TaskGraph:
    """Each unit's gradient is copied, and updates its parameter; a join waits for all."""
    tasks: list[Task] = []
    for i in range(units):
        first = 3 * i
        lane: dict[str, Any] = {"by_event": True}
        tasks += [
            Task(f"unit {i}", us=compute_us),
            Task(f"down {i}", Lane.D2H, copy_us, after=(first,), resource=PCIE_DOWN, **lane),
            Task(f"update {i}", Lane.HOST, update_us, after=(first + 1,), resource=HOST, **lane),
        ]
    updates = tuple(range(2, 3 * units, 3))
    return TaskGraph((*tasks, Task("join", after=updates)))


@pytest.mark.parametrize("units", [1, 2, 7])
@pytest.mark.parametrize("us", [(10, 3, 4), (3, 10, 4), (3, 4, 10), (5, 5, 5), (6, 0, 9)])
def test_units_copies_and_updates_are_a_pipeline(units: int, us: tuple[float, ...]) -> None:
    """One passes through all three, and the others follow at the pace of the slowest."""
    compute_us, copy_us, update_us = us
    graph = pipeline(units, compute_us, copy_us, update_us)
    found = replay(graph, range(len(graph)))
    expected = sum(us) + (units - 1) * max(us)
    assert found.makespan_us == found.compute_us == expected
    assert found.exposed_us == expected - units * compute_us
    assert {lane for lane, _ in found.stalls.values()} == {Lane.HOST}
    simulated = Program(graph).run()
    assert (simulated.makespan_us, simulated.exposed_us) == (expected, found.exposed_us)


# -- a step

LAYER_US, DOWN_US, UPDATE_US = 10.0, 50.0, 70.0


def costs(graph: StepGraph) -> FixedCosts:
    """The same for every matrix product, copy and update."""

    def compute_us(nodes: Any) -> float:
        products = sum("mm" in str(node.target) for node in nodes)
        updates = sum(stamp_of(node).role is Role.UPDATE for node in nodes)
        return LAYER_US * products + UPDATE_US * updates

    return FixedCosts(compute_us, latency_us=DOWN_US)


@pytest.mark.parametrize("depth", [2, 5])
def test_a_chain_of_layers_whose_parameters_come_in_each_step(depth: int) -> None:
    """Copies up, one behind the other, ahead of forward; copies down and updates behind backward.

    Forward's last layer waits for its copy; then backward's first layer makes a gradient in two
    products.
    """
    options = {**STATES_HOST, "offload_states": {"ahead": False}}
    graph = offloaded(depth, options, **ONE_PROCESS)
    found = simulate(graph, costs(graph), fuses=False)
    forward_us = depth * DOWN_US + LAYER_US
    behind_us = DOWN_US + depth * UPDATE_US
    assert found.makespan_us == pytest.approx(forward_us + 2 * LAYER_US + behind_us)
    products = depth + 2 * depth - 1
    assert found.busy_us == pytest.approx(
        {
            "h2d": depth * DOWN_US,
            "d2h": depth * DOWN_US,
            "host": depth * UPDATE_US,
            "compute": products * LAYER_US,
        }
    )
    assert found.exposed_us == pytest.approx(found.makespan_us - products * LAYER_US)
    assert set(found.exposed_by) == {"h2d", "d2h", "host"}


@pytest.mark.parametrize("depth", [2, 5])
def test_copies_behind_updates_are_there_for_the_next_step(depth: int) -> None:
    """All but the last one, which is of the first layer: forward waits for that."""
    graph = offloaded(depth, **ONE_PROCESS)
    found = simulate(graph, costs(graph), fuses=False)
    forward_us = DOWN_US + depth * LAYER_US
    behind_us = DOWN_US + depth * UPDATE_US
    assert found.makespan_us == pytest.approx(forward_us + 2 * LAYER_US + behind_us)
    assert found.busy_us["h2d"] == pytest.approx(depth * DOWN_US)
    assert found.exposed_by["h2d"] == pytest.approx(DOWN_US)


def test_copies_and_updates_run_on_lanes_of_their_own() -> None:
    """A row of a trace for each, in which nothing overlaps."""
    graph = offloaded(4, **ONE_PROCESS)
    spans = simulate(graph, costs(graph), fuses=False).spans
    for lane in (Lane.H2D, Lane.D2H, Lane.HOST):
        own = sorted((s.start_us, s.start_us + s.us) for s in spans if s.lane is lane)
        assert len(own) == 4
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))


# -- memory


def test_a_pool_of_its_own() -> None:
    """What the host holds is not in the device's peak."""
    on_host = Hold(1000, (1,), Pool.HOST, kind=Kind.GRADIENTS.value)
    on_device = Hold(10, (1,), kind=Kind.GRADIENTS.value)
    resident = (Hold(5, kind="inputs"), Hold(70, pool=Pool.HOST, kind="parameters"))
    graph = ordered(Task("a", us=1, holds=(on_host, on_device)), Task("b", us=1))
    memory = Program(graph, resident=resident).memory()
    assert memory.peak_bytes == 15
    assert memory.resident_bytes == 5
    assert memory.host_bytes == 1070
    assert memory.by_kind() == {"gradients": 10, "inputs": 5}


def bytes_on_host(graph: StepGraph) -> int:
    """Of inputs."""
    found = (n for n in graph.graph.find_nodes(op="placeholder"))
    return sum(aligned(num_bytes(n)) for n in found if stamp_of(n).pool is Pool.HOST)


@pytest.mark.parametrize("settings", [ONE_PROCESS, {"zero": 3}, {"zero": 1, "micro_batches": 2}])
def test_optimizer_state_leaves_the_device(settings: dict[str, Any]) -> None:
    """The host holds it, its parameters, and gradients on their way."""
    here = simulate_memory(offloaded(options=EAGER, **settings), fuses=False)
    graph = offloaded(**settings)
    there = simulate_memory(graph, fuses=False)
    own = sum(num_bytes(param) for param in graph.inputs)
    staging = sum(c.record.full_bytes for c in downloads(graph))
    assert here.host_bytes == 0
    assert here.by_kind()[Kind.OPTIMIZER_STATE] == 2 * own + 3 * 4
    assert there.host_bytes == bytes_on_host(graph) == 3 * own + 3 * 64 + staging
    assert Kind.OPTIMIZER_STATE not in there.by_kind()
    assert there.resident_bytes == here.resident_bytes - 2 * own - 3 * 4
    assert there.by_kind()[Kind.PARAMETERS] == own  # their copies, from step to step


def test_copies_of_one_step_end_with_it() -> None:
    """Nothing of a parameter is resident without `ahead`."""
    options = {**STATES_HOST, "offload_states": {"ahead": False}}
    kept = simulate_memory(offloaded(**ONE_PROCESS), fuses=False)
    graph = offloaded(options=options, **ONE_PROCESS)
    new = simulate_memory(graph, fuses=False)
    copied = sum(copy.record.full_bytes for copy in uploads(graph))
    assert kept.resident_bytes - new.resident_bytes == copied
    assert new.peak_bytes <= kept.peak_bytes


def test_a_gradient_is_held_until_it_has_landed() -> None:
    """Two are on their way while backward goes on: without a wait they would end at once."""
    graph = offloaded(6, **ONE_PROCESS)
    gradient, *others = (copy.record.full_bytes for copy in downloads(graph))
    assert set(others) == {gradient}
    held = dict(simulate_memory(graph, fuses=False).curve)
    for node in list(graph.nodes(role=Role.RELEASE)):
        graph.graph.erase_node(node)
    without = dict(simulate_memory(graph, fuses=False).curve)
    more = {name: held[name] - without[name] for name in without}
    assert max(more.values()) == 2 * gradient
    at_launch = [more[copy.launch.name] for copy in downloads(graph)]
    assert at_launch == [0, *[gradient] * 5]


@pytest.mark.parametrize("width", [8, 24])
def test_the_hosts_memory_is_the_arenas_size(width: int) -> None:
    """But for what it is rounded up by, a cache line for each tensor."""
    torch._dynamo.reset()
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    model = Chain(3, width)
    optimizer = torch.optim.AdamW(model.parameters())
    observers.append(keep)
    try:
        step = fxzero.compile_step(model, optimizer, options=STATES_HOST)
        step(torch.randn(4, width))
    finally:
        observers.remove(keep)
    (graph,) = [c.joint for c in found if c.joint is not None]
    arena = arena_of(optimizer)
    assert arena is not None
    assert arena.num_bytes == simulate_memory(graph, fuses=False).host_bytes
    assert arena.staging.nbytes == 3 * width * width * 4
    torch._dynamo.reset()
