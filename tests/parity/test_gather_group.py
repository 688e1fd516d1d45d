"""`fxzero.shard(…, gather_group=True)`: what is gathered has a process group of its own.

The same bits as through the mesh's own group, in both doors, and eager's numbers with them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxzero
from fxzero._compat import resolve_process_group
from fxzero.compiler.compilation import Compilation
from fxzero.graph import Lane
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES, Batch
from tests.parity.sharded import FLOAT64, TIGHT, batches_of
from tests.parity.training import (
    STEPS,
    Tensors,
    adamw,
    assert_same,
    build,
    full_parameters,
    rows_of_rank,
    train,
)
from tests.tiers import exhaustive
from tests.tracing import observed

EXAMPLE = EXAMPLES["gpt"]
OPTIONS = {"lower_regions": {"backend": "eager"}}


@pytest.mark.parametrize(
    ("world", "zero", "door"),
    [(2, 1, "loop"), (2, 3, "step"), *exhaustive((4, 3, "loop"))],
)
def test_gathers_in_a_group_of_their_own(ranks: Pools, world: int, zero: int, door: str) -> None:
    """Gathers go through another group of the same ranks, and nothing else changes."""
    ranks(world).run(train_in_two_ways, zero, door)


def train_in_two_ways(zero: int, door: str) -> None:
    """Job: four ranks are a mesh of two by two."""
    batches = batches_of(EXAMPLE, STEPS)
    mesh = None
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    together, groups = train_door(zero, door, batches, mesh, gather_group=False)
    apart, groups_apart = train_door(zero, door, batches, mesh, gather_group=True)
    assert_same(apart, together, rtol=0)
    expected = train(build(EXAMPLE, FLOAT64), EXAMPLE.loss, batches).parameters
    assert_same(apart, expected, TIGHT)

    assert groups[Lane.GATHER] <= groups[Lane.REDUCE], f"one group was asked for: {groups}"
    assert groups_apart[Lane.REDUCE] == groups[Lane.REDUCE], (groups, groups_apart)
    (own,) = groups_apart[Lane.GATHER]
    assert own not in groups_apart[Lane.REDUCE], groups_apart
    (common,) = groups[Lane.GATHER]
    assert members(own) == members(common)


def members(group: str) -> list[int]:
    """The ranks of a process group."""
    return sorted(dist.get_process_group_ranks(resolve_process_group(group)))


def train_door(
    zero: int, door: str, batches: list[Batch], mesh: DeviceMesh | None, *, gather_group: bool
) -> tuple[Tensors, dict[Lane, set[str]]]:
    """Parameters after some steps, and by lane the groups through which they were made."""
    model = build(EXAMPLE, FLOAT64)
    fxzero.shard(model, zero=zero, mesh=mesh, gather_group=gather_group)
    compilations: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        compilations.append(compilation)

    mine = [rows_of_rank(batch) for batch in batches]
    with observed(keep):
        if door == "loop":
            compiled = torch.compile(model, backend="fxzero", options=OPTIONS)
            train(compiled, EXAMPLE.loss, mine)  # type: ignore[arg-type]
        else:
            optimizer = adamw(model.parameters())
            step = fxzero.compile_step(model, optimizer, loss_of, options=OPTIONS)
            for batch in mine:
                step(batch["tokens"], batch["targets"])
    found: dict[Lane, set[str]] = {Lane.GATHER: set(), Lane.REDUCE: set()}
    for compilation in compilations:
        assert compilation.joint is not None
        for transfer in compilation.joint.transfers():
            if transfer.of_parameters:
                found[transfer.stamp.lane].add(transfer.record.group)
    return full_parameters(model), found


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The example's loss, of what its model returns."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_one_rank_alone_asks_for_it(ranks: Pools) -> None:
    """Ranks that gather through different groups would wait for ever."""
    ranks(2).run(ask_on_one_rank)


def ask_on_one_rank() -> None:
    """Job."""
    with pytest.raises(fxzero.ShardingError, match="gather_group"):
        fxzero.shard(build(EXAMPLE, FLOAT64), zero=3, gather_group=dist.get_rank() == 0)
