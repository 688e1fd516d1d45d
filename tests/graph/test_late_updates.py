"""Each rule of updates that run one step late, broken by hand on a real graph."""

from __future__ import annotations

import pytest
from torch import fx

from fxzero.errors import VerificationError
from fxzero.graph import Role, StepGraph
from fxzero.graph.verify import verify
from fxzero.passes import Fact
from tests.passes.test_offload_states import ONE_PROCESS, downloads, offloaded, uploads
from tests.runtime.test_delayed import LATE
from tests.tracing import of_role

_ALL = frozenset(Fact) - {Fact.CUT}


@pytest.fixture
def graph() -> StepGraph:
    """Three layers in one process, each updated by itself."""
    found = offloaded(options=LATE, **ONE_PROCESS)
    verify(found, _ALL, after="join_copies")
    return found


def starts(graph: StepGraph) -> list[fx.Node]:
    """What starts the updates of the step before."""
    return of_role(graph, Role.START)


def refused(graph: StepGraph, message: str) -> None:
    """See that the graph is refused, and why."""
    with pytest.raises(VerificationError, match=message):
        verify(graph, _ALL, after="my_pass")


def test_an_update_that_nobody_starts(graph: StepGraph) -> None:
    """Its gradients would be lost."""
    start = starts(graph)[0]
    for copy in downloads(graph):
        if start in copy.launch.args[5]:  # type: ignore[operator]
            copy.launch.update_arg(5, [])
    graph.graph.erase_node(start)
    refused(graph, "leaves its gradients to the next step, and 0 nodes start it")


def test_an_update_that_is_started_on_other_state(graph: StepGraph) -> None:
    """Of another parameter."""
    first, second, *_ = starts(graph)
    first.update_arg(1, second.args[1])
    refused(graph, "and 1 nodes start it on its parameters and state")


def test_an_update_that_is_started_twice(graph: StepGraph) -> None:
    """The second one would find nothing, or the step's own gradients."""
    first, second, *_ = starts(graph)
    second.target, second.args = first.target, first.args
    refused(graph, "2 nodes start it|0 nodes start it")


def test_gradients_that_do_not_wait_for_the_ones_before(graph: StepGraph) -> None:
    """They arrive at the same place."""
    downloads(graph)[0].launch.update_arg(5, [])
    refused(graph, "arrive where those of the step before are")


def test_a_copy_that_looks_at_a_parameter_behind_its_start(graph: StepGraph) -> None:
    """The update may be halfway."""
    copy = uploads(graph)[0]
    starts(graph)[-1].append(copy.launch)
    refused(graph, "reads .*, which start_.* may be changing")
