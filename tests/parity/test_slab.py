"""The same numbers, whether buckets have places in a slab or come from the allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from fxzero.errors import ConfigError
from fxzero.graph import Lane
from fxzero.passes import slab
from fxzero.runtime import coalesced, collectives
from fxzero.runtime.slab import Places
from tests.parity.harness import Pools
from tests.parity.test_many_micro_batches import trained
from tests.parity.test_schedules import Net as Tied
from tests.parity.test_schedules import tokens
from tests.tiers import exhaustive
from tests.tracing import observed

IN_PLACES = {"slab": {"enabled": True}}
LAY_OUT = slab.lay_out


def with_room(items: Any, held_bytes: Sequence[int]) -> Any:
    """As if the step held much more somewhere else: everything has a place."""
    return LAY_OUT(items, [*held_bytes, 1 << 30])


def placed_in(found: list[Any]) -> int:
    """How many launches have places."""
    notes = [r.notes for c in found for r in c.records if r.name == "slab"]
    return sum(int(note.get("placed", 0)) for note in notes)


def same_step(micro_batches: int, settings: dict[str, Any]) -> None:
    """Job: whole steps, bit by bit."""
    options = settings.pop("options", {})
    expected, _ = trained(micro_batches, options=options, **settings)
    seen: list[Any] = []
    with mock.patch("fxzero.passes.slab.lay_out", with_room), observed(seen.append):
        found, _ = trained(micro_batches, options={**options, **IN_PLACES}, **settings)
    assert placed_in(seen) > 0
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("zero", "micro_batches", "settings"),
    [
        (3, 4, {"clip_grad_norm": 0.1}),
        (2, 7, {}),
        (1, 1, {}),
        *exhaustive((3, 1, {}), (3, 7, {"options": {"bucket": {"min_bytes": 0}}})),
    ],
)
@pytest.mark.parametrize("world", [2, *exhaustive(4)])
def test_whole_steps(
    world: int, zero: int, micro_batches: int, settings: dict[str, Any], ranks: Pools
) -> None:
    options = {**settings.pop("options", {}), "lower_regions": {"backend": "eager"}}
    ranks(world).run(same_step, micro_batches, {"zero": zero, "options": options, **settings})


@pytest.mark.parametrize("memory", ["all_host", "infinity", *exhaustive("states_host", "l2l")])
@pytest.mark.parametrize("world", [2])
def test_copies_to_the_host_are_done_when_a_place_is_given_again(
    world: int, memory: str, ranks: Pools
) -> None:
    options = {"memory": memory, "lower_regions": {"backend": "eager"}}
    ranks(world).run(same_step, 2, {"zero": 3, "options": options})


@pytest.mark.parametrize("backend", ["eager", *exhaustive("inductor")])
@pytest.mark.parametrize("world", [4])
def test_replicas(world: int, backend: str, ranks: Pools) -> None:
    """The sums over replicas are taken in the places of what was received."""
    options = {"lower_regions": {"backend": backend}}
    settings = {"zero": 3, "mesh": (2, 2), "clip_grad_norm": 0.1, "options": options}
    ranks(world).run(same_step, 2, settings)


def loop(options: dict[str, Any], steps: int = 3) -> list[Tensor]:
    """Gradients and parameters of the ordinary loop, whose backward runs twice."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxzero.shard(Tied(), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="fxzero", options=options)
    found: list[Tensor] = []
    for step in range(steps):
        loss = compiled(*tokens(step, dist.get_rank()))
        loss.backward(retain_graph=True)
        loss.backward()
        found += [loss.detach(), *(p.grad.full_tensor().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.full_tensor().detach() for p in model.parameters())]


def same_loop(options: dict[str, Any]) -> None:
    """Job: the loop, bit by bit."""
    expected = loop(options)
    seen: list[Any] = []
    with mock.patch("fxzero.passes.slab.lay_out", with_room), observed(seen.append):
        found = loop({**options, **IN_PLACES})
    assert placed_in(seen) > 0
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", *exhaustive("inductor")])
@pytest.mark.parametrize("world", [2])
def test_the_ordinary_loop(world: int, backend: str, ranks: Pools) -> None:
    options = {"prefetch": {"keep": False}, "lower_regions": {"backend": backend}}
    ranks(world).run(same_loop, options)


def by_the_backend() -> None:
    """Job: gathers by the process group's own coalesced collectives, as on NCCL."""

    def only_reduces(transfer: Any) -> bool:
        return transfer.stamp.lane is Lane.REDUCE

    launched: list[int] = []
    gather = coalesced.gather

    def counted(*args: Any) -> Any:
        launched.append(1)
        return gather(*args)

    settings: dict[str, Any] = {"zero": 3, "options": {"lower_regions": {"backend": "eager"}}}
    expected, _ = trained(1, **settings)
    settings["options"] |= IN_PLACES
    into = {
        **slab.INTO,
        torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default: counted,
    }
    with (
        mock.patch("fxzero.passes.lower_transfers.runs_on_gloo", only_reduces),
        mock.patch("fxzero.passes.slab.lay_out", with_room),
        mock.patch("fxzero.passes.slab.INTO", into),
    ):
        found, _ = trained(1, **settings)
    assert launched
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("world", [2])
def test_a_backend_s_own_collectives(world: int, ranks: Pools) -> None:
    ranks(world).run(by_the_backend)


def into_places() -> None:
    """Job: what the functions bring is what their names say, where they are told."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    memory = torch.full((1024,), 255, dtype=torch.uint8)
    mine = [torch.full((2, 3), rank + 1.0), torch.full((1,), rank + 5, dtype=torch.int64)]
    flight = coalesced.gather(mine, 2, group, memory, 64)
    full, numbers = coalesced.join(flight)
    assert full.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert numbers.tolist() == [5, 6]
    assert full.data_ptr() - memory.data_ptr() == 64
    assert numbers.data_ptr() - memory.data_ptr() == 128
    whole = torch.arange(8.0).view(4, 2) * (rank + 1)
    flight = coalesced.reduce_scatter([whole], "sum", 2, group, memory, 256)
    (rows,) = coalesced.join(flight)
    assert torch.equal(rows, torch.arange(8.0).view(2, 2, 2)[rank] * 3)
    assert rows.data_ptr() - memory.data_ptr() == 256
    gathered = collectives.join(collectives.gather(mine[:1], 2, group, memory, 512))[0]
    assert torch.equal(gathered, full)
    assert gathered.data_ptr() - memory.data_ptr() == 512
    flight = collectives.exchange([whole], 2, group, [False], memory, (704, 0))
    (mean,) = collectives.join_exchange(flight, 2)
    assert torch.equal(mean, rows / 2)
    assert mean.data_ptr() - memory.data_ptr() == 704


@pytest.mark.parametrize("world", [2])
def test_results_are_where_they_shall_be(world: int, ranks: Pools) -> None:
    ranks(world).run(into_places)


def test_places_stand_one_behind_the_other() -> None:
    memory = torch.empty(512, dtype=torch.uint8)
    places = Places(memory, 128)
    first, second = places.take(torch.empty(0, dtype=torch.half), (3, 5)), places.take(memory, (7,))
    assert first.shape == (3, 5)
    assert first.dtype is torch.half
    assert first.is_contiguous()
    assert first.data_ptr() - memory.data_ptr() == 128
    assert second.data_ptr() - memory.data_ptr() == 192
    alone = Places(None, 0).take(nn.Parameter(torch.ones(2)), (4,))
    assert alone.shape == (4,)
    assert not alone.requires_grad


def says_so() -> None:
    """Job: at stage 0 nothing is gathered; in a whole step it is said."""
    settings: dict[str, Any] = {"zero": 0, "options": {"lower_regions": {"backend": "eager"}}}
    settings["options"] |= IN_PLACES | {"strict": True}
    with pytest.raises(ConfigError, match=r"has no effect: nothing is gathered or"):
        trained(1, **settings)


@pytest.mark.parametrize("world", [2])
def test_without_effect(world: int, ranks: Pools) -> None:
    ranks(world).run(says_so)
