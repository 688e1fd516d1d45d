"""A shard's state is its rank's: another rank refuses it, full states are cut into rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fxzero
from fxzero.errors import ShardingError
from tests.parity.harness import Pools
from tests.parity.sharded import on_two_ranks
from tests.parity.training import assert_same, full_optimizer_state, full_parameters

sharded_stages = pytest.mark.parametrize("zero", [1, 2, 3])


def trained(zero: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with uneven shards and a scalar, after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    fxzero.shard(model, zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (model(torch.ones(2, 4, dtype=torch.float64)) * model.scale).square().sum().backward()
    optimizer.step()
    return model, optimizer


def load_rank_0s(folder: str, zero: int, what: str, weights_only: bool) -> str:
    """Job: rank 0 saves, all load; return what was raised."""
    model, optimizer = trained(zero)
    state: Any = {"model": model, "optimizer": optimizer}[what].state_dict()
    path = Path(folder) / f"{what}-{zero}-{weights_only}.pt"
    if dist.get_rank() == 0:
        torch.save({"epoch": 3, "state": state}, path)
    dist.barrier()
    try:
        loaded = torch.load(path, weights_only=weights_only)
        {"model": model, "optimizer": optimizer}[what].load_state_dict(loaded["state"])
    except ShardingError as error:
        return str(error)
    return ""


@on_two_ranks
@sharded_stages
@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_the_state_of_another_rank(
    ranks: Pools, world: int, tmp_path: Path, zero: int, what: str, weights_only: bool
) -> None:
    """It is refused with the calls that do it right; its own rank loads it."""
    own, other = ranks(world).run(load_rank_0s, str(tmp_path), zero, what, weights_only)
    assert own == ""
    assert "the rank at (0,) of a mesh of (2,), and rank 1 is at (1,)" in other
    for call in ("dcp.save", "full_state_dict=True", "a file of its own"):
        assert call in other


def send_a_state(zero: int) -> str:
    """Job: rank 0 broadcasts its state as an object."""
    model, _ = trained(zero)
    box: list[Any] = [model.state_dict() if dist.get_rank() == 0 else None]
    try:
        dist.broadcast_object_list(box)
    except ShardingError as error:
        return str(error)
    return ""


@on_two_ranks
def test_a_state_that_is_sent(ranks: Pools, world: int) -> None:
    """To another rank: the same."""
    own, other = ranks(world).run(send_a_state, 3)
    assert own == ""
    assert "this state is a shard" in other


def load_own_files(zero: int) -> None:
    """Job: every rank saves and loads what is its own."""
    model, optimizer = trained(zero)
    before = full_parameters(model), full_optimizer_state(model, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    other, others = trained(zero, seed=1)
    parameters, moments = torch.load(file)
    other.load_state_dict(parameters)
    others.load_state_dict(moments)
    assert_same(full_parameters(other), before[0], 0.0)
    assert_same(full_optimizer_state(other, others), before[1], 0.0)


@on_two_ranks
@sharded_stages
def test_every_rank_a_file_of_its_own(ranks: Pools, world: int, zero: int) -> None:
    """Goes round bit by bit, moments included."""
    ranks(world).run(load_own_files, zero)


def load_full(zero: int) -> None:
    """Job: load a plain model's state into a sharded one, and a gathered state."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain.register_parameter("scale", nn.Parameter(torch.tensor(3.0, dtype=torch.float64)))
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    model, _ = trained(zero)
    model.load_state_dict(plain.state_dict())
    assert_same(full_parameters(model), expected, 0.0)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    other, _ = trained(zero, seed=1)
    other.load_state_dict(gathered)
    assert_same(full_parameters(other), expected, 0.0)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        other.load_state_dict({**gathered, "0.weight": torch.ones(2, 2)})


@on_two_ranks
@sharded_stages
def test_a_full_state(ranks: Pools, world: int, zero: int) -> None:
    """Each rank takes its rows, the last one fewer."""
    ranks(world).run(load_full, zero)


def saved_by_safetensors(folder: str, zero: int) -> list[str]:
    """Job: what is raised, and what the call that the error names has written."""
    model, _ = trained(zero)
    path = Path(folder) / f"{zero}.safetensors"
    said = []
    for save, what in ((save_file, model.state_dict()), (save_model, model)):
        with pytest.raises(ShardingError) as caught:
            save(what, path)
        said.append(str(caught.value))
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        save_file(whole, path)
    dist.barrier()
    expected = full_parameters(model)
    assert_same(load_file(path), expected, rtol=0)
    return said


@on_two_ranks
@sharded_stages
def test_safetensors_of_shards(ranks: Pools, world: int, tmp_path: Path, zero: int) -> None:
    """Refused on every rank, with the call that is right."""
    for said in ranks(world).run(saved_by_safetensors, str(tmp_path), zero):
        assert all("full_state_dict=True" in text and "fxzero export" in text for text in said)
