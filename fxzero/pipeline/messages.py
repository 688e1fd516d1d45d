"""When a rank of a pipeline asks for a message, and when it may wait for one that it has sent.

    rank 0    0F0 ─send─ 0F1 ·wait· 0B0         what 0F0 sends is on its way while 0F1 runs
    rank 1    ·ask· 1F0 1B0                     and asked for an action before it is used

A send ends when its receiver has asked for it. A rank therefore waits for one only before an action
that no order of the receiver's can be behind: one that begins, in a replay of the table, when the
receiver has come to where it asks. Over a link messages are asked for in the order in which they
are sent, as some transports match them by nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxzero.pipeline.replay import PipelineReplay, replay_table, unit_us
from fxzero.pipeline.tables import Action, Table, Work

EARLIER = 1
"""How many actions before its own a message is asked for."""
BEHIND = 1
"""How many actions a send is given at least, before its rank waits for it."""


def sender_of(action: Action) -> Action:
    """What makes that which an action uses of a neighbour's, if it uses something."""
    step = -1 if action.work is Work.FORWARD else 1
    return Action(action.stage + step, action.work, action.micro_step)


def receiver_of(action: Action) -> Action:
    """What uses that which an action gives to a neighbour, if it gives something."""
    step = 1 if action.work is Work.FORWARD else -1
    return Action(action.stage + step, action.work, action.micro_step)


@dataclass(frozen=True)
class Messages:
    """Where the messages of a table stand among its actions."""

    table: Table

    @cached_property
    def replayed(self) -> PipelineReplay:
        """The table, every half of an action a unit long."""
        return replay_table(self.table, unit_us)

    @cached_property
    def place(self) -> dict[Action, tuple[int, int]]:
        """By action, its rank, and its place there."""
        rows = enumerate(self.table.ranks)
        return {action: (rank, i) for rank, row in rows for i, action in enumerate(row)}

    @cached_property
    def asked_at(self) -> dict[Action, int]:
        """By action that receives something, before which action of its rank it asks for it."""
        links: dict[tuple[int, int], list[tuple[int, Action]]] = {}
        for action, (rank, _) in self.place.items():
            sender = sender_of(action)
            if action.work is Work.WEIGHT_GRADIENTS or sender not in self.place:
                continue
            source, when = self.place[sender]
            if source != rank:
                links.setdefault((source, rank), []).append((when, action))
        found: dict[Action, int] = {}
        for messages in links.values():
            latest = None
            for _, action in sorted(messages, reverse=True):
                own = max(self.place[action][1] - EARLIER, 0)
                latest = own if latest is None else min(latest, own)
                found[action] = latest
        return found

    def waits_before(self, action: Action) -> int:
        """Before which action of its rank one may wait for what an action has sent: their number,
        if not before the end."""
        rank, index = self.place[action]
        row = self.table.ranks[rank]
        receiver = receiver_of(action)
        other, _ = self.place[receiver]
        behind = self.asked_at[receiver] - 1
        asked_us = 0.0
        if behind >= 0:
            asked_us = self.replayed.end_us[self.table.ranks[other][behind]]
        for later in range(index + 1 + BEHIND, len(row)):
            if self.replayed.start_us[row[later]] >= asked_us:
                return later
        return len(row)
