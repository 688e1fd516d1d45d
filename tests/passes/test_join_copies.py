"""Where copies between pools are waited for, how many are on their way, and what starts early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.aliases import readers
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.regions.cutout import runs
from fxzero.runtime import copies
from fxzero.runtime.ahead import Launch, Take
from tests.mutants.graphs import reads_ahead
from tests.passes.test_offload_states import (
    HOST,
    ONE_PROCESS,
    TOGETHER,
    downloads,
    join_of,
    offloaded,
    update_of,
    uploads,
)
from tests.stepping import EAGER, step_graph
from tests.tracing import of_role

SETTINGS: list[dict[str, Any]] = [
    {**ONE_PROCESS},
    {"zero": 3},
    {"zero": 2, "micro_batches": 4},
    {**ONE_PROCESS, "options": TOGETHER},
    {"zero": 3, "clip_grad_norm": 1.0},
    {**ONE_PROCESS, "options": {**HOST, "offload_states": {"share": 0.5}}},
    {**ONE_PROCESS, "options": {**HOST, "offload_states": {"ahead": False}}},
]
everywhere = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def place_of(graph: StepGraph) -> dict[fx.Node, int]:
    """Where each node stands."""
    return {node: i for i, node in enumerate(graph.graph.nodes)}


def begins(graph: StepGraph) -> dict[fx.Node, fx.Node]:
    """By node of a run of compute, the run's first one."""
    return {node: run[0] for run in runs(graph.nodes()) for node in run}


@everywhere
def test_a_copy_is_waited_for_right_before_the_run_that_reads_it(settings: dict[str, Any]) -> None:
    """Between the two stand other copies' waits at most."""
    graph = offloaded(4, **settings)
    begin = begins(graph)
    assert uploads(graph)
    for copy in uploads(graph):
        first = min(user for part in copy.parts for user in part.users)
        node = copy.parts[-1].next
        while stamp_of(node).lane is Lane.H2D:
            node = node.next
        assert node is begin.get(first, first)


@everywhere
def test_no_run_is_taken_apart(settings: dict[str, Any]) -> None:
    """As many regions as without offload, of the same nodes."""
    without = {**settings, "options": {**settings.get("options", HOST), "memory": "none"}}
    without["options"].pop("offload_states", None)

    def sizes(graph: StepGraph) -> list[tuple[str, int]]:
        return [(stamp_of(run[0]).layer, len(run)) for run in runs(graph.nodes())]

    assert sizes(offloaded(4, **settings)) == sizes(offloaded(4, **without))


class ReadsLate(nn.Module):
    """A layer that computes something before it reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → (B, 8)."""
        return (x.sin() * x.cos()) @ self.weight


class Layers(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReadsLate() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_a_run_that_reads_a_copy_in_its_middle_stays_whole() -> None:
    """It waits where it begins."""

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return Layers(), (torch.ones(4, 8),)

    graph = step_graph(build, options=HOST, **ONE_PROCESS)
    without = step_graph(build, options=EAGER, **ONE_PROCESS)
    lengths = [[len(run) for run in runs(g.nodes())] for g in (graph, without)]
    assert lengths[0] == lengths[1]
    begin = begins(graph)
    for copy in uploads(graph):
        reader = min(copy.parts[0].users)
        assert copy.parts[0] < begin[reader] < reader


@everywhere
def test_two_copies_from_the_device_are_on_their_way_at_most(settings: dict[str, Any]) -> None:
    """The first of them has landed before a third one starts."""
    graph = offloaded(4, **settings)
    launches = [copy.launch for copy in downloads(graph)]
    flying: list[fx.Node] = []
    most = 0
    for node in graph.nodes():
        if node in launches:
            flying.append(node)
            most = max(most, len(flying))
        elif node.target is copies.landed:
            assert node.args[0] is flying.pop(0), "they land in the order of their launches"
    assert most == min(2, len(launches))
    assert flying == []


@everywhere
def test_a_copy_lands_as_late_as_may_be(settings: dict[str, Any]) -> None:
    """Right before the launch that it makes room for, or the end."""
    graph = offloaded(4, **settings)
    launches = [copy.launch for copy in downloads(graph)]
    landed = {node.args[0]: node for node in graph.nodes() if node.target is copies.landed}
    ends = [*launches[2:], join_of(graph), join_of(graph)]
    for launch, end in zip(launches, ends, strict=False):
        assert stamp_of(landed[launch]).role is Role.RELEASE
        node = landed[launch].next
        while node.target is copies.landed:
            node = node.next
        assert node is end


@everywhere
def test_the_step_ends_with_its_updates(settings: dict[str, Any]) -> None:
    """Nothing but the output comes behind."""
    graph = offloaded(4, **settings)
    assert join_of(graph).next is graph.output


def copied_by(graph: StepGraph, ahead: fx.Node) -> TransferNodes:
    """The copy of this step that a launch for the next one copies over."""
    assert isinstance(ahead.target, Launch)
    found = [copy for copy in uploads(graph) if isinstance(copy.launch.target, Take)]
    (own,) = (c for c in found if c.launch.target.ahead is ahead.target.ahead)  # type: ignore[union-attr]
    return own


@everywhere
def test_the_next_steps_copies_start_behind_the_last_reader(settings: dict[str, Any]) -> None:
    """Through views and collectives too, behind the update, and in no run."""
    graph = offloaded(4, **settings)
    begin = begins(graph)
    is_ahead = settings.get("options", HOST).get("offload_states", {}).get("ahead", True)
    found = of_role(graph, Role.AHEAD)
    assert len(found) == (len(uploads(graph)) if is_ahead else 0)
    for node in found:
        copy = copied_by(graph, node)
        params, update, *rest = node.args
        assert (params, *rest) == copy.launch.args
        assert update is update_of(graph, stamp_of(node).params)
        assert all(reader < node for reader in readers(*copy.parts))
        assert node < join_of(graph)
        before, after = begin.get(node.prev), begin.get(node.next)
        assert before is None or before is not after


def test_they_start_right_behind_the_update_where_nothing_reads_the_copy() -> None:
    """While backward goes on."""
    graph = offloaded(4, **ONE_PROCESS)
    for node in of_role(graph, Role.AHEAD):
        assert node.prev is node.args[1]
    first = of_role(graph, Role.AHEAD)[0]
    last = max(n for n in graph.nodes() if stamp_of(n).role is Role.COMPUTE)
    assert first < last


def test_a_copy_that_backward_reads_behind_its_update_is_left_alone() -> None:
    """The first layer's backward reads the second's parameter, whose gradient is there by then."""
    graph = step_graph(reads_ahead, options=HOST, **ONE_PROCESS)
    place = place_of(graph)
    late = []
    for node in of_role(graph, Role.AHEAD):
        reader = max(readers(*copied_by(graph, node).parts))
        update = node.args[1]
        assert isinstance(update, fx.Node)
        assert place[node] > place[reader]
        if place[reader] > place[update]:
            late.append(stamp_of(node).layer)
    assert late == ["second"]


def test_nothing_is_there_to_join() -> None:
    """The pass leaves a step alone in which nothing is worth a copy."""
    values = {"offload_activations": {"share": 1.0}}
    given, without = offloaded(4, {**EAGER, **values}), offloaded(4, EAGER)
    assert [n.name for n in given.graph.nodes] == [n.name for n in without.graph.nodes]
