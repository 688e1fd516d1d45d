"""Which buckets live on disk, what the graph does with them, and what is left on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import fxzero
from fxzero.compiler.compilation import Compilation
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.lanes import ALIGNMENT
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.offload_disk import Stored
from fxzero.runtime import copies
from fxzero.runtime.disk_streams import (
    ReadParams,
    ReadStates,
    StoredUpdate,
    join_write,
    write_states,
)
from fxzero.schedule.simulate import simulate, simulate_memory
from fxzero.transfer import DISK_READ, DISK_WRITE, Pool
from tests.stepping import EAGER, chain_of, compiled_step
from tests.tracing import of_role

DISK: dict[str, Any] = {**EAGER, "memory": "infinity", "disk": {"chunk_bytes": 4096}}
_compiled: dict[str, Compilation] = {}


def compiled(depth: int = 3, options: dict[str, Any] = DISK, **settings: Any) -> Compilation:
    """A step of some linear layers, compiled once."""
    key = repr((depth, options, settings))
    if key not in _compiled:
        _compiled[key] = compiled_step(chain_of(depth, 64, 8), options=options, **settings)
    return _compiled[key]


def on_disk(depth: int = 3, options: dict[str, Any] = DISK, **settings: Any) -> StepGraph:
    """A copy of its scheduled graph."""
    joint = compiled(depth, options, **settings).joint
    assert joint is not None
    return joint.clone()


ALONE = {"zero": 0, "world_size": 1}


def decision_of(depth: int = 3, **settings: Any) -> Stored:
    """What it decided."""
    found = compiled(depth, **settings).context.decisions.made["offload_disk"]
    assert isinstance(found, Stored)
    return found


def downloads(graph: StepGraph) -> list[TransferNodes]:
    """Copies from the device, in launch order."""
    return graph.transfers(name=Lane.D2H.value)


def update_of(graph: StepGraph, params: tuple[str, ...]) -> fx.Node:
    """The update of some parameters."""
    (found,) = (n for n in of_role(graph, Role.UPDATE) if stamp_of(n).params == params)
    return found


def input_of(graph: StepGraph, kind: str) -> fx.Node:
    """The input that is an area of the host's memory."""
    (found,) = (
        node
        for node in graph.graph.find_nodes(op="placeholder")
        if (node.meta.get("fxzero_source") or ("",))[0] == kind
    )
    return found


EVERYWHERE = pytest.mark.parametrize(
    "settings",
    [
        {"zero": 0, "world_size": 1},
        {"zero": 3},
        {"zero": 1, "micro_batches": 4},
        {"zero": 2, "micro_batches": 8, "clip_grad_norm": 1.0},
        {"zero": 3, "precision": "bf16"},
        {"zero": 0, "options": {**DISK, "memory": "states_host", "host_budget": "least"}},
    ],
    ids=str,
)


@EVERYWHERE
def test_an_update_is_read_updated_and_written_in_a_row(settings: dict[str, Any]) -> None:
    """Of all that it changes but step counts; the write is waited for before the step ends."""
    graph = on_disk(**settings)
    updates = of_role(graph, Role.UPDATE)
    assert len(updates) == 3
    for update in updates:
        assert isinstance(update.target, StoredUpdate)
        taken, read, write = update.prev, update.prev.prev, update.next
        assert isinstance(read.target, ReadStates)
        assert write.target is write_states
        assert update.args[6] is taken
        large = [n for n in update.all_input_nodes if stamp_of(n).pool is Pool.DISK]
        assert len(large) == 3
        for launch, resource in ((read, DISK_READ), (write, DISK_WRITE)):
            record = stamp_of(launch).transfer
            assert record is not None
            assert (record.resource, record.full_bytes) == (resource, sum(map(num_bytes, large)))
        (wait,) = write.users
        assert wait.target is join_write
        (join,) = of_role(graph, Role.JOIN)
        assert write < wait < join


@EVERYWHERE
def test_what_the_device_reads_comes_from_disk(settings: dict[str, Any]) -> None:
    """Straight: no copy of it is on the host between two steps, nor on the device."""
    graph = on_disk(**settings)
    brought = [t for t in graph.transfers(name=Lane.READ.value) if t.of_parameters]
    assert brought
    assert not [t for t in graph.transfers(name=Lane.H2D.value) if t.of_parameters]
    for copy in brought:
        assert isinstance(copy.launch.target, ReadParams)
        assert copy.wait.target is copies.join_upload
        assert (copy.record.source, copy.record.target) == (Pool.DISK, Pool.DEVICE)
        assert copy.stamp.params == tuple(k for t in copy.tensors for k in stamp_of(t).params)
    assert not of_role(graph, Role.AHEAD) or all(
        stamp_of(node).lane is not Lane.H2D for node in of_role(graph, Role.AHEAD)
    )


@EVERYWHERE
def test_what_was_promised_is_what_is_simulated(settings: dict[str, Any]) -> None:
    """Bytes on the host and on disk, to the last."""
    graph, decision = on_disk(**settings), decision_of(**settings)
    memory = simulate_memory(graph, fuses=False)
    assert memory.host_bytes == decision.host_bytes
    homes = [n for n in graph.graph.find_nodes(op="placeholder") if stamp_of(n).pool is Pool.DISK]
    assert memory.disk_bytes == sum(map(num_bytes, homes)) <= decision.disk_bytes


def budgeted(budget: int | str, depth: int = 6, **settings: Any) -> dict[str, Any]:
    """Settings of a step with a bound on the host's memory."""
    return {"depth": depth, "options": {**DISK, "host_budget": budget}, **ALONE, **settings}


def test_a_budget_moves_no_more_than_it_must() -> None:
    """From all on the host to all on disk; within the budget at each, and never less room used
    than one bucket more would take."""
    every = decision_of(**budgeted("1TB"))
    least = decision_of(6, **ALONE)
    assert (len(every.updates), len(least.updates)) == (0, 6)
    seen = set()
    step = (every.host_bytes - least.host_bytes) // 5
    for budget in range(least.host_bytes, every.host_bytes + 1, step):
        found = decision_of(**budgeted(budget))
        assert found.host_bytes <= budget
        memory = simulate_memory(on_disk(**budgeted(budget)), fuses=False)
        assert memory.host_bytes == found.host_bytes
        seen.add(len(found.updates))
    assert len(seen) >= 4


def test_buckets_whose_gradients_come_last_stay_on_the_host() -> None:
    """Forward reads them first, and their updates are what the step's end waits for."""
    every = decision_of(**budgeted("1TB"))
    least = decision_of(6, **ALONE)
    found = decision_of(**budgeted((every.host_bytes + least.host_bytes) // 2))
    assert 0 < len(found.updates) < 6
    assert list(found.updates) == list(least.updates[: len(found.updates)])
    graph = on_disk(**budgeted((every.host_bytes + least.host_bytes) // 2))
    on_host = {n.name for n in of_role(graph, Role.UPDATE) if n.target.__name__ == "host_adamw"}  # type: ignore[union-attr]
    assert len(on_host) == 6 - len(found.updates)
    assert "update_layers_0" in on_host


def test_a_budget_that_cannot_be_met() -> None:
    """The least is named, and can be asked for."""
    with pytest.raises(fxzero.ConfigError, match=r"host_budget='1KiB' \(1024 bytes\)") as caught:
        compiled(**budgeted("1KiB"))
    least = decision_of(6, **ALONE).host_bytes
    assert f"{least} bytes are held on the host with 6 of 6 buckets on disk" in str(caught.value)
    assert decision_of(**budgeted(least)).host_bytes == least


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8Gi", "host_budget='8Gi' is no size"),
        ("0", "host_budget='0' is no size"),
        ("120%", "host_budget='120%' is no size"),
    ],
)
def test_a_budget_that_is_no_size(text: str, message: str) -> None:
    """Said before anything is compiled."""
    with pytest.raises(fxzero.ConfigError) as caught:
        fxzero.Config.from_options({"memory": "all_host", "host_budget": text})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_budget": "1GiB"}, "host_budget='1GiB' has no effect: nothing is held on the host"),
        (
            {"memory": "all_host", "disk": {"paths": ["/tmp"]}},
            "has no effect: nothing is held on disk",
        ),
        ({"offload_states": {"delay": 1}}, "delay=1 has no effect: no state is offloaded"),
        ({"offload_states": {"update": "device"}}, "update=device has no effect: no state is off"),
        ({"offload_states": {"ahead": False}}, "ahead=False has no effect: no state is offloaded"),
        (
            {"memory": "states_host", "offload_states": {"delay_after": 3}},
            "delay_after=3 has no effect: no update is late",
        ),
    ],
)
def test_settings_without_effect(options: dict[str, Any], message: str) -> None:
    """A warning; an error under strict."""
    with pytest.raises(fxzero.ConfigError, match=message):
        compiled(options={**EAGER, **options, "strict": True})


def test_what_the_host_holds_does_not_grow_with_depth() -> None:
    """Three buckets' gradients, buffers, and a step count for each parameter."""
    held = [decision_of(depth, **ALONE).host_bytes for depth in (6, 12)]
    assert held[1] - held[0] == 6 * ALIGNMENT


def test_buffers_are_no_larger_than_what_there_is() -> None:
    """A small model does not hold sixteen chunks of the default size."""
    graph = on_disk(options={**EAGER, "memory": "infinity"}, **ALONE)
    assert num_bytes(input_of(graph, "disk_buffers")) == (4 * 3 + 4) * 64 * 64 * 4


def test_a_slow_disk_is_seen_in_the_simulation() -> None:
    """Reads and writes take their resource as long as the throttle says."""
    slow = {**DISK, "throttle": {"read": "1MB/s", "write": "2MB/s"}}
    compilation = compiled(options=slow, zero=0, world_size=1)
    assert compilation.joint is not None
    found = simulate(compilation.joint, compilation.context.costs, fuses=False)
    states = 3 * 3 * 64 * 64 * 4
    params = 3 * 64 * 64 * 4
    reads_us = (states + 2 * params) / 1e6 * 1e6
    assert found.busy_us["read"] == pytest.approx(reads_us, rel=0.2)
    assert found.busy_us["write"] == pytest.approx(states / 2e6 * 1e6, rel=0.2)
    assert found.makespan_us >= reads_us


def test_an_optimizer_without_state() -> None:
    """Parameters go alone."""
    graph = on_disk(optimizer=torch.optim.SGD)
    for update in of_role(graph, Role.UPDATE):
        assert isinstance(update.target, StoredUpdate)
        assert update.target.bucket.names == ()
