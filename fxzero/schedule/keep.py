"""Parameters that live on from forward to backward, where memory allows: between ZeRO 2 and 3.

w = wait(gather)[0]; y = mm(x, w); release(w)     w = wait(gather)[0]; y = mm(x, w)
w1 = wait(gather again)[0]; dx = mm(g, w1)    →   dx = mm(g, w)
release(w1)                                       release(w)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.stamps import Lane, set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes

Key = tuple[str, int]
"""A parameter's key, and a micro-step."""


def gathered_in_forward(transfers: Iterable[TransferNodes]) -> dict[Key, fx.Node]:
    """The parts that gathers of forward bring, by parameter."""
    return {
        key_of(part): part
        for transfer in _gathers(transfers, Phase.FORWARD)
        for part in transfer.parts
    }


def _gathers(transfers: Iterable[TransferNodes], phase: Phase) -> list[TransferNodes]:
    return [
        transfer
        for transfer in transfers
        if transfer.of_parameters
        and (transfer.stamp.lane, transfer.stamp.phase) == (Lane.GATHER, phase)
    ]


def key_of(part: fx.Node) -> Key:
    """Whose full parameter a part is, and of which micro-step."""
    stamp = stamp_of(part)
    return stamp.params[0], stamp.micro_step


def keepable(graph: StepGraph, transfers: Sequence[TransferNodes]) -> list[TransferNodes]:
    """Gathers of backward that repeat forward's: those with the shortest time between first.

    A block of a parameter is not kept: it travels alone so that not all of them are there.
    """
    forward = gathered_in_forward(transfers)
    return [
        transfer
        for transfer in _gathers(transfers, Phase.BACKWARD)
        if all(key_of(part) in forward for part in transfer.parts) and not graph.is_block(transfer)
    ]


def keep(
    graph: StepGraph,
    transfers: Sequence[TransferNodes],
    every: Sequence[TransferNodes],
    *,
    cut: bool,
) -> None:
    """Let backward read what forward gathered, and drop backward's own gathers.

    Args:
        transfers: backward's gathers of it.
        every: all transfers of the graph.
        cut: whether forward and backward run apart. Backward then does not release what was
            kept, which a second backward may need, but leaves that to `release_saved`.
    """
    if not transfers:
        return
    forward = {
        key_of(part): (part, result)
        for transfer in _gathers(every, Phase.FORWARD)
        for part, result in zip(transfer.parts, transfer.results, strict=True)
    }
    keys: set[Key] = set()
    for transfer in transfers:
        for part, result in zip(transfer.parts, transfer.results, strict=True):
            key = key_of(part)
            keys.add(key)
            first_part, first_result = forward[key]
            if result is not part:
                result.replace_all_uses_with(first_result)
            part.replace_all_uses_with(
                first_part, delete_user_cb=lambda u: stamp_of(u).role is not Role.FINISH
            )
    for release in list(graph.nodes(role=Role.RELEASE)):
        stamp = stamp_of(release)
        if cut or stamp.phase is Phase.FORWARD:
            _shorten(graph, release, {forward[k][0] for k in keys if k[1] == stamp.micro_step})
    for key in keys:  # halves of a backward, and stages of one rank, have one each
        part, _ = forward[key]
        releases = sorted(user for user in part.users if stamp_of(user).role is Role.RELEASE)
        for release in releases[:-1]:
            _shorten(graph, release, {part})
    for transfer in transfers:
        for node in sorted(
            (*transfer.prepare, transfer.launch, transfer.wait, *transfer.parts, *transfer.finish)
        )[::-1]:
            graph.graph.erase_node(node)


def _shorten(graph: StepGraph, release: fx.Node, kept: set[fx.Node]) -> None:
    """Release all but some."""
    (tensors,) = release.args
    assert isinstance(tensors, (list, tuple))
    left = [node for node in tensors if node not in kept]
    if len(left) == len(tensors):
        return
    if not left:
        graph.graph.erase_node(release)
        return
    release.args = (left,)
    params = tuple(stamp_of(n).params[0] for n in left if isinstance(n, fx.Node))
    set_stamp(release, stamp_of(release).but(params=params))
