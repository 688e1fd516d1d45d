"""Who has come to a collective, and who has not: what is said when a wait has taken too long.

rank 0   waits in run 7, step graph (gather.forward.1)      arrived
rank 1   is busy at train.py:20 in validate: …              has not
rank 2   nothing was heard of it for 19 s                   has not
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fxzero.ranks.status import Limits, Status


@dataclass(frozen=True)
class Heard:
    """What is known of a rank."""

    status: Status
    silent_s: float
    """For how long it has said nothing."""


_SILENT_BEATS = 3
"""A rank that has said nothing for so long is silent. Others are heard from a wait's `look` on:
of the shortest timeout that leaves three and a half beats."""


def overdue(mine: Status, rank: int, others: Mapping[int, Heard], size: int, limits: Limits) -> str:
    """What has kept a rank waiting for as long as its timeout; empty if it may go on waiting.

    It may where all have come and somebody still moves data, or writes a checkpoint to a disk.

    Args:
        mine: this rank's own status, which waits.
        others: those of which something is known.
        size: how many ranks there are.
    """
    if mine.blocked_s < limits.timeout:
        return ""
    arrived, missing = _sort(mine, rank, others, size, limits)
    everybody = [mine, *(heard.status for heard in others.values())]
    if not missing and (mine.kind == "checkpoint" or not all(s.idle for s in everybody)):
        return ""
    late = "\n".join(missing) or (
        "  nobody is missing, and nothing moves: has a message been lost, or is the network down?"
    )
    return (
        f"timeout_s={limits.timeout:g} has passed: rank {rank} {mine.place}\n"
        f"  arrived: rank {', '.join(map(str, arrived))}\n{late}\n"
        "All ranks end here, and each has its stacks in its log: look first at those that have "
        "not arrived. If one may be as late as that, allow more by "
        "fxzero.init_distributed(timeout_s=...) or FXZERO_TIMEOUT_S."
    )


def who_is_missing(
    mine: Status, rank: int, others: Mapping[int, Heard], size: int, limits: Limits
) -> str:
    """The ranks that have not come to where this one waits, in one line; empty if all have."""
    _, missing = _sort(mine, rank, others, size, limits)
    return "; ".join(line.strip() for line in missing)


def _sort(
    mine: Status, rank: int, others: Mapping[int, Heard], size: int, limits: Limits
) -> tuple[list[int], list[str]]:
    """The ranks that have arrived, and a line for each that has not."""
    arrived, missing = [rank], []
    for other in (r for r in range(size) if r != rank):
        heard = others.get(other, Heard(Status(), math.inf))
        silent = heard.silent_s > _SILENT_BEATS * limits.beat
        is_there = (heard.status.kind, heard.status.name) == (mine.kind, mine.name)
        if is_there and not silent and not heard.status.ended:
            arrived.append(other)
        else:
            missing.append(f"  has not arrived: rank {other}: {_about(heard, silent)}")
    return sorted(arrived), missing


def _about(heard: Heard, silent: bool) -> str:
    """What a rank does instead."""
    status = heard.status
    if status.ended:
        return f"has ended: {status.ended.splitlines()[0]}"
    if not math.isfinite(heard.silent_s):
        return "nothing was ever heard of it"
    if silent:
        return (
            f"nothing was heard of it for {heard.silent_s:.0f} s (suspended, its machine gone, or "
            f"in a long call of C); before that it {status.place}"
        )
    return str(status.place)
