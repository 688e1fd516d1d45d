"""Waits that do not end: who is missing, and an error instead of a hang.

    beat    every 2 s: this rank's place to the store; while it waits, the others' places from it
    judge   every second: is the main thread blocked in a collective, and will that ever end?

    a rank that is late       a warning after FXZERO_WARN_S (30 s): who, at which line; never more
    one that has stopped      no beat for 20 s, nor does its transport answer: an error
    all wait, not together    every rank blocked for 10 s, idle, in different places: an error
    one that has died         gloo says so, at once; the error says which rank and where
    any of them, timeout_s    all ranks end, those that are elsewhere too: who has arrived, who not,
                              and where each rank's threads are

A thread that looks at the main thread's stack once a second costs the step nothing. A beat needs
Python's global lock, which a rank may lose for long (a large unpickling), so silence alone proves
nothing: a token that every rank has sent beforehand is asked for, and gloo's own thread, which
needs no lock, delivers it from any process that is not stopped. Asking with a time limit is also
what ends the wait: when it passes, gloo raises in whoever uses the same connections.

On NCCL, whose waits are on the GPU, torch's own watchdog ends them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fxzero._compat import default_store, gloo_groups, private_store
from fxzero.ranks.agree import now, tell
from fxzero.ranks.arrivals import Heard, overdue
from fxzero.ranks.busy import Busyness
from fxzero.ranks.dump import stacks, write_flight_record
from fxzero.ranks.places import place_of
from fxzero.ranks.status import Limits, Status, timeout_s

log = logging.getLogger("fxzero")

_PROBE_TAG = 0x5A2
_GRACE_S = 3.0
"""For which a rank that is elsewhere may end by itself once all others do."""
_TOKENS = 16
"""Sent to every peer beforehand: so often can it ask whether this process is alive."""
_VERDICT = "fxzero/watch/verdict"


class Watch:
    """The two threads of a process, and what they know. `start` makes the only one."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.world = dist.group.WORLD
        self.store = private_store()
        self.main = threading.main_thread()
        self.status = Status()
        self.seen: dict[int, tuple[Status, float]] = {}
        """By rank: its last status, and when its beat was last seen to change."""
        self.heard_at = 0.0
        """When the store last answered."""
        self.diagnosis = ""
        self.has_raised = False
        """Whether the main thread has been told, by an error."""
        self.curious = False
        """Whether others' places are wanted."""
        self.asked_until = 0.0
        """Until when the main thread itself wants to know them."""
        self._ended_at = 0
        self._call: FrameType | tuple[int, int] | None = None
        """The collective in which the main thread was last seen."""
        self._stuck: FrameType | None = None
        """Its frame, once it has been there for long enough to look around."""
        self._since = 0.0
        """When the main thread was first seen in its present call."""
        self._work: Busyness | None = None
        """What is done meanwhile, counted since it was seen there again."""
        self._warned_at = 0.0
        self._stop = threading.Event()
        self._wake = threading.Event()
        group = next(iter(gloo_groups()), None)
        self.probes = group if group is not None and group.size() == self.size else None
        token = torch.zeros(1, dtype=torch.uint8)
        self.tokens = [
            (token, self.probes.send([token], peer, _PROBE_TAG))
            for peer in range(self.size)
            for _ in range(_TOKENS)
            if self.probes is not None and peer != self.rank
        ]
        self.threads = [
            threading.Thread(target=self._loop, args=(i, body, period), name=name, daemon=True)
            for i, (name, body, period) in enumerate(
                [
                    ("fxzero-beat", self._beat, limits.beat),
                    ("fxzero-judge", self._judge, limits.sample),
                ]
            )
        ]
        for thread in self.threads:
            thread.start()

    def serves(self, limits: Limits | None) -> bool:
        """Whether this watch is still the right one."""
        alive = self.world is dist.group.WORLD and not self._stop.is_set()
        if limits is None:  # of the environment, or those that somebody has chosen for a while
            return alive and self.limits.timeout == timeout_s()
        return alive and limits == self.limits

    def stop(self, why: str = "") -> None:
        """End the threads; say why to the other ranks first."""
        self.status.ended = self.status.ended or why
        self._stop.set()
        self._wake.set()
        for thread in self.threads:
            thread.join(1.0)
        self.probes, self.tokens = None, []  # or they live longer than their group

    def ask(self, seconds: float) -> None:
        """Let the other ranks' places be read for some time, whatever this rank does."""
        self.asked_until = time.monotonic() + seconds
        self.curious = True
        self._wake.set()

    def fail(self, why: str) -> None:
        """Tell the other ranks that this one has given up the run that it was in."""
        self.status.ended = why
        self._ended_at = now.num_runs
        self._wake.set()

    def _loop(self, index: int, body: Any, period: float) -> None:
        pause = period
        while not self._stop.is_set():
            try:
                body()
                pause = period
            except Exception:  # the store, or the group, may be gone at any time
                pause = min(2 * pause, 30.0)
            if index == 0:
                self._wake.wait(period / 2 if self.curious and pause == period else pause)
                self._wake.clear()
            else:
                self._stop.wait(period)
        if index == 0:
            with contextlib.suppress(Exception):
                self._beat()

    # -- beat

    def _beat(self) -> None:
        self.status.beat += 1
        self.store.set(_key(self.rank), json.dumps(asdict(self.status)))
        if self.curious:
            self.look()
        elif math.isfinite(self.limits.timeout):  # others end a rank that is elsewhere, too
            self._hear_verdict()

    def _hear_verdict(self) -> None:
        if self.store.check([_VERDICT]):
            self.diagnosis = self.diagnosis or self.store.get(_VERDICT).decode()

    def look(self) -> None:
        """Read the other ranks' places, and whether somebody has decided that this is the end."""
        for rank in range(self.size):
            if rank == self.rank or not self.store.check([_key(rank)]):
                continue
            status = Status(**json.loads(self.store.get(_key(rank))))
            before = self.seen.get(rank)
            if before is None or before[0].beat != status.beat:
                self.seen[rank] = (status, time.monotonic())
            else:
                self.seen[rank] = (status, before[1])
        self._hear_verdict()
        self.heard_at = time.monotonic()

    # -- judge

    def _judge(self) -> None:
        if dist.group.WORLD is not self.world:
            self._stop.set()
            return
        blocked_s = self._sample()
        if self.status.ended and now.num_runs > self._ended_at:
            self.status.ended = ""  # somebody caught the error and went on
        if time.monotonic() < self.asked_until:
            return
        if blocked_s < self.limits.look:
            if self.diagnosis and math.isfinite(self.limits.timeout):
                self._end_elsewhere()
            self.curious = False
            self.seen.clear()
            self.heard_at = time.monotonic()
            return
        if not self.curious:
            self.curious = True
            self._wake.set()
            return
        self.diagnosis = (
            self.diagnosis
            or self._deadlock()
            or self._overdue()
            or self._stopped()
            or self._given_up()
        )
        if self.diagnosis:
            self._end()
        elif blocked_s >= self.limits.warn and self.status.kind == "fxzero":
            self._warn(blocked_s)

    def _sample(self) -> float:
        """How long the main thread has been in one call of a collective."""
        frame = sys._current_frames().get(self.main.ident or 0)
        place = place_of(frame, run_name(), transfers())
        clock = time.monotonic()
        # Our own waits are numbered. A wait of torch's is known by its frame object, which keeps
        # what its callers hold for at most one more round: in a graph of ours, activations.
        call = (now.num_runs, now.num_waits) if place.kind == "fxzero" else frame
        same = call is self._call if call is frame else call == self._call
        if not place.waits or not same:
            self._since = clock
            self._warned_at = 0.0
            self._work = None
        elif self._work is None:  # not at once: most waits are over before the next look
            self._work = Busyness([thread.native_id or 0 for thread in self.threads])
        self._call = call if place.waits else None
        blocked_s = clock - self._since if place.waits else 0.0
        self._stuck = frame if blocked_s >= self.limits.look else None
        status = self.status
        status.kind, status.name, status.line = place.kind, place.name, place.line
        status.transfer = place.transfer
        status.idle = self._work is not None and self._work.is_idle()
        status.blocked_s = blocked_s
        return blocked_s

    def _deadlock(self) -> str:
        """Whether every rank waits for the others, in places that have nothing in common."""
        clock = time.monotonic()
        limit = self.limits.deadlock
        ranks = {self.rank: self.status, **{r: s for r, (s, _) in self.seen.copy().items()}}
        fresh = all(clock - at < 3 * self.limits.beat for _, at in self.seen.copy().values())
        if len(ranks) < self.size or not fresh:
            return ""
        if any(not s.place.waits or s.blocked_s < limit or not s.idle for s in ranks.values()):
            return ""
        if len({(s.kind, s.name) for s in ranks.values()}) == 1:
            return ""
        places = "\n".join(f"  rank {r}: {ranks[r].place}" for r in sorted(ranks))
        verdict = (
            f"ranks wait for each other, in different places, and none can go on (for {limit:g} s "
            f"nothing has moved):\n{places}\nWhat communicates must run on all ranks: evaluate, "
            "gather (full_tensor, state dicts, printing a parameter) and step on every rank, and "
            "put only what follows, such as writing a file, under `if rank == 0`."
        )
        return self._decide(verdict)

    def _decide(self, verdict: str) -> str:
        """Tell all ranks that this is the end; what the first of them has said is true."""
        self.store.compare_set(_VERDICT, "", verdict)
        return self.store.get(_VERDICT).decode()

    def _overdue(self) -> str:
        """Whether this rank has waited for as long as it may."""
        if self.status.blocked_s < self.limits.timeout:
            return ""
        verdict = overdue(self.status, self.rank, self.heard(), self.size, self.limits)
        return self._decide(verdict) if verdict else ""

    def heard(self) -> dict[int, Heard]:
        """What is known of the other ranks."""
        clock = time.monotonic()
        return {r: Heard(status, clock - at) for r, (status, at) in self.seen.copy().items()}

    def _stopped(self) -> str:
        """Whether a rank is silent, and its transport too."""
        clock = time.monotonic()
        limit = self.limits.stopped
        silent = [r for r, (_, at) in self.seen.copy().items() if clock - at > limit]
        if clock - self.heard_at > limit:  # whoever keeps the store may be the one
            silent = [r for r in range(self.size) if r != self.rank]
        for rank in silent:
            if self.probes is None:
                log.warning("rank %d has not been heard of for %.0f s", rank, limit)
            elif not self.answers(self.probes, rank):
                last = self.seen[rank][0].place if rank in self.seen else "unknown"
                self.diagnosis = (
                    f"rank {rank} has stopped: nothing was heard of it for {limit:g} s, and its "
                    f"transport does not answer (is the process suspended, or its machine gone?). "
                    f"When last heard of it {last}.\n  rank {self.rank}: {self.status.place}\n"
                    "Start again from a checkpoint."
                )
                return self.diagnosis
            elif rank in self.seen:
                self.seen[rank] = (self.seen[rank][0], time.monotonic())
        if silent:
            self.heard_at = time.monotonic()
        return ""

    def _given_up(self) -> str:
        """Whether a rank has raised, or is done, while this one waits for it."""
        if self.status.blocked_s < self.limits.deadlock or not self.status.idle:
            return ""
        ended = self.ended()
        if not ended:
            return ""
        ranks: dict[str, list[str]] = {}  # those that disagree with each other say the same
        for rank, why in sorted(ended.items()):
            ranks.setdefault(why, []).append(str(rank))
        who = "\n".join(f"rank {', '.join(who)} has ended: {why}" for why, who in ranks.items())
        return f"{who}\n  rank {self.rank}: {self.status.place}, and would wait for ever"

    def answers(self, group: dist.ProcessGroup, rank: int) -> bool:
        """Take one of the tokens that a rank has sent beforehand."""
        try:
            token = torch.empty(1, dtype=torch.uint8)
            group.recv([token], rank, _PROBE_TAG).wait(timedelta(seconds=self.limits.probe))
        except RuntimeError:
            return False
        return True

    def ended(self) -> dict[int, str]:
        """The ranks that said why they will not answer."""
        return {r: status.ended for r, (status, _) in self.seen.copy().items() if status.ended}

    def _warn(self, blocked_s: float) -> None:
        if self._warned_at and blocked_s < 2 * self._warned_at:
            return
        self._warned_at = blocked_s
        others = [
            f"rank {rank} {status.place}" + (f" ({status.ended})" if status.ended else "")
            for rank, (status, _) in sorted(self.seen.copy().items())
            if (status.kind, status.name) != (self.status.kind, self.status.name)
        ]
        missing = [str(r) for r in range(self.size) if r not in self.seen and r != self.rank]
        if missing:
            others.append(f"of rank {', '.join(missing)} nothing is known")
        log.warning(
            "rank %d has waited for %.0f s: %s. Missing: %s",
            self.rank,
            blocked_s,
            self.status.place,
            "; ".join(others) or "nobody; the network is slow",
        )

    def _end_elsewhere(self) -> None:
        """End a rank that others have waited for, by its next wait if there is one soon."""
        self._dump()
        self.fail(self.diagnosis)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not self._stop.is_set() and not self.has_raised:
            self._sample()
            if self._call is not None:
                self._break_connections()
                return
            self._stop.wait(self.limits.sample / 4)
        if not self.has_raised and not self._stop.is_set():
            log.critical("rank %d is where no error reaches it, and ends here", self.rank)
            os.abort()
        self._stop.set()

    def _dump(self) -> None:
        """Say why this rank ends, and where it was."""
        text = stacks(self.rank, self.threads)
        log.error("%s\n%s\n%s", self.diagnosis, text, write_flight_record(self.rank))

    def _end(self) -> None:
        """Raise in the main thread: by a receive that times out at once, on its connections."""
        self._dump()
        self.fail(self.diagnosis)
        # Closed connections wake the other ranks: each should have said why by then, but for one
        # that says nothing any more.
        deadline = time.monotonic() + 4 * self.limits.beat
        while time.monotonic() < deadline and not all(
            heard.status.ended or heard.silent_s > 4 * self.limits.beat
            for heard in self.heard().values()
        ):
            time.sleep(self.limits.sample / 4)
        self._break_connections()

    def _break_connections(self) -> None:
        """Let every wait on gloo fail, here and on ranks that wait for this one."""
        # Gloo closes all of a group's connections when a receive times out; one from a rank that
        # has died fails at once and closes none. So each peer is asked, until one is there.
        for group in gloo_groups():
            for peer in range(group.size()):
                if peer == group.rank():
                    continue
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    group.recv([nothing], peer, _PROBE_TAG + 1).wait(timedelta(milliseconds=1))
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if not _is_running(self._stuck, self.main):
                self._stop.set()
                return
            time.sleep(0.05)
        log.critical("rank %d cannot leave its wait, and ends here", self.rank)
        os.abort()


_watch: Watch | None = None


def current() -> Watch | None:
    """The watch of this process, if it has one."""
    return _watch


def start(limits: Limits | None = None) -> None:
    """Watch this process's waits; `fxzero.shard` calls it. Nothing without other processes.

    Args:
        limits: others than the environment's.

    Raises:
        ConfigError: FXZERO_WARN_S or FXZERO_TIMEOUT_S is no positive number.
    """
    global _watch
    wanted = limits or Limits.from_environment()
    if not dist.is_initialized() or dist.get_world_size() == 1 or default_store() is None:
        return
    if _watch is None:
        atexit.register(_leave)
    elif _watch.serves(limits):
        return
    else:
        _watch.stop()
    _watch = Watch(wanted)


def _leave() -> None:
    if _watch is not None:
        error = getattr(sys, "last_value", None)
        why = "its script is over"
        _watch.stop(why if error is None else f"it raised {type(error).__name__}: {error}")


def silent() -> list[int]:
    """The ranks that were watching, and have not been heard of for longer than the limit.

    For waits of ours that are no collective: each call reads the others' beats.
    """
    if _watch is None:
        return []
    _watch.ask(5 * _watch.limits.beat)
    clock = time.monotonic()
    found = []
    for rank, (status, at) in _watch.seen.copy().items():
        if clock - at > _watch.limits.stopped:
            if _watch.probes is not None and not _watch.answers(_watch.probes, rank):
                found.append(rank)
            else:
                _watch.seen[rank] = (status, clock)
    return found


def run_name() -> str:
    """What fxzero is running now: equal on ranks at the same point."""
    if now.account is None:
        return "no graph"
    return f"run {now.num_runs}, {tell(now.account.about)}"


def transfers() -> dict[str, str]:
    """Names of buckets, by what the running graph's code calls their launches."""
    return now.account.about.get("transfers", {}) if now.account is not None else {}


def _key(rank: int) -> str:
    return f"fxzero/watch/{rank}"


def _is_running(frame: FrameType | None, thread: threading.Thread) -> bool:
    """Whether a thread is still in a call."""
    current = sys._current_frames().get(thread.ident or 0)
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False
