"""What an error of the transport means: which rank is gone, and what this one waited for."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fxzero.errors import FxZeroError, RankLostError, RanksDisagreeError
from fxzero.ranks.arrivals import who_is_missing
from fxzero.ranks.places import Place, transfer_of, user_line_of
from fxzero.ranks.status import Status
from fxzero.ranks.watch import Watch, current, run_name, transfers

P = ParamSpec("P")
T = TypeVar("T")

_GLOO = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|pair closure|Read error|"
    r"Write error|Timed out waiting|Connection refused|Socket closed"
)


def explained(error: BaseException) -> BaseException:
    """What an error of the transport means: which rank is gone, and what this one waited for.

    Args:
        error: anything that was raised while a graph ran.

    Returns:
        A `RankLostError` or `RanksDisagreeError` for an error of gloo's; others as they are.
    """
    watch = current()
    if isinstance(error, FxZeroError) or watch is None:
        if watch is not None and isinstance(error, RanksDisagreeError):
            watch.fail(str(error))
        return error
    if not isinstance(error, RuntimeError) or not _GLOO.search(str(error)):
        return error
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    bucket = transfer_of(frames, transfers())
    place = Place("fxzero", run_name(), user_line_of(sys._getframe()), bucket)
    diagnosis = watch.diagnosis or _find_lost(watch)
    watch.has_raised = True
    if diagnosis.startswith("ranks wait"):
        return RanksDisagreeError(diagnosis)
    text = diagnosis if watch.diagnosis else f"{diagnosis}\n  rank {watch.rank} {place}\n({error})"
    watch.fail(f"lost a rank: {diagnosis}")
    return RankLostError(text)


def explaining(kernel: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose errors of the transport are `explained`."""

    @functools.wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return kernel(*args, **kwargs)
        except RuntimeError as error:
            better = explained(error)
            if better is not error:
                raise better from error
            raise

    return call


def _find_lost(watch: Watch) -> str:
    """Which ranks do not beat any more, seen over a few beats."""
    began = time.monotonic()
    watch.ask(4 * watch.limits.beat)
    while time.monotonic() < watch.asked_until and not watch.diagnosis:
        time.sleep(watch.limits.sample / 10)
        if watch.ended() and time.monotonic() > began + watch.limits.beat:
            break
    if watch.diagnosis:
        return watch.diagnosis
    ended, seen = watch.ended(), dict(watch.seen)
    heard = began + 1.5 * watch.limits.beat
    silent = [
        rank
        for rank in range(watch.size)
        if rank not in (watch.rank, *ended) and (rank not in seen or seen[rank][1] < heard)
    ]
    said = [f"rank {r} has ended: {why.splitlines()[0]}" for r, why in sorted(ended.items())]
    if watch.heard_at < began:
        closed = ", ".join(map(str, _closed(watch)))
        said.append(
            f"rank {closed} has died, and the store does not answer"
            if closed
            else "the store does not answer: the rank that keeps it, or the launcher, is gone"
        )
    elif silent and not ended:
        if len(silent) > 1:  # on a busy machine a living rank may miss its beats, and still answer
            silent = [rank for rank in _closed(watch) if rank in silent] or silent
        names = ", ".join(map(str, silent))
        said.append(f"rank {names} has died (killed, out of memory, or crashed: see its output)")
    if not said:  # the process group's own patience is at an end: everybody lives
        there = Status(kind="fxzero", name=run_name())
        said.append(who_is_missing(there, watch.rank, watch.heard(), watch.size, watch.limits))
    return "; ".join(filter(None, said)) or "a rank has closed its connections"


def _closed(watch: Watch) -> list[int]:
    """The ranks whose connections are closed already: to ask them fails at once."""
    found = []
    for rank in range(watch.size):
        if rank != watch.rank and watch.probes is not None:
            began = time.monotonic()
            if not watch.answers(watch.probes, rank):
                if time.monotonic() - began >= watch.limits.probe:
                    break  # it timed out, and that has closed all others
                found.append(rank)
    return found
