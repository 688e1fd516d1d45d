"""What tells the processes of a run from those before it that torchrun has restarted.

torchrun's store lives on, and in it what they have left: addresses of ranks, what they were about
to do. (torch 2.11 to 2.13 take it for a new store.) One agent counts its restarts; several, of
which one may be new, have counts of their own, so that their ranks agree on a name:

    every rank    joins/RANK = a name of its own               again and again, until …
    rank 0        roll = a new name, and who has joined
    every rank    agreed/NAME/RANK, where the roll has it      what others have left is in no roll
    rank 0        go/NAME, once all have agreed
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
_agreed: list[str] = []
"""What this process's run is called: one name, for as long as it lives."""


def attempt(store: Any, rank: int, size: int) -> str:
    """A prefix for keys of this run alone. Among several agents all ranks call it.

    Args:
        store: that all ranks share, of whatever prefix.

    Raises:
        TimeoutError: some ranks have not come for as long as the store waits.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"fxzero attempt {restarts} of {os.environ.get('WORLD_SIZE', '1')}"
    if not _agreed:
        _agreed.append(f"fxzero attempt {agree_on_name(store, rank, size)}")
    return _agreed[0]


def agree_on_name(store: Any, rank: int, size: int) -> str:
    """One name for all ranks that are alive, whatever others have left in the store.

    Raises:
        TimeoutError: see `attempt`.
    """
    mine = uuid.uuid4().hex
    store.set(f"fxzero/joins/{rank}", mine)
    patience: timedelta = store.timeout
    deadline = time.monotonic() + patience.total_seconds()
    pause, roll = _FIRST_PAUSE_S, _Roll(store, rank, size)
    while time.monotonic() < deadline:
        name = roll.lead() if rank == 0 else roll.follow(mine)
        if name:
            return name
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    raise TimeoutError(
        f"rank {rank} of {size} has waited for {patience.total_seconds():.0f} s for all ranks "
        "to join the process group. Have all agents of torchrun started theirs?"
    )


class _Roll:
    """Who is there, as rank 0 says."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.name = ""
        self.joined: list[str] = []

    def lead(self) -> str:
        """On rank 0: call the roll, anew if somebody has joined since; its name once all agree."""
        keys = [f"fxzero/joins/{rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            return ""
        joined = [value.decode() for value in self.store.multi_get(keys)]
        if joined != self.joined:
            self.name, self.joined = uuid.uuid4().hex, joined
            roll = {"name": self.name, "joined": joined}
            self.store.set("fxzero/roll", json.dumps(roll))
        if not self.store.check(
            [f"fxzero/agreed/{self.name}/{rank}" for rank in range(1, self.size)]
        ):
            return ""
        self.store.set(f"fxzero/go/{self.name}", "")
        return self.name

    def follow(self, mine: str) -> str:
        """On others: agree to a roll that has this process; its name once all have."""
        if not self.store.check(["fxzero/roll"]):
            return ""
        roll = json.loads(self.store.get("fxzero/roll"))
        if self.rank >= len(roll["joined"]) or roll["joined"][self.rank] != mine:
            return ""
        if roll["name"] != self.name:
            self.name = roll["name"]
            self.store.set(f"fxzero/agreed/{self.name}/{self.rank}", "")
        return self.name if self.store.check([f"fxzero/go/{self.name}"]) else ""
