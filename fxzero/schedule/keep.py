"""Parameters that live on from forward to backward, where memory allows: between ZeRO 2 and 3.

w = wait(gather)[0]; y = mm(x, w); release(w)     w = wait(gather)[0]; y = mm(x, w)
w1 = wait(gather again)[0]; dx = mm(g, w1)    →   dx = mm(g, w)
release(w1)                                       release(w)
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.stamps import Lane, set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes

Key = tuple[str, int]
"""A parameter's key, and a micro-step."""


def gathered_in(
    graph: StepGraph, phase: Phase = Phase.FORWARD
) -> dict[Key, tuple[fx.Node, fx.Node]]:
    """The parts that a phase's gathers bring and what compute reads of each, by parameter."""
    found = {}
    for transfer in graph.transfers(phase=phase, name=Lane.GATHER.value):
        for part, result in zip(transfer.parts, transfer.results, strict=True):
            if transfer.of_parameters:
                found[key_of(part)] = (part, result)
    return found


def key_of(part: fx.Node) -> Key:
    """Whose full parameter a part is, and of which micro-step."""
    stamp = stamp_of(part)
    return stamp.params[0], stamp.micro_step


def keepable(graph: StepGraph) -> list[TransferNodes]:
    """Gathers of backward that repeat forward's: those with the shortest time between first."""
    forward = gathered_in(graph, Phase.FORWARD)
    again = graph.transfers(phase=Phase.BACKWARD, name=Lane.GATHER.value)
    return [
        t for t in again if t.of_parameters and all(key_of(part) in forward for part in t.parts)
    ]


def keep(graph: StepGraph, transfers: list[TransferNodes], *, cut: bool) -> None:
    """Let backward read what forward gathered, and drop backward's own gathers.

    Args:
        cut: whether forward and backward run apart. Backward then does not release what was
            kept, which a second backward may need, but leaves that to `release_saved`.
    """
    forward = gathered_in(graph, Phase.FORWARD)
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
    set_stamp(release, replace(stamp_of(release), params=params))
