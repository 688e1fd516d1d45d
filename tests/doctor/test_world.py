"""Ranks: what torchrun says, and what ranks tell each other."""

from __future__ import annotations

import pytest
import torch

from fxzero.doctor.verdicts import Checked, Verdict, fail, ok
from fxzero.doctor.world import World, check_sum, told_by_all
from fxzero.errors import ConfigError
from tests.parity.harness import Pools

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun; and gloo sums in a group that is made and left."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert World.of_environment() == World(0, 1, 1)
    checked = check_sum(World(), torch.device("cpu"))
    assert checked == ok("gloo", "an all-reduce of one rank works")
    assert not torch.distributed.is_initialized()


def test_gloo_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that is not there: what to set is said."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent0")
    checked = check_sum(World(), torch.device("cpu"))
    assert checked.verdict is Verdict.FAIL
    assert "GLOO_SOCKET_IFNAME" in checked.advice
    assert not torch.distributed.is_initialized()


def test_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are its launchers'."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    world = World.of_environment()
    assert (world.rank, world.size, world.per_node, world.num_nodes) == (3, 4, 2, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "4"}, "rank 4 is not in a world of 4 ranks"),
        ({"RANK": "-1"}, "RANK='-1': torchrun sets it to a number from 0 on"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE=None"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0'"),
        ({"LOCAL_WORLD_SIZE": "3"}, "not a whole number of hosts of 3 ranks"),
    ],
    ids=str,
)
def test_what_torchrun_never_says(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], message: str
) -> None:
    """Wrong use: one sentence."""
    for name, value in {**TORCHRUN, **changed}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        World.of_environment()
    assert message in str(error.value)


def tell(rank_fails: int) -> list[Checked]:
    """What all ranks come to know, where one has a compiler that does not work."""
    rank = torch.distributed.get_rank()
    own = [ok("torch", f"of rank {rank}")]
    own.append(fail("compiler", "gone", "get one") if rank == rank_fails else ok("compiler", "ok"))
    return told_by_all(World(rank, 2, 2), own)


def test_what_fails_on_another_rank_is_told(ranks: Pools) -> None:
    """With its number, once."""
    first, _ = ranks(2).run(tell, 1)
    assert [c.name for c in first] == ["torch", "compiler", "compiler (rank 1)"]
    assert first[-1].verdict is Verdict.FAIL
    first, _ = ranks(2).run(tell, 0)
    assert [c.name for c in first] == ["torch", "compiler"]
