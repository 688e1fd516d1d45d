"""What stages have in common stands at the end of the step, in one order."""

from __future__ import annotations

import pytest

from fxzero.graph import Phase, Role
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import StepGraph
from tests.passes.pipelined import scheduled
from tests.tiers import exhaustive


def shared(graph: StepGraph) -> list[str]:
    """The transfers between stages that are no messages, in order."""
    found = graph.transfers(phase=Phase.OPTIMIZER)
    return [t.stamp.bucket for t in found if t.record.axis in ("pipeline", "tied")]


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (0, ["loss", "tied.0", "norm_of_stages"]),
        (1, ["loss", "norm_of_stages"]),
        (3, ["loss", "tied.0", "norm_of_stages"]),
    ],
)
@pytest.mark.parametrize(("zero", "shards"), [(3, 2), *exhaustive((0, 1))])
def test_in_one_order(place: int, wanted: list[str], zero: int, shards: int) -> None:
    graph = scheduled(place, clip=1.0, zero=zero, shards=shards)
    assert shared(graph) == wanted


def test_behind_all_messages() -> None:
    """None may wait for it that has something to send."""
    graph = scheduled(3, clip=1.0)
    nodes = list(graph.nodes())
    launches = [n for n in nodes if stamp_of(n).role is Role.LAUNCH]
    messages = [n for n in launches if stamp_of(n).transfer.kind in ("send", "receive")]  # type: ignore[union-attr]
    others = [n for n in launches if n not in messages]
    assert max(map(nodes.index, messages)) < min(map(nodes.index, others))
