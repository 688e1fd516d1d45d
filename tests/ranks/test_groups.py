"""Which processes share a parameter."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fxzero import ShardingError, init_distributed
from fxzero.inspect.capture import fake_ranks
from fxzero.ranks.groups import Group, axes_of, backend_of, resolve_mesh
from fxzero.sharding.layout import AxisRole, Layout
from fxzero.transfer import TransferKind

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No torchrun."""
    for name in _TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_single_process_stays_one(no_launcher: pytest.MonkeyPatch) -> None:
    """Nothing is made."""
    assert init_distributed("cpu") is None
    assert resolve_mesh(None, "cpu") is None
    assert not dist.is_initialized()


def test_half_an_environment_is_an_error(no_launcher: pytest.MonkeyPatch) -> None:
    """It names what is missing and what was found."""
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("MASTER_PORT", "1")
    with pytest.raises(ShardingError) as caught:
        init_distributed("cpu")
    assert str(caught.value) == (
        "cannot join a process group: WORLD_SIZE, MASTER_ADDR missing from the environment "
        "(found RANK, MASTER_PORT). Start with torchrun, which sets all of them."
    )


def test_an_existing_group_is_used() -> None:
    """Whoever made it."""
    with fake_ranks(8, rank=3):
        group = init_distributed()
        assert group is dist.group.WORLD
        mesh = resolve_mesh(None, "cpu")
        assert mesh is not None
        (axis,) = axes_of(mesh)
        assert (axis.size, axis.rank) == (8, 3)
        assert backend_of(axis.name, "cpu") == "fake"
        assert Group.of(mesh.get_group()) == axis


def test_two_axes() -> None:
    """Replicated along the first, sharded along the second."""
    with fake_ranks(8, rank=6):
        mesh = init_device_mesh("cpu", (2, 4))
        assert resolve_mesh(mesh, "cpu") is mesh
        across, inside = axes_of(mesh)
        assert (inside.size, inside.rank) == (4, 2)
        assert (across.size, across.rank) == (2, 1)
        assert inside.name != across.name


def test_three_axes_are_refused() -> None:
    """With the way out."""
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        with pytest.raises(
            ShardingError, match=r"a mesh of 3 axes .* mesh\['replicate', 'shard'\]"
        ):
            resolve_mesh(mesh, "cpu")


def test_a_part_of_the_world_is_refused() -> None:
    """The others would never hear of it."""
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))["b"]
        with pytest.raises(ShardingError, match=r"the mesh has 4 ranks \(4,\), the world has 8"):
            resolve_mesh(mesh, "cpu")


def test_what_travels_follows_from_the_roles_of_axes() -> None:
    """Innermost first; along an axis of one rank nothing does."""
    replicate, shard = AxisRole.REPLICATE, AxisRole.SHARD
    gather, scatter, reduce = (
        TransferKind.ALL_GATHER,
        TransferKind.REDUCE_SCATTER,
        TransferKind.ALL_REDUCE,
    )
    with fake_ranks(8, rank=6):
        mesh = init_device_mesh("cpu", (2, 4))
        split, whole = Layout.on(mesh, (replicate, shard)), Layout.on(mesh, (replicate,) * 2)
        assert [(kind, axis.group.size) for kind, axis in split.gathers] == [(gather, 4)]
        assert [(k, a.group.size) for k, a in split.reductions] == [(scatter, 4), (reduce, 2)]
        assert split.placements == (Replicate(), Shard(0))
        assert whole.gathers == ()
        assert [(k, a.group.size) for k, a in whole.reductions] == [(reduce, 4), (reduce, 2)]
        alone = Layout.on(init_device_mesh("cpu", (8, 1)), (replicate, shard))
        assert alone.gathers == ()
        assert [(k, a.group.size) for k, a in alone.reductions] == [(reduce, 8)]
        assert alone.placements == (Replicate(), Shard(0))
