"""What belongs to no unit: sums over micro-steps, norms, updates, rows of the batch.

    … unit; join r; unit …    →    … unit; join r; update; unit …

A follower runs as soon as what it reads is there and what it changes has been read, between two
units, so that no region is split by it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from fxzero.graph import Phase, Role
from fxzero.graph.aliases import readers
from fxzero.graph.stamps import BESIDE_COMPUTE, stamp_of
from fxzero.sharding.layout import BETWEEN_STAGES


def is_follower(node: fx.Node) -> bool:
    """Whether a node runs as soon as it can, between two units."""
    stamp = stamp_of(node)
    if stamp.phase is Phase.OPTIMIZER or stamp.lane in BESIDE_COMPUTE:
        return True
    if stamp.role is Role.FINISH:  # of a sum over micro-steps, not of a transfer
        sources = [n for n in node.all_input_nodes if n.op == "call_function"]
        return any(stamp_of(n).role is Role.ACCUMULATE or is_follower(n) for n in sources)
    return stamp.role in (Role.ACCUMULATE, Role.ROWS)


def speaks_with_stages(node: fx.Node) -> bool:
    """Whether a node starts what other stages of a pipeline have a part in, at the end of the step:
    none may wait for it that has something to send."""
    stamp = stamp_of(node)
    between = stamp.transfer is not None and stamp.transfer.axis in BETWEEN_STAGES
    return between and stamp.phase is Phase.OPTIMIZER


def through_followers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and what followers among them read."""
    found: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node in found:
            continue
        found.add(node)
        if node.op == "call_function" and is_follower(node):
            queue += node.all_input_nodes
    return found


def with_followers(
    order: Sequence[fx.Node],
    followers: Sequence[fx.Node],
    boundaries: Collection[fx.Node],
    first: Collection[str] = (),
) -> list[fx.Node]:
    """Put each follower where what it reads is there, and what it changes has been read.

    Args:
        boundaries: the nodes of `order` before which there is room.
        first: keys of parameters whose updates go before others that are ready too.
    """
    missing = {node: _awaited(node) for node in followers}
    for node, needed in missing.items():
        if order and speaks_with_stages(node):
            needed.add(order[-1])
    waiting: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, needed in missing.items():
        for source in needed:
            waiting[source].append(node)
    chosen = set(first)
    rank = {node: (chosen.isdisjoint(stamp_of(node).params), i) for i, node in enumerate(followers)}
    ready = [rank[node] for node, needed in missing.items() if not needed]
    heapq.heapify(ready)
    out: list[fx.Node] = []

    def emit(node: fx.Node) -> None:
        out.append(node)
        for follower in waiting.pop(node, ()):
            missing[follower].discard(node)
            if not missing[follower]:
                heapq.heappush(ready, rank[follower])

    def flush() -> None:
        while ready:
            emit(followers[heapq.heappop(ready)[1]])

    for node in order:
        if node in boundaries:
            flush()
        emit(node)
    flush()
    assert len(out) == len(order) + len(followers), "followers wait for each other"
    return out


def _awaited(node: fx.Node) -> set[fx.Node]:
    """What must run before a follower: its sources, and all readers of what it changes."""
    needed = {n for n in node.all_input_nodes if n.op == "call_function"}
    if stamp_of(node).role is Role.UPDATE:
        changed = [
            source
            for source in node.all_input_nodes
            if source.op == "placeholder" and stamp_of(source).phase is not Phase.OPTIMIZER
        ]
        needed |= {reader for reader in readers(*changed) if reader < node}
    return needed - {node}
