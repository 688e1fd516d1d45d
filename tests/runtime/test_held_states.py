"""Optimizer state that is elsewhere than its parameters, and comes back for who steps himself.

Fake tensors stand for a device that has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fxzero import _compat
from fxzero.inspect.capture import fake_ranks
from fxzero.runtime import held_states
from fxzero.runtime.held_states import give_back_before_steps, hold, hold_all
from fxzero.sharding.sharded_value import ShardedValue, read_of_all_ranks

CPU, GPU = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def _no_values() -> Iterator[None]:
    """Tensors can be moved from anywhere to anywhere."""
    with _compat.fake_tensors():
        yield


def test_what_is_there_stays_what_it_is() -> None:
    """The same tensor."""
    value = torch.empty(3)
    state = {"exp_avg": value}
    assert hold(state, "exp_avg", CPU) is value
    assert state["exp_avg"] is value


def test_what_is_elsewhere_is_moved() -> None:
    """The optimizer has it from then on; what is no tensor, or counts steps, is as it was."""
    state = {"exp_avg": torch.empty(3), "step": torch.empty(()), "name": "w"}
    hold_all(state, GPU, counts=False)
    devices = {k: v.device for k, v in state.items() if isinstance(v, torch.Tensor)}
    assert devices == {"exp_avg": GPU, "step": CPU}
    hold_all(state, GPU)
    assert state["step"].device == GPU  # type: ignore[union-attr]
    assert state["name"] == "w"


def test_of_a_shard_both_say_where_it_is() -> None:
    """The part, and what stands for all ranks'."""
    with fake_ranks(2):
        with _compat.real_tensors():
            mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(torch.empty(3, 4), mesh, [Shard(0)], run_check=False)
        state = {"exp_avg": value}
        read_of_all_ranks(state)
        local = hold(state, "exp_avg", GPU)
        moved = state["exp_avg"]
        assert type(moved) is ShardedValue
        assert (local.device, moved.device, moved.shape) == (GPU, GPU, value.shape)


def test_state_is_with_its_parameters_when_somebody_steps() -> None:
    """Of optimizers whose steps hold it elsewhere, and of no others."""
    parameter = nn.Parameter(torch.empty(3, device=GPU))
    optimizer, other = (torch.optim.SGD([parameter], momentum=0.9) for _ in range(2))
    for one in (optimizer, other):
        one.state[parameter] = {"momentum_buffer": torch.empty(3)}
    give_back_before_steps(optimizer)
    for one in (optimizer, other):
        held_states._before_step(one)
    assert optimizer.state[parameter]["momentum_buffer"].device == GPU
    assert other.state[parameter]["momentum_buffer"].device == CPU
