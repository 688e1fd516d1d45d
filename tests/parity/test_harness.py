"""A pool that swallowed a failure, or waited for ever, would make every parity test worthless."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import fxzero
from tests.parity import harness
from tests.parity.harness import Pools, RanksFailedError

on_two_ranks = pytest.mark.parametrize("world", [2])


@on_two_ranks
def test_results_come_in_the_order_of_ranks(ranks: Pools, world: int) -> None:
    """Positional and keyword arguments reach every rank."""
    assert ranks(world).run(describe, "a", suffix="b") == ["a0b of 2", "a1b of 2"]


def describe(prefix: str, *, suffix: str) -> str:
    """Job."""
    return f"{prefix}{dist.get_rank()}{suffix} of {dist.get_world_size()}"


@on_two_ranks
def test_ranks_live_on(ranks: Pools, world: int) -> None:
    """The second job meets the processes of the first."""
    assert ranks(world).run(os.getpid) == ranks(world).run(os.getpid)


@on_two_ranks
def test_every_traceback_is_shown(ranks: Pools, world: int) -> None:
    """Ranks fail for different reasons."""
    with pytest.raises(RanksFailedError) as caught:
        ranks(world).run(fail)
    for rank in range(world):
        assert f"ZeroDivisionError: on rank {rank}" in str(caught.value)
    assert "in fail" in str(caught.value)
    assert ranks(world).run(dist.get_rank) == [0, 1], "no new pool after a failure"


def fail() -> None:
    """Job."""
    raise ZeroDivisionError(f"on rank {dist.get_rank()}")


@on_two_ranks
def test_rank_that_waits_for_a_failed_one(
    ranks: Pools, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause and the place where the other rank is stuck are both in the message."""
    monkeypatch.setattr(harness, "OTHERS_S", 2.0)
    with pytest.raises(RanksFailedError) as caught:
        ranks(world).run(fail_on_rank_0)
    assert "ZeroDivisionError: on rank 0" in str(caught.value)
    assert "rank 1 waited for a rank that raised" in str(caught.value)
    assert "in fail_on_rank_0" in str(caught.value).partition("rank 1 waited")[2]


def fail_on_rank_0() -> None:
    """Job: rank 1 waits for a collective that never comes."""
    if dist.get_rank() == 0:
        fail()
    dist.barrier()


@on_two_ranks
def test_collective_that_one_rank_leaves_out(ranks: Pools, world: int) -> None:
    """The job that did it fails, with the stack of the rank that hangs."""
    with pytest.raises(RanksFailedError, match=r"gave no answer in 1 s[\s\S]*in barrier"):
        ranks(world, timeout_s=1).run(barrier_on_rank_1)


def barrier_on_rank_1() -> None:
    """Job."""
    if dist.get_rank() == 1:
        dist.barrier()


@on_two_ranks
def test_rank_that_hangs(ranks: Pools, world: int) -> None:
    """A timeout names the rank and shows where it is; no process is left."""
    pids = ranks(world).run(os.getpid)
    with pytest.raises(RanksFailedError, match=r"rank 1 gave no answer in 1 s[\s\S]*in hang"):
        ranks(world, timeout_s=1).run(hang_on_rank_1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def hang_on_rank_1() -> None:
    """Job."""
    if dist.get_rank() == 1:
        time.sleep(3600)


@on_two_ranks
def test_rank_that_dies(ranks: Pools, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segmentation fault is a failed test, not a hang."""
    monkeypatch.setattr(harness, "GRACE_S", 0.5)
    with pytest.raises(RanksFailedError, match=r"rank 0 raised\nthe process died"):
        ranks(world).run(die_on_rank_0)


def die_on_rank_0() -> None:
    """Job."""
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


@on_two_ranks
def test_unpicklable_result(ranks: Pools, world: int) -> None:
    """What cannot travel is an error that says so."""
    with pytest.raises(RanksFailedError, match="pickle"):
        ranks(world).run(give_a_lambda)


def give_a_lambda() -> object:
    """Job."""
    return lambda: None


@pytest.mark.exhaustive
@on_two_ranks
def test_what_inductor_compiled_is_not_compiled_again(ranks: Pools, world: int) -> None:
    """Not by another pool: all share the folder of the test run."""
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
    ranks(world).run(compile_a_step)
    ranks.close()
    for hits, misses in ranks(world).run(compile_a_step):
        assert hits > 0
        assert misses == 0


def compile_a_step() -> tuple[int, int]:
    """Job: regions that were found on disk, and those that were compiled."""
    counters.clear()
    model = fxzero.shard(torch.nn.Linear(5, 7), zero=1)
    options = {"lower_regions": {"backend": "inductor"}}
    compiled = torch.compile(model, backend="fxzero", options=options)
    compiled(torch.ones(3, 5)).sin().exp().sum().backward()
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
