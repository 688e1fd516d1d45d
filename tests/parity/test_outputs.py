"""Compiled graphs that hand out full parameters, and models that must not be copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fxzero
from tests.parity.harness import Pools

OPTIONS = {"lower_regions": {"backend": "eager"}}


def read_in_a_graph(zero: int, rows: int, training: bool) -> tuple[torch.Size, bool]:
    """Compile a function that returns a parameter; compare with the uncompiled read."""
    torch.manual_seed(0)
    full = nn.Linear(8, rows)
    expected = full.weight.detach().clone()
    model = fxzero.shard(full, zero=zero)
    read = torch.compile(lambda: model.weight, backend="fxzero", options=OPTIONS)
    with torch.set_grad_enabled(training):
        weight = read()
    return weight.shape, torch.equal(weight.detach(), expected)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("training", [True, False])
def test_a_graph_may_return_a_full_parameter(
    ranks: Pools, world: int, zero: int, rows: int, training: bool
) -> None:
    """A shard in its place would have another shape on each rank."""
    for shape, equal in ranks(world).run(read_in_a_graph, zero, rows, training):
        assert shape == (rows, 8)
        assert equal


def copy_and_pickle(zero: int) -> list[str]:
    """What copying a sharded model raises."""
    model = fxzero.shard(nn.Sequential(nn.Linear(4, 4)), zero=zero)
    raised = []
    for attempt in (copy.deepcopy, pickle.dumps):
        try:
            attempt(model)
        except fxzero.ShardingError as error:
            raised.append(str(error))
    return raised


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_sharded_model_is_not_copied(ranks: Pools, world: int, zero: int) -> None:
    """A copy would share the original's keys and lose gradients kept by no_sync."""
    for raised in ranks(world).run(copy_and_pickle, zero):
        assert len(raised) == 2
        assert all("state_dict" in message for message in raised)


def batch_norm_in_bf16() -> tuple[torch.dtype, torch.dtype, bool]:
    """Train a step with BatchNorm under bf16 compute."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    fxzero.shard(model, zero=3, param_dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="fxzero", options=OPTIONS)
    output = compiled(torch.randn(4, 8))
    output.float().square().sum().backward()
    finite = all(p.grad.full_tensor().isfinite().all() for p in model.parameters())
    return output.dtype, model[1].running_mean.dtype, bool(finite)


@pytest.mark.parametrize("world", [2])
def test_batch_norm_keeps_its_dtype_under_bf16(ranks: Pools, world: int) -> None:
    """Its statistics stay fp32, and torch takes no mixture of its own tensors."""
    for output, statistics, finite in ranks(world).run(batch_norm_in_bf16):
        assert (output, statistics, finite) == (torch.bfloat16, torch.float32, True)
