"""Ranks of several agents name their run, whatever those before them have left in the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from fxzero._compat import attempts


def names_of(store: HashStore, size: int, late: int = -1) -> list[str]:
    """What each rank calls the run; one of them may come late."""
    found = [""] * size

    def join(rank: int) -> None:
        if rank == late:
            time.sleep(0.3)
        found[rank] = attempts.agree_on_name(store, rank, size)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_all_ranks_agree_again_and_again() -> None:
    """Each run has a name of its own: fewer ranks, more, the first or the last of them late."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=15))
    seen: set[str] = set()
    for size, late in ((2, -1), (2, 1), (1, -1), (3, 2), (3, 0), (2, 0)):
        (name,) = set(names_of(store, size, late))
        assert name
        assert name not in seen
        seen.add(name)


def test_a_rank_that_never_comes() -> None:
    """Though one of its number has been there before."""
    store = HashStore()
    names_of(store, 2)
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(TimeoutError, match=r"rank 0 of 2 has waited .* Have all agents"):
        attempts.agree_on_name(store, 0, 2)
    with pytest.raises(TimeoutError, match="rank 1 of 2"):
        attempts.agree_on_name(store, 1, 2)


def test_one_agent_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to be asked."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert attempts.attempt(None, 0, 4) == "fxzero attempt 3 of 4"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr(attempts, "_agreed", [])
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    name = attempts.attempt(store, 0, 1)
    assert name == attempts.attempt(store, 0, 1) != "fxzero attempt 3 of 4"
