"""Each rule of state that streams through the device, broken by hand on a real graph."""

from __future__ import annotations

import torch

from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.verify import verify
from fxzero.passes import Fact
from fxzero.passes.streamed_updates import Streamed, streamed_of
from tests.graph.test_streams import refused
from tests.passes.test_offload_states import ONE_PROCESS, offloaded
from tests.passes.test_streamed_updates import DEVICE
from tests.tracing import of_role

_ALL = frozenset(Fact) - {Fact.CUT}


def streamed(precision: str | None = None) -> tuple[StepGraph, list[Streamed]]:
    """Four layers in one process."""
    graph = offloaded(4, DEVICE, **ONE_PROCESS, precision=precision)
    verify(graph, _ALL, after="join_copies")
    return graph, streamed_of(graph)


def test_state_that_does_not_come_back() -> None:
    """The next step would begin with that of before."""
    graph, (first, *_) = streamed()
    graph.graph.erase_node(first.back.wait)
    graph.graph.erase_node(first.back.launch)
    refused(graph, "does not come back to where it was")


def test_state_that_comes_back_as_another() -> None:
    """First moments over second ones."""
    graph, (first, *_) = streamed()
    exp_avg, exp_avg_sq = first.up.tensors
    first.back.launch.update_arg(1, [exp_avg_sq, exp_avg])
    refused(graph, "does not come back to where it was")


def test_state_that_comes_back_as_another_parameters() -> None:
    """They have one shape."""
    graph, (first, second, *_) = streamed()
    first.back.launch.update_arg(1, second.up.tensors)
    refused(graph, "does not come back to where it was")


def test_state_that_comes_back_before_its_update() -> None:
    """It would be what it was."""
    graph, (first, second, *_) = streamed()
    second.back.launch.update_arg(2, first.update)
    refused(graph, "brought back behind")


def test_state_that_another_update_reads() -> None:
    """Its own reads what lives on the host."""
    graph, (first, second, *_) = streamed()
    second.update.update_arg(2, first.update.args[2])
    refused(graph, "for the state of")


def test_state_on_the_device_that_something_else_reads() -> None:
    """What comes in for an update is the update's."""
    graph, (first, *_) = streamed()
    with graph.graph.inserting_before(first.update):
        stamp = Stamp(Phase.OPTIMIZER, made_by="test")
        graph.call(torch.ops.aten.sin.default, (first.up.parts[0],), stamp=stamp)
    refused(graph, "brings for an update is read by")


def test_a_step_that_ends_before_state_is_back() -> None:
    """Its next one would read it."""
    graph, found = streamed()
    graph.graph.erase_node(found[-1].back.wait)
    refused(graph, "is waited for 0 times")


def test_a_master_that_is_copied_while_it_comes_back() -> None:
    """The next step would compute with half of it."""
    graph, (first, second, *_) = streamed("bf16")
    ahead = {node.args[1]: node for node in of_role(graph, Role.AHEAD)}
    early = ahead[second.back.launch]
    early.update_arg(1, first.back.launch)
    refused(graph, f"{early.name} reads .*, which {second.back.launch.name} replaces until")


def test_a_master_that_comes_back_over_what_is_being_read() -> None:
    """The copy that compute reads has to be there first."""
    graph, (first, *_) = streamed("bf16")
    (take,) = (
        copy
        for copy in graph.transfers(name=Lane.H2D.value)
        if copy.tensors[0] is first.up.tensors[0] and copy.stamp.phase is Phase.FORWARD
    )
    for node in (take.wait, *take.parts):
        first.back.wait.prepend(node)
    refused(graph, "before it exists|while .* copies it")


def test_state_that_comes_in_for_another_update() -> None:
    """Before it is back."""
    graph, (first, second, *_) = streamed()
    second.up.launch.update_arg(0, [first.up.tensors[0], *second.up.tensors[1:]])
    refused(graph, "for the state of|replaces until")
