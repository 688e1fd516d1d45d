"""Forwards and backwards stand in the order of the schedule, and messages around them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from fxzero.errors import VerificationError
from fxzero.graph import Phase, Role
from fxzero.graph.stamps import Segment, set_stamp, stamp_of
from fxzero.graph.step_graph import StepGraph, segment_of
from fxzero.graph.verify import verify
from fxzero.passes.base import Fact
from fxzero.pipeline.tables import TABLES
from fxzero.transfer import TransferKind
from tests.passes.pipelined import scheduled
from tests.tiers import in_two_tiers


def order_of(graph: StepGraph) -> list[Segment]:
    """The stretches of compute, as they follow each other."""
    found: list[Segment] = []
    for node in graph.nodes(role=Role.COMPUTE):
        stamp = stamp_of(node)
        if stamp.phase is not Phase.OPTIMIZER and (not found or found[-1] != stamp.segment):
            found.append(stamp.segment)
    return found


@pytest.mark.parametrize(
    ("schedule", "place"), in_two_tiers([*product(["gpipe", "1f1b", "zb_h1"], [0, 1, 3])])
)
def test_the_order_of_the_schedule(schedule: str, place: int) -> None:
    graph = scheduled(place, schedule=schedule)
    row = TABLES[schedule](4, 6).ranks[place]
    assert graph.row == row
    wanted = [segment_of(action) for action in row]
    found = order_of(graph)
    assert found == [segment for segment in wanted if segment in set(found)]


def test_messages_are_asked_for_an_action_earlier() -> None:
    graph = scheduled(1)
    seen: list[Segment] = []
    ahead = 0
    for node in graph.nodes():
        stamp = stamp_of(node)
        if stamp.role is Role.COMPUTE and stamp.phase is not Phase.OPTIMIZER:
            seen.append(stamp.segment)
        record = stamp.transfer
        if record is not None and record.kind is TransferKind.RECEIVE:
            assert stamp.segment not in seen
            ahead += bool(seen) and stamp.micro_step > 0
    assert ahead, "none was asked for before its own action"


def test_all_messages_have_one_tag() -> None:
    tags = {
        node.args[-1]
        for place in (0, 1)
        for node in scheduled(place).nodes(role=Role.LAUNCH)
        if stamp_of(node).transfer.kind in (TransferKind.SEND, TransferKind.RECEIVE)  # type: ignore[union-attr]
    }
    assert len(tags) == 1


def test_gradients_are_added_up_as_they_come(tmp_path: Path) -> None:
    """A schedule may run backwards in any order."""
    file = tmp_path / "mine.csv"
    rows = [
        [f"{stage}F{m}" for m in range(3)] + [f"{stage}B{m}" for m in (2, 0, 1)]
        for stage in range(4)
    ]
    file.write_text("\n".join(",".join(row) for row in rows))
    graph = scheduled(1, schedule=str(file), micro_batches=3)
    sums = [n for n in graph.nodes(role=Role.ACCUMULATE) if "h.1.bias" in str(stamp_of(n).params)]
    assert [stamp_of(node).micro_step for node in sums] == [0, 1]


@pytest.mark.exhaustive
def test_what_is_repeated_is_part_of_the_half_that_reads_it() -> None:
    graph = scheduled(0, schedule="zb_h1", zero=3, shards=2, lowering="inductor")
    repeated = [
        n for n in graph.nodes() if stamp_of(n).again and stamp_of(n).made_by == "recompute"
    ]
    for node in repeated:
        halves = {stamp_of(user).half for user in node.users}
        assert stamp_of(node).half == min(halves)


@pytest.mark.parametrize("kind", [TransferKind.SEND, TransferKind.RECEIVE])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_messages_in_another_order_are_found(schedule: str, kind: TransferKind) -> None:
    """A rank that asks for them so would take what another micro-step sends."""
    graph = scheduled(1, schedule=schedule)
    verify(graph, [Fact.STAMPED], after="test")
    mine = [t for t in graph.transfers() if t.record.kind is kind]
    first, second = [t for t in mine if t.record.group == mine[0].record.group][:2]
    one, other = stamp_of(first.launch), stamp_of(second.launch)
    set_stamp(first.launch, one.but(micro_step=other.micro_step))
    set_stamp(second.launch, other.but(micro_step=one.micro_step))
    with pytest.raises(VerificationError, match="would take each other's tensors"):
        verify(graph, [Fact.STAMPED], after="test")
