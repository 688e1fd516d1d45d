"""Each rule of updates on disk, broken by hand on a real graph."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from fxzero.errors import VerificationError
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.verify import verify
from fxzero.passes import Fact
from fxzero.runtime.disk_streams import ReadStates, join_write
from fxzero.transfer import Pool
from tests.passes.test_offload_disk import downloads, input_of, on_disk
from tests.tracing import of_role

_ALL = frozenset(Fact) - {Fact.CUT}


@pytest.fixture
def graph() -> StepGraph:
    """Six layers in one process, each in a bucket of its own."""
    found = on_disk(6, zero=0, world_size=1)
    verify(found, _ALL, after="join_copies")
    return found


def first_update(graph: StepGraph) -> fx.Node:
    """An update, between its read and its write."""
    return of_role(graph, Role.UPDATE)[0]


def refused(graph: StepGraph, message: str) -> None:
    """See that the graph is refused, and why."""
    with pytest.raises(VerificationError) as caught:
        verify(graph, _ALL, after="my_pass")
    assert re.search(message, str(caught.value)), str(caught.value)


def test_compute_that_reads_what_is_on_disk(graph: StepGraph) -> None:
    """It would read through the mapping, while an update writes."""
    (brought, *_) = [t for t in graph.transfers(name=Lane.READ.value) if t.of_parameters]
    (part,) = brought.parts
    reader = next(iter(part.users))
    reader.replace_input_with(part, brought.tensors[0])
    refused(graph, "which is on disk and which nothing makes it wait for")


def test_an_update_without_a_write(graph: StepGraph) -> None:
    """The result would never be there."""
    write = first_update(graph).next
    (wait,) = write.users
    graph.graph.erase_node(wait)
    graph.graph.erase_node(write)
    refused(graph, "is not written")


def test_an_update_without_a_read(graph: StepGraph) -> None:
    """It would change what is in memory."""
    update = first_update(graph)
    update.args = update.args[:6]
    refused(graph, "is not read")


def test_something_between_a_read_and_its_write(graph: StepGraph) -> None:
    """Compute might wait there for ever."""
    update = first_update(graph)
    later = [n for n in graph.nodes(role=Role.RELEASE) if update < n]
    update.append(next(n for n in later if stamp_of(n).lane is Lane.D2H))
    refused(graph, "something stands between")


def test_a_read_of_other_state(graph: StepGraph) -> None:
    """What another update changes."""
    update, other = of_role(graph, Role.UPDATE)[:2]
    read, theirs = update.prev.prev, other.prev.prev
    read.update_arg(1, theirs.args[1])
    refused(graph, "changes other tensors than")


def test_a_read_of_another_bucket(graph: StepGraph) -> None:
    """Its place on disk is another one."""
    update, other = of_role(graph, Role.UPDATE)[:2]
    read, theirs = update.prev.prev.target, other.prev.prev.target
    assert isinstance(read, ReadStates)
    assert isinstance(theirs, ReadStates)
    update.prev.prev.target = theirs
    refused(graph, "changes other tensors than")


@pytest.mark.parametrize("fields", [{"full_bytes": 12}, {"num_tensors": 1}, {"bytes_per_s": 5.0}])
def test_a_record_of_something_else(graph: StepGraph, fields: dict[str, Any]) -> None:
    """Costs and figures are read from it."""
    write = first_update(graph).next
    record = stamp_of(write).transfer
    assert record is not None
    set_stamp(write, stamp_of(write).but(transfer=replace(record, **fields)))
    refused(graph, "and its record says")


def test_a_write_that_nothing_waits_for(graph: StepGraph) -> None:
    """Somebody could read the parameter before it is there."""
    write = first_update(graph).next
    (wait,) = write.users
    assert wait.target is join_write
    graph.graph.erase_node(wait)
    refused(graph, "nothing waits for|is waited for 0 times")


def test_state_that_is_not_on_disk(graph: StepGraph) -> None:
    """The stamps say where the arena has to put it."""
    update = first_update(graph)
    state = update.args[2][0][0]  # type: ignore[index]
    assert isinstance(state, fx.Node)
    set_stamp(state, stamp_of(state).but(pool=Pool.HOST))
    refused(graph, "or some that are not there")


def test_a_place_that_is_taken_before_its_gradient_was_used(graph: StepGraph) -> None:
    """Who takes it waits for the update that reads it."""
    fourth = downloads(graph)[3]
    assert fourth.launch.args[5]
    fourth.launch.update_arg(5, [])
    refused(graph, "has copied what is still to be read")


def test_a_place_that_waits_for_another_update(graph: StepGraph) -> None:
    """Not the one that reads what is there."""
    fourth = downloads(graph)[3]
    fourth.launch.update_arg(5, [of_role(graph, Role.UPDATE)[1]])
    refused(graph, "has copied what is still to be read")


def test_a_parameter_that_is_brought_while_it_is_updated(graph: StepGraph) -> None:
    """The copy must be there before the update starts."""
    brought = [t for t in graph.transfers(name=Lane.READ.value) if t.of_parameters][-1]
    (key,) = brought.stamp.params
    (update,) = (u for u in of_role(graph, Role.UPDATE) if stamp_of(u).params == (key,))
    update.prev.prev.prepend(brought.launch)
    for node in (brought.wait, *brought.parts):
        update.next.append(node)
    refused(graph, "while|before it exists|after .* has changed it")


def test_buffers_are_in_the_hosts_memory(graph: StepGraph) -> None:
    """And counted there."""
    assert stamp_of(input_of(graph, "disk_buffers")).pool is Pool.HOST
