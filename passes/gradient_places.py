"""Let gradients arrive on the host where others have been used.

    down_0 → bytes 0…4; down_1 → 4…8; down_2 → 0…4, behind u_0

Where all state is in the host's memory its gradients have room beside it. Where it is on disk they
would be what is left there: of updates that do not wait for the norm of all gradients, three
buckets' are there at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.lanes import aligned
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes.updates_on_host import grads_of

IN_FLIGHT = 3
"""Buckets whose gradients are on the host at a time: one is copied there while one is used, and
one waits."""


def waits_for_norm(update: fx.Node) -> bool:
    """Whether an update needs a number that all gradients are in."""
    return any(isinstance(arg, fx.Node) for arg in update.args[4:6])


def gradient_bytes(update: fx.Node) -> int:
    """What an update's gradients take on the host."""
    return sum(aligned(num_bytes(grad)) for grad in grads_of(update))


def shared_bytes(sizes: Sequence[int]) -> int:
    """What gradients of some sizes need that share places, in whatever order they come."""
    return sum(sorted(sizes)[-IN_FLIGHT:])


class Places:
    """Places for gradients in some bytes that are used again and again.

    A place begins behind the last one, or at the beginning where that does not fit, and is that of
    whatever lies there once that has been used.

    Args:
        sizes: of each bucket's gradients, in the order in which they come.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.num_bytes = shared_bytes(sizes)
        self.begins: list[int] = []
        self.behind: list[list[int]] = []
        """By bucket, those whose places it takes."""
        held: list[tuple[int, int, int]] = []
        """Bytes, from one to another, and whose gradients were there last."""
        end = 0
        for number, size in enumerate(sizes):
            begin = end if end + size <= self.num_bytes else 0
            end = begin + size
            self.begins.append(begin)
            self.behind.append(sorted({i for a, b, i in held if a < end and begin < b}))
            left = [(a, min(b, begin), i) for a, b, i in held]
            left += [(max(a, end), b, i) for a, b, i in held]
            held = [*(place for place in left if place[0] < place[1]), (begin, end, number)]


def downloads_of(graph: StepGraph) -> dict[fx.Node, TransferNodes]:
    """By update, the copy that brings its gradients."""
    found = {}
    for copy in graph.transfers(name=Lane.D2H.value):
        for part in copy.parts if copy.of_parameters else ():
            for user in part.users:
                if stamp_of(user).role is Role.UPDATE:
                    found[user] = copy
    return found


def share_places(graph: StepGraph, updates: Sequence[fx.Node]) -> None:
    """Let the gradients of some updates, which do not wait for the norm, share places.

    They go to the end of the staging area, which shrinks by what they no longer take.
    """
    downloads = downloads_of(graph)
    updates = sorted(updates, key=lambda update: downloads[update].launch)
    own = [downloads[update] for update in updates]
    staging = own[0].launch.args[2]
    assert isinstance(staging, fx.Node)
    others = [c for c in graph.transfers(name=Lane.D2H.value) if c not in own]
    kept = _packed(others)
    places = Places(list(map(gradient_bytes, updates)))
    for copy, begin, behind in zip(own, places.begins, places.behind, strict=True):
        offsets, at = [], kept + begin
        for tensor in copy.tensors:
            offsets.append(at)
            at += aligned(num_bytes(tensor))
        copy.launch.update_arg(3, offsets)
        copy.launch.update_arg(5, [updates[i] for i in behind])
    assert graph.fake_mode is not None
    with graph.fake_mode:
        staging.meta["val"] = torch.empty(kept + places.num_bytes, dtype=torch.uint8)


def _packed(copies: list[TransferNodes]) -> int:
    """Put what other copies bring at the beginning of the staging area; return where it ends."""
    places = sorted(
        (int(begin), num_bytes(tensor))
        for copy in copies
        for begin, tensor in zip(copy.launch.args[3], copy.tensors, strict=True)  # type: ignore[arg-type]
    )
    moved: dict[int, int] = {}
    end = gap = 0
    for begin, size in places:  # several values of activations may share a place
        gap = max(gap, begin - end)
        moved[begin] = begin - gap
        end = max(end, begin - gap + aligned(size))
    for copy in copies:
        copy.launch.update_arg(3, [moved[int(b)] for b in copy.launch.args[3]])  # type: ignore[union-attr,arg-type]
    return end
