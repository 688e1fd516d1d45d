"""Each rule of places in a slab, broken by hand on a real graph."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from fxzero._compat import set_args
from fxzero.errors import VerificationError
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.slabs import places_in, slab_of
from fxzero.graph.stamps import stamp_of
from fxzero.graph.verify import verify
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import Context, Slab
from fxzero.passes.lower_transfers import lower_transfer
from fxzero.passes.slab import lay_out
from fxzero.runtime import collectives
from fxzero.runtime.slab import vacate
from tests.stepping import EAGER, chain_of, step_graph
from tests.tracing import find, of_role

FACTS = frozenset({"stamped", "gathered", "cut", "lowered"})


@pytest.fixture
def graph() -> StepGraph:
    """A whole step of four ranks in which everything that is gathered or received has a place."""
    found = step_graph(chain_of(4, width=16), world_size=4)
    with fake_ranks(4), mock.patch("fxzero.passes.slab.lay_out", _with_room):
        for transfer in found.transfers():
            lower_transfer(transfer)
        Slab().run(found, Context(fuses=False))
    verify(found, FACTS, after="slab")
    return found


def _with_room(items: Any, held_bytes: Any) -> Any:
    return lay_out(items, [*held_bytes, 1 << 30])


def refused(graph: StepGraph, message: str) -> None:
    """See that the graph is refused, and why."""
    with pytest.raises(VerificationError) as caught:
        verify(graph, FACTS, after="my_pass")
    assert re.search(message, str(caught.value)), str(caught.value)


def placed(graph: StepGraph, target: object) -> list[fx.Node]:
    """The launches of a kind that have places."""
    return [node for node in find(graph, target) if slab_of(node) is not None]


def test_two_gathers_that_meet_have_one_place(graph: StepGraph) -> None:
    first, second = placed(graph, collectives.gather)[:2]
    set_args(second, (*second.args[:-1], first.args[-1]))
    refused(graph, f"{second.name} begins at byte .* which .* is still to read")


def test_means_lie_where_something_is_gathered(graph: StepGraph) -> None:
    """They are read by the update, long after they have arrived."""
    gathers, received = placed(graph, collectives.gather), placed(graph, collectives.exchange)
    early = received[0]
    later = next(node for node in gathers if early < node)
    set_args(early, (*early.args[:-1], (later.args[-1], early.args[-1][1])))
    refused(graph, "is still to read")


def test_what_others_send_lies_where_something_is_gathered(graph: StepGraph) -> None:
    gathers, received = placed(graph, collectives.gather), placed(graph, collectives.exchange)
    for early in received:
        (wait,) = early.users
        meets = [node for node in gathers if early < node < wait]
        if meets:
            set_args(early, (*early.args[:-1], (early.args[-1][0], meets[0].args[-1])))
            refused(graph, "is still to read")
            return
    raise AssertionError("no gather starts while gradients are on their way")


def test_a_place_that_is_left_too_early(graph: StepGraph) -> None:
    """A gather moves before the last reader of the one that had its place before."""
    launches = placed(graph, collectives.gather)
    for first in launches:
        for second in launches:
            if first < second and first.args[-1] == second.args[-1]:
                first.append(second)
                refused(graph, "is still to read|before it exists")
                return
    raise AssertionError("no place is given twice")


def test_a_slab_without_room(graph: StepGraph) -> None:
    (memory,) = of_role(graph, Role.SLAB)
    memory.meta["val"] = torch.empty(64, dtype=torch.uint8, device="meta")
    refused(graph, "which has 64")


def test_a_place_between_two_vectors(graph: StepGraph) -> None:
    launch = placed(graph, collectives.gather)[-1]
    set_args(launch, (*launch.args[:-1], launch.args[-1] + 4))
    refused(graph, "Begin at multiples of 64")


def test_a_release_would_free_all_of_it(graph: StepGraph) -> None:
    left = find(graph, vacate)[0]
    left.target = torch.ops.fxzero.release.default
    refused(graph, "frees the memory of slab")


def test_a_read_after_its_place_was_left(graph: StepGraph) -> None:
    left = find(graph, vacate)[0]
    (part, *_) = left.all_input_nodes
    reader = max(user for user in part.users if user is not left)
    assert stamp_of(left).role is Role.RELEASE
    reader.prepend(left)
    refused(graph, f"{reader.name} reads .* after {left.name}")


def test_a_gradient_is_copied_to_the_host_until_the_copy_has_landed() -> None:
    """Its wait is the host's, which compute does not wait for."""
    options = {**EAGER, "memory": "states_host"}
    graph = step_graph(chain_of(4, width=16), world_size=4, options=options)
    with fake_ranks(4), mock.patch("fxzero.passes.slab.lay_out", _with_room):
        for transfer in graph.transfers():
            if not transfer.is_copy:
                lower_transfer(transfer)
        Slab().run(graph, Context(fuses=False))
    verify(graph, FACTS, after="slab")
    copies = [t for t in graph.transfers(name=Lane.D2H.value) if t.of_parameters]
    (memory,) = of_role(graph, Role.SLAB)
    every = sorted(places_in(memory), key=lambda place: place.until)
    until = {place.launch: place.until for place in every}  # of its results, which stay longest
    received = placed(graph, collectives.exchange)
    assert copies
    assert received
    for launch in received:
        assert getattr(until[launch].target, "__name__", "") == "landed"
