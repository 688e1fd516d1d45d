"""Every graph that runs is the graph that the other ranks run.

    announce(A) ──► every peer of every group that A communicates in
    … A's own compute, its first launches …
    settle()    ◄── compare with what the peers announced, before anything of theirs is used
    give_up(G)  ──► instead of A, where it could not be compiled: the others of G raise, too

An announcement is 16 bytes: a digest of the collectives to come. It travels beside the graph's
first messages, over gloo, and is compared right before the first wait, so that it adds no
latency. Messages of a graph carry its digest in their tag too: those of two graphs never meet.
A collective without a tag (gloo's all-reduce) is launched only after the comparison, because
unequal sizes there end the process; so is all that stages of a pipeline launch, whose graphs may
fail to compile one by one. Collectives that run one by one, outside of a graph, announce and
compare each time: `agree_eagerly`.

Within a group everybody tells everybody, so a disagreement is an error on all of its ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxzero._compat import default_store, resolve_process_group
from fxzero.errors import RanksDisagreeError
from fxzero.ranks.groups import backend_of
from fxzero.ranks.places import user_line_of

_TAG = 0x5A1
"""Of announcements, all graphs' alike: they meet in the order in which graphs run."""
_GAVE_UP = "gave up"
"""The kind of what a rank says that runs nothing."""
_ANSWER_S = 10.0
"""How long a rank that disagrees waits to hear what the others run, for its message."""

DEFAULT_TAG = 0x5A0
"""Of messages outside of any graph."""


@dataclass(frozen=True)
class Account:
    """What one graph, or one eager collective, is to the other ranks."""

    digest: bytes
    """Of the collectives, 16 bytes: equal where they belong together."""
    groups: tuple[str, ...]
    """Names of the process groups in which it communicates."""
    about: dict[str, Any] = field(default_factory=dict)
    """What a person wants to know of it, as JSON can hold it: see `tell`."""
    at_once: bool = False
    """Whether it must be compared before anything is launched."""
    stages: tuple[str, ...] = ()
    """Names of the process groups over which it speaks with ranks that run other graphs."""
    in_common: bytes = b""
    """What is announced there: a digest of what they have in common."""

    @property
    def tag(self) -> int:
        """Of this graph's messages: 31 bits, above the tags that people use."""
        return 0x4000_0000 | int.from_bytes(self.digest[:4], "little") & 0x3FFF_FFFF


def digest_of(text: str) -> bytes:
    """16 bytes that differ where a text does."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class _Announcement:
    """What was sent to the peers of a group, and what they will have sent."""

    __slots__ = ("account", "handles", "heard")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.heard: list[tuple[str, int, Any, Tensor, Tensor]] = []
        """Group, rank in it, handle, announcement, and what it should be."""
        self.handles: list[Any] = []
        own = [(name, account.digest) for name in account.groups]
        for name, digest in (*own, *((name, account.in_common) for name in account.stages)):
            said = _words(digest)
            channel = channel_of(name)
            if channel is None:
                continue
            rank, size = channel.rank(), channel.size()
            for step in range(1, size):
                peer = (rank - step) % size
                theirs = torch.empty_like(said)
                handle = channel.recv([theirs], peer, _TAG)
                self.heard.append((name, peer, handle, theirs, said))
            for step in range(1, size):
                self.handles.append(channel.send([said], (rank + step) % size, _TAG))


class _Now:
    """What this process is running: there is one of it."""

    __slots__ = ("abandoned", "account", "announcement", "num_runs", "num_waits", "tag")

    def __init__(self) -> None:
        self.tag = DEFAULT_TAG
        self.announcement: _Announcement | None = None
        """What was announced and not compared yet."""
        self.account: Account | None = None
        """The graph, or eager collective, that ran last, or is running."""
        self.num_runs = 0
        """How many runs were announced so far: equal on ranks that are at the same point."""
        self.num_waits = 0
        """How many transfers were waited for so far."""
        self.abandoned: list[_Announcement] = []
        """Of graphs that raised. Gloo may still write to their memory."""


now = _Now()

_side_groups: dict[str, Any] = {}


def make_channel(name: str) -> None:
    """Give a group whose backend takes no CPU tensors a way to compare: all its ranks call this.

    `fxzero.shard` calls it for every axis of its mesh. Nothing is made for gloo.
    """
    group = resolve_process_group(name)
    if name in _side_groups or backend_of(name, "cpu") in ("gloo", "fake"):
        return
    members = dist.get_process_group_ranks(group)
    _side_groups[name] = dist.new_group(members, backend="gloo", use_local_synchronization=True)


def channel_of(name: str) -> Any:
    """The gloo group over which the ranks of a group compare; None without one."""
    side = _side_groups.get(name)
    if side is not None:
        return side
    group = resolve_process_group(name)
    return group if group.size() > 1 and backend_of(name, "cpu") == "gloo" else None


@cache
def _words(digest: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digest), dtype=torch.int64)


def begin(account: Account) -> None:
    """Announce a graph that is about to run. What it launches from now on carries its tag."""
    if now.announcement is not None:  # a graph that launched, and waited for nothing
        settle()
    now.num_runs += 1
    now.account = account
    now.tag = account.tag
    now.announcement = _Announcement(account)
    if account.at_once:
        settle()


def end() -> None:
    """A graph's run is over."""
    if now.announcement is not None:
        settle()
    now.tag = DEFAULT_TAG


def abandon() -> None:
    """A graph raised in the middle of its run."""
    if now.announcement is not None:
        now.abandoned.append(now.announcement)
        now.announcement = None
    now.tag = DEFAULT_TAG


def give_up(group: str, why: str) -> None:
    """Tell the ranks of a group that a graph will not run here, for which they would wait.

    Args:
        why: what the others say then.
    """
    if channel_of(group) is None:
        return
    digest = digest_of(f"gave up: {why}")
    store = default_store()
    if store is not None:
        store.set(f"fxzero/accounts/{digest.hex()}", json.dumps({"kind": _GAVE_UP, "why": why}))
    now.num_runs += 1
    now.abandoned.append(_Announcement(Account(digest, (group,))))


def settle() -> None:
    """Compare what was announced last with what the other ranks announced.

    Raises:
        RanksDisagreeError: on all ranks of a group where two differ.
    """
    announcement = now.announcement
    if announcement is None:
        return
    now.announcement = None
    now.num_waits += 1
    now.abandoned.append(announcement)  # should a wait below raise
    others: dict[int, bytes] = {}
    for name, peer, handle, theirs, expected in announcement.heard:
        handle.wait()
        if not torch.equal(theirs, expected):
            member = dist.get_global_rank(resolve_process_group(name), peer)
            others[member] = theirs.numpy().tobytes()
    for handle in announcement.handles:
        handle.wait()
    now.abandoned.pop()
    if others:
        raise RanksDisagreeError(_explain(announcement.account, others))


_eager: dict[tuple[str, str], Account] = {}


def agree_eagerly(group: str, what: str) -> None:
    """See that all ranks of a group are about to do the same, outside of a compiled graph.

    Args:
        group: the name of the process group of the collective to come.
        what: the collective, for a person: ``"gather head.weight"``. Equal where it must be.

    Raises:
        RanksDisagreeError: on all ranks of the group, if they differ.
    """
    account = _eager.get((group, what))
    if account is None:
        about = {"kind": "eager", "what": what}
        account = _eager[group, what] = Account(
            digest_of(f"eager {what}"), (group,), about, at_once=True
        )
    tag = now.tag
    try:
        begin(account)
    finally:
        now.tag = tag


def tell(about: dict[str, Any]) -> str:
    """What a person reads of a graph, or of an eager collective."""
    if about.get("kind") == "eager":
        return f"{about['what']}, outside of compiled graphs"
    names = list(about.get("uses", {}))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    plural = "" if about["collectives"] == 1 else "s"
    settings = "".join(
        f", {name}={value}" for name, value in about.get("settings", {}).items() if value != "None"
    )
    return (
        f"{about['phase']} graph, {about['collectives']} collective{plural}: {shown or '—'}"
        f"{settings}"
    )


def _explain(account: Account, others: dict[int, bytes]) -> str:
    """What the ranks run, and where their ways part."""
    mine = {**account.about, "at": user_line_of(sys._getframe())}
    digests = {account.digest, account.in_common} - {b""}
    theirs = _exchange(digests, mine, set(others.values()))
    gave_up = {
        rank: theirs[digest]["why"]
        for rank, digest in others.items()
        if theirs.get(digest, {}).get("kind") == _GAVE_UP
    }
    if gave_up:
        reasons = "\n".join(f"  rank {rank}: {gave_up[rank]}" for rank in sorted(gave_up))
        return (
            f"this rank would run {tell(mine)}, and others could not compile theirs, without "
            f"which it would wait for ever:\n{reasons}\nNothing was changed. Mend what they name."
        )
    said = {dist.get_rank(): f"{tell(mine)}{_lines(mine, list(theirs.values()))}"}
    for rank, digest in others.items():
        about = theirs.get(digest)
        said[rank] = "something else (it did not say what)"
        if about is not None:
            said[rank] = f"{tell(about)}{_lines(about, [mine])}"
    return (
        "ranks are about to run different things, whose collectives do not belong together "
        f"(run {now.num_runs} on this rank):\n"
        + "\n".join(f"  rank {rank}: {said[rank]}" for rank in sorted(said))
        + "\nNothing was mixed: all of these ranks stop here. Let all ranks take the same path: "
        "decide from what they share (broadcast or all-reduce the condition first), compute every "
        "branch and select with torch.where, give a rank without work an empty share of it, and "
        "call the model equally often, in the same mode, on all ranks."
    )


def _lines(about: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Where a graph ran and was made, and the parameters in it that no other one has."""
    lines = {about.get("at", ""): "at", about.get("line", ""): "made of"}
    uses: dict[str, str] = about.get("uses", {})
    known = {name for other in others for name in other.get("uses", {})}
    alone = [name for name in uses if name not in known]
    text = ""
    if alone and known:
        more = f" and {len(alone) - 4} more" if len(alone) > 4 else ""
        text = f"\n    only here: {', '.join(alone[:4])}{more}"
        first = next((name for name in alone if uses[name]), alone[0])
        lines.setdefault(uses[first], f"{first} is used at")
    return text + "".join(f"\n    {what} {line}" for line, what in lines.items() if line)


def _exchange(
    digests: set[bytes], about: dict[str, Any], wanted: set[bytes]
) -> dict[bytes, dict[str, Any]]:
    """What others say of the digests that they announced, through the store."""
    store = default_store()
    if store is None:
        return {}
    for digest in digests:  # other ranks have heard either one
        store.set(f"fxzero/accounts/{digest.hex()}", json.dumps(about))
    found: dict[bytes, dict[str, Any]] = {}
    deadline = time.monotonic() + _ANSWER_S
    while wanted - found.keys() and time.monotonic() < deadline:
        for other in wanted - found.keys():
            key = f"fxzero/accounts/{other.hex()}"
            if store.check([key]):
                found[other] = json.loads(store.get(key))
        time.sleep(0.02)
    return found
