"""Ranks that are about to shard different models: an error on all, before anything communicates."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from fxzero.errors import ShardingError
from fxzero.ranks import rendezvous, watch
from tests.parity.harness import Pools
from tests.runtime.test_watch import SOON, Said

on_two_and_three = pytest.mark.parametrize("world", [2, 3])

DIFFERENCES = {
    "depth": "parameter 2.weight: does not exist on rank 1, float32 [4, 4] on rank 0",
    "width": "parameter 0.weight: float32 [5, 4] on rank 1, float32 [4, 4] on rank 0",
    "dtype": "parameter 0.weight: float64 [4, 4] on rank 1, float32 [4, 4] on rank 0",
    "frozen": "parameter 0.bias: float32 [4], frozen on rank 1, float32 [4] on rank 0",
    "stage": "zero: 2 on rank 1, 3 on rank 0",
    "compute dtype": "param_dtype: torch.bfloat16 on rank 1, None on rank 0",
    "reduce dtype": "reduce_dtype: torch.bfloat16 on rank 1, None on rank 0",
    "order": "the parameters' order differs between ranks 1 and 0",
    "nothing": "",
}


def build(difference: str) -> tuple[nn.Module, dict[str, object]]:
    """A model and how to shard it, another one for each difference."""
    width = 5 if difference == "width" else 4
    layers = [nn.Linear(4, width), nn.Linear(width, 4)]
    if difference != "depth":
        layers.append(nn.Linear(4, 4))
    model: nn.Module = nn.Sequential(*layers)
    options: dict[str, object] = {"zero": 3}
    if difference == "dtype":
        model.double()
    elif difference == "frozen":
        layers[0].bias.requires_grad_(False)
    elif difference == "stage":
        options["zero"] = 2
    elif difference == "compute dtype":
        options["param_dtype"] = torch.bfloat16
    elif difference == "reduce dtype":
        options["reduce_dtype"] = torch.bfloat16
    elif difference == "order":
        first = model._modules.pop("0")
        model._modules["0"] = first
    return model, options


def shard_differently(difference: str) -> str:
    """Job: rank 1's model differs; return what was raised. Rank 0 is the first to arrive."""
    rank = dist.get_rank()
    model, options = build(difference if rank == 1 else "nothing")
    time.sleep(0.3 * rank)
    try:
        fxzero.shard(model, **options)  # type: ignore[arg-type]
    except ShardingError as error:
        return str(error)
    return ""


@on_two_and_three
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_models_that_differ(ranks: Pools, world: int, difference: str) -> None:
    """The first difference and the ranks are named, to all of them; equal models go on."""
    messages = ranks(world).run(shard_differently, difference)
    assert len(set(messages)) == 1, messages
    assert DIFFERENCES[difference] in messages[0]
    if difference != "nothing":
        assert "ranks are about to shard different models" in messages[0]
        assert "Build the same model on all ranks" in messages[0]


_ATTEMPTS = itertools.count()


def come_late() -> list[str]:
    """Job: rank 1 needs as long to build its model as it takes rank 0 to be told."""
    watch.start(SOON)
    said = Said()
    store = dist.distributed_c10d._get_default_store()
    key = f"told who is late {next(_ATTEMPTS)}"
    if dist.get_rank() == 1:
        store.wait([key], timedelta(minutes=5))
    elif dist.get_rank() == 0:
        said.then = lambda: store.set(key, "")
    model, _ = build("nothing")
    fxzero.shard(model, zero=3)
    return said.lines


@on_two_and_three
def test_a_rank_that_comes_late(ranks: Pools, world: int) -> None:
    """It is named, and waited for."""
    first, late, *_ = ranks(world).run(with_warnings_after, "1")
    assert not late
    assert "fxzero.shard has waited for 1 s: rank 1 has not called it yet" in first[0]


def with_warnings_after(seconds: str) -> list[str]:
    """Job: `come_late`, under FXZERO_WARN_S."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXZERO_WARN_S", seconds)
        return come_late()


def never_come() -> str:
    """Job: rank 1 shards nothing."""
    if dist.get_rank() == 1:
        return ""
    patience = dist.distributed_c10d._get_default_store().timeout
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(torch.distributed.default_pg_timeout / 1800)
    try:
        return shard_differently("nothing")
    finally:
        store.set_timeout(patience)


@pytest.mark.parametrize("world", [2])
def test_a_rank_that_never_comes(ranks: Pools, world: int) -> None:
    """After the store's own patience, with its name."""
    first, _ = ranks(world).run(never_come)
    assert "rank 1 has not called it yet" in first
    assert "All ranks must call fxzero.shard" in first
    ranks.close()  # the numbers of its models differ from now on


def test_a_single_process_compares_nothing() -> None:
    """There is nobody to compare with: nothing is posted, with a process group or without."""
    assert not dist.is_initialized()
    rendezvous.compare_models({"zero": "3"})
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = store.num_keys()
        rendezvous.compare_models({"zero": "3"})
        assert store.num_keys() == before
    finally:
        dist.destroy_process_group()
