"""Parameters that live on from one gather to the next, where memory allows: between ZeRO 2 and 3.

w = wait(gather)[0]; y = mm(x, w); release(w)     w = wait(gather)[0]; y = mm(x, w)
w1 = wait(gather again)[0]; dx = mm(g, w1)    →   dx = mm(g, w)
release(w1)                                       release(w)

The next gather is backward's of the same micro-step, or the next micro-step's: of a group of
micro-steps that follow each other the first then gathers for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from statistics import median

from torch import fx

from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import Lane, set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes

Round = tuple[TransferNodes, ...]
"""Gathers that go together: what is the same one of several micro-steps."""
_FROM_FORWARD = (Phase.BACKWARD, frozenset({Phase.FORWARD}))


def gathered_before(graph: StepGraph, transfers: Iterable[TransferNodes]) -> dict[fx.Node, fx.Node]:
    """By the part of a gather, the same parameter's part of the gather before it.

    A block of a parameter is none: it travels alone so that not all of them are there.
    """
    last: dict[str, fx.Node] = {}
    before: dict[fx.Node, fx.Node] = {}
    for transfer in transfers:
        if not _is_repeatable(graph, transfer):
            continue
        for part in transfer.parts:
            key = stamp_of(part).params[0]
            if key in last:
                before[part] = last[key]
            last[key] = part
    return before


def _is_repeatable(graph: StepGraph, transfer: TransferNodes) -> bool:
    """Whether a transfer gathers parameters that compute reads."""
    stamp = transfer.stamp
    return (
        transfer.of_parameters
        and stamp.lane is Lane.GATHER
        and stamp.phase in (Phase.FORWARD, Phase.BACKWARD)
        and not graph.is_block(transfer)
        and all(any(_readers(result)) for result in transfer.results)
    )


def _readers(result: fx.Node) -> Iterator[fx.Node]:
    """What reads a full parameter."""
    return (user for user in result.users if _role_of(user) is not Role.RELEASE)


def _role_of(node: fx.Node) -> Role | None:
    """What a node is for; None of the output."""
    return stamp_of(node).role if node.op == "call_function" else None


def keepable(graph: StepGraph, transfers: Sequence[TransferNodes]) -> list[Round]:
    """Gathers that repeat the one before them: those with the shortest time between first.

    Where forward and backward run apart, these are backward's that repeat forward's: of what else
    is kept nobody would know when it ends.
    """
    before = gathered_before(graph, transfers)
    place = {node: position for position, node in enumerate(graph.graph.nodes)}
    result_of = {p: r for t in transfers for p, r in zip(t.parts, t.results, strict=True)}
    rounds: dict[object, list[TransferNodes]] = defaultdict(list)
    distances: dict[object, list[int]] = defaultdict(list)
    for transfer in transfers:
        if not transfer.parts or not all(part in before for part in transfer.parts):
            continue
        earlier = [before[part] for part in transfer.parts]
        phases = frozenset(stamp_of(part).phase for part in earlier)
        if graph.loss is None and (transfer.stamp.phase, phases) != _FROM_FORWARD:
            continue
        kind = (transfer.stamp.params, transfer.stamp.phase, phases)
        ends = max(place[user] for part in earlier for user in _readers(result_of[part]))
        begins = min(place[user] for result in transfer.results for user in _readers(result))
        rounds[kind].append(transfer)
        distances[kind].append(begins - ends)
    return [tuple(rounds[kind]) for kind in sorted(rounds, key=lambda k: median(distances[k]))]


def bytes_of(rounds: Iterable[Round]) -> int:
    """The most that is held if all of these are kept."""
    parts = {stamp_of(p).params[0]: p for every in rounds for t in every for p in t.parts}
    return sum(num_bytes(part) for part in parts.values())


def first_of(
    part: fx.Node, before: Mapping[fx.Node, fx.Node], dropped: Container[fx.Node]
) -> fx.Node:
    """What is read instead of a part, if some are dropped."""
    while part in dropped:
        part = before[part]
    return part


def keep(
    graph: StepGraph,
    transfers: Sequence[TransferNodes],
    every: Sequence[TransferNodes],
    *,
    cut: bool,
) -> None:
    """Let what reads a gather read the one before it, and drop it.

    Args:
        transfers: what is dropped.
        every: all transfers of the graph.
        cut: whether forward and backward run apart. Backward then does not release what was
            kept, which a second backward may need, but leaves that to `release_saved`.
    """
    before = gathered_before(graph, every)
    result_of = {p: r for t in every for p, r in zip(t.parts, t.results, strict=True)}
    dropped = {part for transfer in transfers for part in transfer.parts}
    firsts: dict[fx.Node, None] = {}
    for transfer in transfers:
        for part, result in zip(transfer.parts, transfer.results, strict=True):
            first = first_of(part, before, dropped)
            firsts[first] = None
            if result is not part:
                result.replace_all_uses_with(result_of[first])
            part.replace_all_uses_with(
                first, delete_user_cb=lambda user: _role_of(user) is not Role.FINISH
            )
    for first in firsts:
        releases = sorted(user for user in first.users if _role_of(user) is Role.RELEASE)
        for release in releases if cut else releases[:-1]:
            _shorten(graph, release, first)
    for transfer in transfers:
        for node in sorted(
            (*transfer.prepare, transfer.launch, transfer.wait, *transfer.parts, *transfer.finish)
        )[::-1]:
            graph.graph.erase_node(node)


def _shorten(graph: StepGraph, release: fx.Node, kept: fx.Node) -> None:
    """Release all but one."""
    (tensors,) = release.args
    assert isinstance(tensors, (list, tuple))
    left = [node for node in tensors if node is not kept]
    if not left:
        graph.graph.erase_node(release)
        return
    release.args = (left,)
    params = tuple(stamp_of(n).params[0] for n in left if isinstance(n, fx.Node))
    set_stamp(release, stamp_of(release).but(params=params))
