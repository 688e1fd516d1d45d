"""No order of messages closes a circle, whatever the table."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import networkx as nx
import pytest

from fxzero.pipeline import messages
from fxzero.pipeline.messages import Messages, receiver_of, sender_of
from fxzero.pipeline.schedules import table_of
from fxzero.pipeline.tables import TABLES, Action, Table, Work

SIZES = [(2, 2), (2, 5), (3, 4), (4, 4), (4, 8), (4, 11), (8, 8), (8, 16)]


def gives(table: Table, action: Action) -> bool:
    """Whether an action sends something to another rank."""
    receiver = receiver_of(action)
    if action.work is Work.WEIGHT_GRADIENTS or not 0 <= receiver.stage < table.num_stages:
        return False
    return table.rank_of[receiver.stage] != table.rank_of[action.stage]


def events(table: Table) -> nx.DiGraph:
    """What waits for what, if a send ends only when its receiver has asked for it.

    By rank, the beginnings of its actions in order. A message is asked for at the beginning of the
    action before which it is asked for; a wait for a send is at a beginning, too.
    """
    found = Messages(table)
    graph = nx.DiGraph()
    for rank, row in enumerate(table.ranks):
        for i in range(len(row)):
            graph.add_edge((rank, i), (rank, i + 1))
        for i, action in enumerate(row):
            if action in found.asked_at:  # it begins when what it uses has been made
                source, when = found.place[sender_of(action)]
                graph.add_edge((source, when + 1), (rank, i, "has it"))
                graph.add_edge((rank, i, "has it"), (rank, i + 1))
            if gives(table, action):
                receiver = receiver_of(action)
                other, _ = found.place[receiver]
                asked = (other, found.asked_at[receiver])
                # Rank's beginning waits for the receiver's, which has come before it waits itself.
                graph.add_edge((*asked, "asks"), (rank, found.waits_before(action)))
                graph.add_edge((other, asked[1]), (*asked, "asks"))
    return graph


def circles(table: Table) -> list[Any]:
    return [] if nx.is_directed_acyclic_graph(events(table)) else nx.find_cycle(events(table))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("schedule", list(TABLES))
def test_no_rank_waits_for_itself(schedule: str, size: tuple[int, int]) -> None:
    assert not circles(table_of(schedule, *size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("schedule", list(TABLES))
def test_messages_of_a_link_are_asked_for_as_they_are_sent(
    schedule: str, size: tuple[int, int]
) -> None:
    table = table_of(schedule, *size)
    found = Messages(table)
    links: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for action, at in found.asked_at.items():
        source, when = found.place[sender_of(action)]
        rank, own = found.place[action]
        assert at <= own
        links[source, rank].append((when, at))
    assert links
    for asked in links.values():
        places = [at for _, at in sorted(asked)]
        assert places == sorted(places)


def test_a_wait_that_comes_too_early_is_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees what it looks for."""

    def at_once(self: Messages, action: Action) -> int:
        return self.place[action][1] + 1

    monkeypatch.setattr(messages, "EARLIER", 0)
    monkeypatch.setattr(Messages, "waits_before", at_once)
    assert any(circles(table_of(schedule, *size)) for schedule in TABLES for size in SIZES)
