"""What must hold of state that streams through the device: what `verify` asks of such updates.

    up = upload([m, v]); m', v' = join(up); u = adamw([w], [dw], [[m'], [v'], [n]])
    back = bring_back([m', v'], [m, v], u); …; landed(back)

What comes in goes back to where it came from, once, behind the update that changes it; until it is
there nothing else reads what it is to replace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fxzero.graph.belongings import Finding
from fxzero.graph.stamps import Lane, Phase, Role, stamp_of
from fxzero.graph.step_graph import StepGraph, TransferNodes


def brings_back(copy: TransferNodes) -> bool:
    """Whether a copy goes over what something was copied from."""
    return bool(overwritten_by(copy.launch))


def overwritten_by(node: fx.Node) -> list[fx.Node]:
    """What a node copies over; nothing if it is no such copy."""
    if not getattr(node.target, "overwrites_homes", False):
        return []
    homes: Any = node.args[1]
    return list(homes)


def wrong_streamed_states(graph: StepGraph, copies: list[TransferNodes]) -> Iterator[Finding]:
    """State that does not come back, comes back as another's, or is read while it does."""
    backs = {tuple(copy.tensors): copy for copy in copies if brings_back(copy)}
    for up in copies:
        if up.stamp.lane is not Lane.H2D or up.stamp.phase is not Phase.OPTIMIZER:
            continue
        back = backs.pop(tuple(up.parts), None)
        if back is None or overwritten_by(back.launch) != up.tensors:
            yield Finding(
                up.launch,
                f"what {up.launch.name} brings to the device does not come back to where it was",
                "Bring back all of it, in one order: fxzero.passes.streamed_updates.",
            )
            continue
        yield from _not_updated(up, back)
        yield from _read_meanwhile(up, back)
    for back in backs.values():
        yield Finding(
            back.launch,
            f"{back.launch.name} brings back what was not copied to the device",
            "Stream it in first: fxzero.passes.streamed_updates.",
        )


def _not_updated(up: TransferNodes, back: TransferNodes) -> Iterator[Finding]:
    """Copies are changed by one update, behind which they go back."""
    users = {user for part in up.parts for user in part.users} - {back.launch}
    update: Any = back.launch.args[2]
    if users != {update} or stamp_of(update).role is not Role.UPDATE:
        names = ", ".join(sorted(user.name for user in users)) or "nothing"
        yield Finding(
            up.launch,
            f"what {up.launch.name} brings for an update is read by {names}, and brought back "
            f"behind {update}",
            "One update reads it, and what brings it back waits for that.",
        )


def _read_meanwhile(up: TransferNodes, back: TransferNodes) -> Iterator[Finding]:
    """While it comes back nobody begins to read what lives on the host. Who has begun before is
    found as whoever reads what is written to."""
    for home in up.tensors:
        for user in home.users:
            if user in (up.launch, back.launch) or user.op != "call_function":
                continue
            waits = stamp_of(user).role is Role.AHEAD and user.args[1] is back.launch
            if not waits and back.launch < user < back.wait:
                yield Finding(
                    user,
                    f"{user.name} reads {home.name}, which {back.launch.name} replaces until "
                    f"{back.wait.name}",
                    "Read it before the update, or once it is back.",
                )
