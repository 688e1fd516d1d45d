"""What must hold of updates that run one step late: what `verify` asks of where they start.

    take(up); start([w], [[m], …]); A(w'); …; down, behind start; late([w], [h], …); ahead(up)

What the step before has left is started once, on the update's own parameters and state, behind all
that looks at them before; from then on nothing reads them but what comes behind the late update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fxzero.graph.belongings import Finding
from fxzero.graph.stamps import Lane, Role, stamp_of
from fxzero.graph.step_graph import StepGraph, TransferNodes


def wrong_starts(graph: StepGraph, down: list[TransferNodes]) -> Iterator[Finding]:
    """Late updates that do not start, start twice, or change what something else reads.

    Args:
        down: copies from the device.
    """
    starts: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes(role=Role.START):
        starts.setdefault(_pending(node), []).append(node)
    late = [node for node in graph.nodes(role=Role.UPDATE) if _pending(node) is not None]
    grads = [copy for copy in down if copy.of_parameters]
    downloads = {user: copy for copy in grads for part in copy.parts for user in part.users}
    for update in late if starts else ():
        found = starts.pop(_pending(update), [])
        if len(found) != 1 or list(found[0].args) != [update.args[0], update.args[2]]:
            yield Finding(
                update,
                f"{update.name} leaves its gradients to the next step, and {len(found)} nodes "
                "start it on its parameters and state",
                "Every late update is started once: fxzero.passes.join_copies.",
            )
            continue
        yield from _read_meanwhile(found[0], update)
        behind: Any = downloads[update].launch.args[5] if update in downloads else ()
        if found[0] not in behind:
            yield Finding(
                update,
                f"the gradients of {update.name} arrive where those of the step before are, which "
                f"{found[0].name} may still use",
                "Let their copy wait for it.",
            )
    for left in starts.values():
        yield Finding(left[0], f"{left[0].name} starts what no update leaves", "Drop it.")


def _pending(node: fx.Node) -> Any:
    return getattr(node.target, "pending", None)


def _read_meanwhile(start: fx.Node, update: fx.Node) -> Iterator[Finding]:
    """What an update changes from its start on is read by nobody until the next step's copies."""
    for node in start.all_input_nodes:
        for user in node.users:
            if user in (start, update) or user.op != "call_function":
                continue
            stamp = stamp_of(user)
            lays_out = stamp.lane is Lane.D2H and stamp.role is Role.LAUNCH  # reads no values
            if start < user and not lays_out and stamp.role is not Role.AHEAD:
                yield Finding(
                    user,
                    f"{user.name} reads {node.name}, which {start.name} may be changing",
                    "Read it before, or a copy that stays on the device.",
                )
