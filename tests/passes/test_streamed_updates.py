"""What comes to the device for an update there, when, and what goes back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import fxzero
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.passes.streamed_updates import Streamed, streamed_of
from fxzero.runtime import copies, updates
from fxzero.runtime.ahead import Take
from fxzero.schedule.simulate import simulate, simulate_memory
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool
from tests.passes.test_offload_states import ONE_PROCESS, compiled, offloaded, uploads
from tests.stepping import EAGER
from tests.tracing import of_role

DEVICE: dict[str, Any] = {**EAGER, "offload_states": {"share": 1.0, "update": "device"}}


def streamed(depth: int = 3, **settings: Any) -> StepGraph:
    """A scheduled step of some linear layers whose state streams through the device."""
    return offloaded(depth, DEVICE, **settings)


def streams(depth: int = 3, **settings: Any) -> list[Streamed]:
    """What streams in it."""
    return streamed_of(streamed(depth, **settings))


@pytest.mark.parametrize("settings", [ONE_PROCESS, {}], ids=["one process", "stage 3 on 8 ranks"])
def test_state_comes_in_for_its_update_and_goes_back(settings: dict[str, Any]) -> None:
    """Both moments of AdamW, and nothing that compute reads."""
    found = streams(**settings)
    assert len(found) == 3
    for up, update, back in found:
        assert update.target is updates.adamw
        assert stamp_of(update).lane is Lane.COMPUTE
        names = [node.meta["fxzero_source"][2] for node in up.tensors]
        assert names == ["exp_avg", "exp_avg_sq"]
        params, _, state, *_ = update.args
        assert [node.op for node in params] == ["placeholder"]
        assert stamp_of(params[0]).pool is Pool.DEVICE
        assert [part[0] for part in state[:2]] == list(up.parts)
        assert stamp_of(state[2][0]).pool is Pool.DEVICE  # step counts
        assert list(back.launch.args[:2]) == [list(up.parts), up.tensors]
        for copy, resource, pools in (
            (up, PCIE_UP, (Pool.HOST, Pool.DEVICE)),
            (back, PCIE_DOWN, (Pool.DEVICE, Pool.HOST)),
        ):
            assert copy.record.resource == resource
            assert (copy.record.source, copy.record.target) == pools
            assert copy.record.full_bytes == 2 * num_bytes(params[0])


def test_two_updates_have_something_on_the_device() -> None:
    """One comes in while one goes back; the next begins when the one before is back."""
    found = streams(5)
    assert found[0].up.launch < found[0].up.wait < found[0].update < found[0].back.launch
    for before, after in pairwise(found):
        assert before.back.launch < after.up.launch < after.up.wait < after.update
    for before, after in zip(found, found[2:], strict=False):
        assert before.back.wait < after.up.launch
    memory = simulate_memory(streamed(5), fuses=False)
    own = found[0].up.record.full_bytes
    state_bytes = memory.by_kind()["optimizer_state"]
    assert own <= state_bytes - 5 * 4 <= 2 * own  # five step counts stay


def test_the_first_begins_in_the_last_backward() -> None:
    """Of several micro-steps: none before it has use for it."""
    graph = streamed(micro_batches=4)
    (first, *_) = streamed_of(graph)
    computed = [n for n in graph.nodes(role=Role.COMPUTE) if n < first.up.launch]
    *_, last = (n for n in computed if stamp_of(n).phase is not Phase.OPTIMIZER)
    assert stamp_of(last).micro_step == 3


def test_masters_of_a_lower_precision_live_on_the_host() -> None:
    """Compute reads copies that stay on the device, which are copied anew once masters are back."""
    graph = streamed(precision="bf16")
    read = [copy for copy in uploads(graph) if isinstance(copy.launch.target, Take)]
    assert len(read) == 3
    assert {copy.record.dtype for copy in read} == {torch.bfloat16}
    ahead = {node.args[1]: node for node in of_role(graph, Role.AHEAD)}
    for up, update, back in streamed_of(graph):
        assert [stamp_of(node).pool for node in up.tensors] == [Pool.HOST] * 3
        assert up.tensors[0] in graph.inputs
        assert update.args[0] == [up.parts[0]]
        assert back.launch < ahead[back.launch]


def test_what_is_brought_where_it_is_used_lives_on_the_host() -> None:
    """As `all_host` says, whoever updates it."""
    options = {**DEVICE, "memory": "all_host"}
    graph = offloaded(options=options)
    assert {stamp_of(node).pool for node in graph.inputs} == {Pool.HOST}
    read = [copy for copy in uploads(graph) if copy.stamp.phase is not Phase.OPTIMIZER]
    assert {copy.launch.target for copy in read} == {copies.upload}
    assert len(read) == 5  # the last layer's backward reads what its forward has


def test_what_it_says_of_itself() -> None:
    """As many bytes as are on the host, both ways; on the device are parameters and step counts."""
    (notes,) = [r.notes for r in compiled(options=DEVICE).records if r.name == "offload_states"]
    own = 3 * 16 * 16 * 4 // 8
    assert notes["updates"] == 3
    assert notes["host_bytes"] == notes["up_bytes"] == notes["down_bytes"] == 2 * own


def test_an_optimizer_without_state() -> None:
    """Nothing is there to move."""
    with pytest.warns(UserWarning, match="update=device moves nothing"):
        graph = offloaded(options=DEVICE, optimizer=_plain_sgd)
    assert streamed_of(graph) == []


def _plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_what_is_on_disk_is_updated_on_the_host() -> None:
    """Both cannot be."""
    with pytest.raises(fxzero.ConfigError, match="update=device and host_budget=least"):
        fxzero.Config.from_options({"memory": "infinity", "offload_states": {"update": "device"}})


def test_a_place_that_there_is_not() -> None:
    """The nearest right one is named."""
    with pytest.raises(fxzero.ConfigError, match="did you mean 'device'"):
        fxzero.Config.from_options({"offload_states": {"update": "devices"}})


def test_slow_lanes_are_all_that_the_step_waits_for() -> None:
    """Both ways of the bus are used at once: what goes back takes no time of its own."""
    slow = {**DEVICE, "throttle": {"h2d": "10KB/s", "d2h": "10KB/s"}}
    compilation = compiled(8, slow, **ONE_PROCESS)
    assert compilation.joint is not None
    found = simulate(compilation.joint, compilation.context.costs, fuses=False)
    up_us, down_us = found.busy_us["h2d"], found.busy_us["d2h"]
    assert up_us == pytest.approx(down_us)
    assert found.makespan_us < 1.15 * up_us + up_us / 8
