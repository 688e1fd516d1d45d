"""Which saved values go to the host, where they are there, and when they come and go."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxzero
from fxzero.compiler.compilation import Compilation
from fxzero.cost import FixedCosts
from fxzero.cost.analytic import AnalyticCosts
from fxzero.cost.cluster import load_cluster
from fxzero.cost.model import CostModel
from fxzero.cost.throttle import Throttle
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.lanes import aligned
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.step_graph import TransferNodes, transfer_nodes
from fxzero.passes.base import Notes
from fxzero.passes.offload_activations import (
    Moved,
    OffloadActivations,
    Saved,
    chosen,
    has_time,
    places,
    record_of,
    saved_values,
)
from fxzero.passes.recompute import Recompute
from fxzero.runtime import copies
from fxzero.schedule.copy_times import Timeline
from fxzero.schedule.simulate import simulate_memory
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool
from tests.passes.pipelined import scheduled
from tests.passes.test_join_copies import Layers
from tests.passes.test_offload_states import ONE_PROCESS, downloads, uploads
from tests.stepping import EAGER, chain_of, compiled_step, step_graph
from tests.tiers import exhaustive
from tests.tracing import find, of_role

VALUES: dict[str, Any] = {"offload_activations": {"share": 1.0, "min_bytes": 1}}
"""All that there is time for, however small."""
DEPTH, WIDTH, ROWS = 4, 16, 8
VALUE_BYTES = ROWS * WIDTH * 4
QUICK = FixedCosts(compute=10.0, latency_us=1.0)
"""Copies that take less than any operator."""
_LAPTOP = load_cluster("laptop")
SLOW_OPERATORS = AnalyticCosts(replace(_LAPTOP, device=replace(_LAPTOP.device, launch_us=1000)))
"""A device on which there is time for copies that are throttled, too."""


@contextlib.contextmanager
def costing(costs: CostModel) -> Iterator[None]:
    """Let compilations go by some costs."""
    with mock.patch("fxzero.cost.settings.CostSettings.make", return_value=costs):
        yield


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Linear layers, and a batch."""
    model, batch = chain_of(DEPTH, WIDTH, ROWS)()
    return model, batch


_compiled: dict[str, Compilation] = {}


def compiled(
    make: Any = build,
    costs: CostModel = QUICK,
    options: dict[str, Any] = VALUES,
    *,
    repeats: bool = True,
    **given: Any,
) -> Compilation:
    """A step, compiled once by some costs; of one process unless that is given.

    Args:
        repeats: whether backward may compute something again: views, above all.
    """
    given = {**ONE_PROCESS, **given}
    key = repr((make, costs, options, repeats, given))
    if key not in _compiled:
        nothing = mock.patch.object(Recompute, "run", return_value=Notes())
        with costing(costs), contextlib.nullcontext() if repeats else nothing:
            _compiled[key] = compiled_step(make, options={**EAGER, **options}, **given)
    return _compiled[key]


def moved(make: Any = build, **given: Any) -> StepGraph:
    """A copy of its scheduled graph."""
    joint = compiled(make, **given).joint
    assert joint is not None
    return joint.clone()


def plain(make: Any = build, **given: Any) -> StepGraph:
    """The same with all values on the device."""
    return moved(make, options={}, **given)


def gone(graph: StepGraph) -> list[str]:
    """What goes to the host, in the order in which it does."""
    return [copy.tensors[0].name for copy in downloads(graph)]


def upload_of(graph: StepGraph, download: TransferNodes) -> TransferNodes:
    """What brings back what a copy took away."""
    (found,) = (copy for copy in uploads(graph) if [*copy.tensors] == [*download.parts])
    return found


def is_compute(node: fx.Node) -> bool:
    """Whether a node computes something, and is no copy nor waits for one."""
    return stamp_of(node).role is Role.COMPUTE


# -- which values there are


def test_what_forward_saves_and_backward_reads() -> None:
    """Each layer's output, which the next one's backward and its own read."""
    found = saved_values(plain(), 1)
    assert [saved.node.name for saved in found] == ["relu", "relu_1", "relu_2", "relu_3"]
    for saved in found:
        assert stamp_of(saved.node).phase is stamp_of(saved.last_read).phase is Phase.FORWARD
        assert saved.node < saved.last_read < saved.first_read
        assert {stamp_of(user).phase for user, _ in saved.readers} == {Phase.BACKWARD}
        assert saved.first_read is min(user for user, _ in saved.readers)
        assert set(saved.node.users) == {user for user, _ in saved.readers} | {saved.last_read}


@pytest.mark.parametrize(("least", "count"), [(VALUE_BYTES, 4), (VALUE_BYTES + 1, 0)])
def test_smaller_values_are_left_out(least: int, count: int) -> None:
    """One of as many bytes is not."""
    assert len(saved_values(plain(), least)) == count


class Curves(nn.Module):
    """Views, statistics that the next micro-step reads, and a loss that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) → scalar."""
        x = self.norm(self.first(x)).tanh()
        return (self.second(x.view(-1, 8)).square().sum() * 1e-6).exp()


def curves() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch."""
    return Curves(), (torch.randn(16, 16),)


def test_the_loss_stays() -> None:
    """Backward reads it, and so does who called."""
    graph = plain(curves)
    (loss,) = find(graph, torch.ops.aten.exp.default)
    assert any(stamp_of(user).phase is Phase.BACKWARD for user in loss.users)
    assert any(user.op == "output" for user in loss.users)
    found = [saved.node for saved in saved_values(graph, 1)]
    assert found
    assert loss not in found


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_another_micro_step_or_nobody_in_backward_reads_stays(micro_batches: int) -> None:
    """BatchNorm's statistics, and what the step's loss is the mean of."""
    graph = plain(curves, micro_batches=micro_batches)
    found = saved_values(graph, 1)
    assert {saved.micro_step for saved in found} == set(range(micro_batches))
    for saved in found:
        users = [user for view in (saved.node, *saved.node.users) for user in view.users]
        assert {stamp_of(user).micro_step for user in users} == {saved.micro_step}
        assert not [user for user in users if user.op == "output"]
    names = {saved.node for saved in found}
    across = [
        node
        for node in graph.nodes(phase=Phase.FORWARD)
        if any(
            user.op != "output" and stamp_of(user).micro_step != stamp_of(node).micro_step
            for user in node.users
        )
    ]
    assert bool(across) == (micro_batches > 1)
    assert names.isdisjoint(across)


@pytest.mark.parametrize("zero", [2, 3])
def test_gathered_parameters_are_none_of_them(zero: int) -> None:
    """Nor views of them, nor what is not computed."""
    graph = plain(zero=zero, world_size=8)
    found = {saved.node for saved in saved_values(graph, 1)}
    assert {node.target for node in found} == {torch.ops.aten.relu.default}
    gathered = {part for gather in graph.transfers(name="gather") for part in gather.parts}
    assert gathered
    assert found.isdisjoint(gathered)


def test_inputs_stay() -> None:
    """The first layer's backward reads the batch."""
    graph = plain()
    found = {saved.node.op for saved in saved_values(graph, 1)}
    assert found == {"call_function"}


# -- what is in the graph


def assert_moved(graph: StepGraph) -> None:
    """What holds of every graph: down, there, up, back; and backward reads what came back."""
    assert len(downloads(graph)) == len(uploads(graph)) > 0
    for down in downloads(graph):
        (node,) = down.tensors
        up = upload_of(graph, down)
        assert [down.launch.target, down.wait.target] == [copies.download, copies.join_download]
        assert [up.launch.target, up.wait.target] == [copies.upload, copies.join_upload]
        assert down.launch < down.wait < down.parts[0] < up.launch < up.wait < up.parts[0]
        assert down.record.full_bytes == up.record.full_bytes == num_bytes(node)
        assert (down.record.resource, up.record.resource) == (PCIE_DOWN, PCIE_UP)
        assert (down.record.target, up.record.source) == (Pool.HOST, Pool.HOST)
        value = up.parts[0].meta["val"]
        assert value.shape == node.meta["val"].shape
        assert value.stride() == node.meta["val"].stride()
        assert not [user for user in node.users if stamp_of(user).phase is Phase.BACKWARD]
        assert up.parts[0].users
        for user in up.parts[0].users:
            assert stamp_of(user).phase is Phase.BACKWARD
            assert stamp_of(user).micro_step == stamp_of(node).micro_step


def test_backward_reads_what_has_come_back() -> None:
    """In the order of its use; the last operator of forward that reads it has done so before."""
    graph = moved()
    assert_moved(graph)
    assert gone(graph) == ["relu", "relu_1", "relu_2", "relu_3"]
    assert [c.stamp.bucket for c in sorted(uploads(graph), key=lambda c: c.wait)] == [
        f"upload.{name}" for name in ("relu_3", "relu_2", "relu_1", "relu")
    ]


def test_it_is_the_same_but_for_copies() -> None:
    """What else is computed, is."""
    mine = [n.target for n in moved().graph.nodes if n.op == "call_function" and is_compute(n)]
    theirs = [n.target for n in plain().graph.nodes if n.op == "call_function" and is_compute(n)]
    assert mine == theirs


class Transposed(nn.Module):
    """Linear layers, each of which backward reads by a view that forward made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(16, 16) → scalar."""
        for layer in self.layers:
            x = layer(x.sin().view(4, 4, 16).view(16, 16).t())
        return x.square().sum()


def transposed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch."""
    return Transposed(), (torch.randn(16, 16),)


@pytest.mark.parametrize("make", [transposed, curves], ids=lambda make: make.__name__)
def test_views_are_rebuilt_on_what_came_back(make: Any) -> None:
    """And views that nobody reads any more are gone: they would keep the memory."""
    graph = moved(make, repeats=False)
    assert_moved(graph)
    again = [
        node
        for node in graph.nodes(phase=Phase.BACKWARD)
        if is_view(node) and stamp_of(node).made_by == "offload_activations"
        if is_compute(node)
    ]
    assert again
    back = {part for copy in uploads(graph) for part in copy.parts}
    for view in again:
        source = view
        while source in again:
            source = source.all_input_nodes[0]
        assert source in back
        assert stamp_of(view).again
        assert view.users
    for down in downloads(graph):
        views = {down.tensors[0]}
        for node in graph.graph.nodes:
            if is_view(node) and not views.isdisjoint(node.all_input_nodes):
                views.add(node)
        readers = {user for view in views for user in view.users} - {down.launch}
        assert {stamp_of(user).phase for user in readers} <= {Phase.FORWARD}
        assert all(view.users for view in views)


def test_a_view_that_only_backward_read_is_gone() -> None:
    """It would keep the memory of what has gone."""
    graph = plain(transposed, repeats=False)
    *_, saved = (s for s in saved_values(graph, 1) if s.node.target is torch.ops.aten.sin.default)
    ((reader, view),) = saved.readers
    with graph.graph.inserting_after(view):
        alone = graph.graph.node_copy(view)
    set_stamp(alone, stamp_of(view))
    reader.replace_input_with(view, alone)
    before = set(graph.graph.nodes)
    OffloadActivations(share=1.0).apply(graph, Moved((saved.node.name,)), compiled().context)
    assert before - set(graph.graph.nodes) == {alone}
    (again,) = (
        n
        for n in graph.graph.nodes
        if n.op != "output"
        and reader in n.users
        and is_view(n)
        and stamp_of(n).made_by == "offload_activations"
    )
    assert stamp_of(again).again == alone.name


def test_a_copy_starts_when_forward_has_made_a_value() -> None:
    """At once, where nothing but views is between."""
    graph = moved()
    order = list(graph.graph.nodes)
    for down in downloads(graph)[:-1]:
        assert order[order.index(down.tensors[0]) + 1] is down.launch
    assert stamp_of(downloads(graph)[-1].launch).phase is Phase.FORWARD


def test_beside_state_on_the_host_values_have_bytes_of_their_own() -> None:
    """Behind those of the gradients, in the same part of the arena."""
    graph = moved(options={**VALUES, "memory": "states_host"})
    values = [copy for copy in downloads(graph) if not copy.of_parameters]
    grads = [copy for copy in downloads(graph) if copy.of_parameters]
    assert len(values) == len(grads) == DEPTH
    (staging,) = {copy.launch.args[2] for copy in (*values, *grads)}
    assert isinstance(staging, fx.Node)
    assert stamp_of(staging).pool is Pool.HOST
    used = sorted(
        (offset, offset + num_bytes(tensor))
        for copy in (*values, *grads)
        for offset, tensor in zip(copy.launch.args[3], copy.tensors, strict=True)  # type: ignore[arg-type]
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(used))
    assert used[-1][1] <= num_bytes(staging)


@pytest.mark.parametrize("memory", ["all_host", *exhaustive("none")])
def test_they_go_as_far_as_the_host_has_room(memory: str) -> None:
    """What is bounded is all that is held there."""
    options = {**VALUES, "memory": memory, "host_budget": "1TB"}
    most = simulate_memory(moved(options=options), fuses=False).host_bytes
    counts = []
    for fewer in range(DEPTH + 1):
        budget = max(1, most - fewer * VALUE_BYTES)
        graph = moved(options={**options, "host_budget": budget})
        assert simulate_memory(graph, fuses=False).host_bytes <= budget
        counts.append(len([copy for copy in downloads(graph) if not copy.of_parameters]))
    assert counts[0] == DEPTH
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < DEPTH


def test_what_it_says_of_itself() -> None:
    """How much has gone, of how much."""
    found = compiled(micro_batches=2)
    notes = {r.name: dict(r.notes) for r in found.records}
    own = DEPTH * VALUE_BYTES // 2
    assert notes["offload_activations"] == {
        "values": 2 * DEPTH,
        "num_bytes": own,
        "of": own,
        "staging_bytes": own,
    }


# -- how many go


def test_nothing_goes_where_a_throttle_leaves_no_time() -> None:
    """The graph is as it was."""
    slow = {**VALUES, "throttle": {"h2d": "1KB/s", "d2h": "1KB/s"}}
    graph = moved(options=slow, costs=SLOW_OPERATORS)
    assert [n.name for n in graph.graph.nodes] == [
        n.name for n in plain(costs=SLOW_OPERATORS).graph.nodes
    ]


def timeline_of(graph: StepGraph, costs: CostModel, throttle: Throttle | None = None) -> Timeline:
    """When its operators run, each by itself."""
    return Timeline(graph, costs, throttle or Throttle(), fuses=False)


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_more_goes_where_lanes_are_faster(lane: str) -> None:
    """Either of them alone holds values back; those made first go first."""
    graph = plain()
    values = saved_values(graph, 1)
    counts = []
    for rate in ("1KB/s", "60KB/s", "100KB/s", "250KB/s", "1GB/s"):
        timeline = timeline_of(graph, SLOW_OPERATORS, Throttle(**{lane: rate}))
        found = chosen([[saved] for saved in values], timeline, float("inf"))
        assert found == [*range(len(found))]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert (counts[0], counts[-1]) == (0, DEPTH - 1)


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 0), (0.1, 0), (0.13, 1), (0.5, 2), (0.8, 3), (0.9, 4), (1.0, 4)]
)
def test_a_share_is_rounded_to_whole_values(share: float, count: int) -> None:
    """To the nearest number of them, of those made first."""
    graph = plain()
    values = saved_values(graph, 1)
    each = [[saved] for saved in values]
    found = chosen(each, timeline_of(graph, QUICK), share * DEPTH * VALUE_BYTES)
    assert found == [*range(count)]


def test_a_value_that_has_no_time_does_not_stop_others() -> None:
    """One that is read at once stays; the next may go."""
    graph = plain()
    values = saved_values(graph, 1)
    timeline = timeline_of(graph, QUICK)
    first = replace(values[0], first_read=values[0].last_read)
    found = chosen([[first], *([saved] for saved in values[1:])], timeline, float("inf"))
    assert found == [*range(1, len(values))]


def test_what_goes_with_a_value_needs_time_too() -> None:
    """In a pipeline the values of several micro-steps go, or none of them."""
    graph = plain(micro_batches=2)
    values = saved_values(graph, 1)
    first, second = values[:DEPTH], values[DEPTH:]
    timeline = timeline_of(graph, QUICK)
    late = [replace(second[0], first_read=second[0].last_read), *second[1:]]
    assert chosen(list(zip(first, second, strict=True)), timeline, float("inf")) == [0, 1, 2, 3]
    assert chosen(list(zip(first, late, strict=True)), timeline, float("inf")) == [1, 2, 3]


def test_values_of_micro_steps_in_flight_have_places_of_their_own() -> None:
    """The first of four stages has four of them."""
    with costing(QUICK):
        graph = scheduled(0, options=VALUES)
    lives: list[tuple[fx.Node, fx.Node, int, int]] = []
    for copy in downloads(graph):
        (value,) = copy.tensors
        (offset,) = copy.launch.args[3]
        (up,) = (user for user in copy.parts[0].users)
        back = transfer_nodes(up)
        lives.append((value, back.wait, offset, offset + num_bytes(value)))
    assert len({stamp_of(value).micro_step for value, *_ in lives}) == 6
    assert len(lives) > 6
    for one, *_, begin, end in lives:
        for other, until, first, last in lives:
            if other < one < until:
                assert end <= first or last <= begin


def test_time_is_for_both_ways() -> None:
    """Between the last reader of forward and the first one of backward, to the microsecond."""
    graph = plain()
    *_, last = saved_values(graph, 1)
    timeline = timeline_of(graph, QUICK)
    gap_us = timeline.begin_us(last.first_read) - timeline.end_us(last.node)
    assert gap_us > 0
    half = timeline_of(graph, replace(QUICK, latency_us=gap_us / 2))
    assert has_time([last], half)
    more = timeline_of(graph, replace(QUICK, latency_us=gap_us / 2 + 0.01))
    assert not has_time([last], more)


def test_copies_share_their_lanes() -> None:
    """What has time alone may have none behind others."""
    graph = plain()
    *values, _ = saved_values(graph, 1)
    timeline = timeline_of(graph, QUICK)
    gap_us = timeline.begin_us(values[-1].first_read) - timeline.end_us(values[-1].node)
    tight = timeline_of(graph, replace(QUICK, latency_us=gap_us / 2))
    assert all(has_time([saved], tight) for saved in values)
    assert not has_time(values, tight)


def test_records_are_of_a_value_down_and_up() -> None:
    """Their bytes, and which link."""
    saved, *_ = saved_values(plain(), 1)
    down, up = record_of(saved.node, Lane.D2H, 5.0), record_of(saved.node, Lane.H2D)
    assert down.full_bytes == up.full_bytes == VALUE_BYTES
    assert (down.source, down.target, down.resource) == (Pool.DEVICE, Pool.HOST, PCIE_DOWN)
    assert (up.source, up.target, up.resource) == (Pool.HOST, Pool.DEVICE, PCIE_UP)
    assert (down.bytes_per_s, up.bytes_per_s) == (5.0, 0.0)


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_a_throttle_is_in_the_copies_and_in_their_records(lane: str) -> None:
    """What is simulated is what is done."""
    graph = moved(options={**VALUES, "throttle": {lane: "1GB/s"}})
    for copy in (*uploads(graph), *downloads(graph)):
        rate = 1e9 if copy.stamp.lane.value == lane else 0.0
        assert copy.record.bytes_per_s == copy.launch.args[-1] == rate


# -- places


def test_two_micro_steps_use_the_same_places() -> None:
    """The first one's values are back when the second one's are made."""
    graph = moved(micro_batches=2)
    assert_moved(graph)
    by_step: dict[int, list[Any]] = {0: [], 1: []}
    for copy in downloads(graph):
        by_step[stamp_of(copy.tensors[0]).micro_step].append(copy.launch.args[3])
    assert by_step[0] == by_step[1]
    assert len(by_step[0]) == DEPTH
    (staging,) = {copy.launch.args[2] for copy in downloads(graph)}
    assert isinstance(staging, fx.Node)
    assert num_bytes(staging) == DEPTH * aligned(VALUE_BYTES // 2)


def made_up(lives: Sequence[tuple[int, int, int]]) -> list[Saved]:
    """Values that are not of any graph: made, first read in backward, and of so many elements."""
    graph = fx.Graph()
    clock = [graph.placeholder(f"at_{i}") for i in range(64)]
    found = []
    for begin, end, size in sorted(lives):
        clock[begin].meta["val"] = torch.empty(size, device="meta")
        first = clock[end]
        found.append(Saved(clock[begin], ((first, clock[begin]),), clock[begin], first))
    return found


lifetimes = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(1, 200)),
    max_size=12,
    unique_by=lambda life: life[0],
)


@settings(max_examples=60, deadline=None)
@given(lifetimes)
def test_two_values_that_are_there_together_are_not_in_one_place(
    lives: list[tuple[int, int, int]],
) -> None:
    """Nor on one cache line."""
    values = made_up([(begin, begin + us, size) for begin, us, size in lives])
    where = places(values)
    assert set(where) == {saved.node for saved in values}
    for i, one in enumerate(values):
        for other in values[i + 1 :]:
            if other.node < one.first_read:
                begin, end = where[one.node], where[one.node] + aligned(num_bytes(one.node))
                theirs = where[other.node]
                assert theirs >= end or theirs + num_bytes(other.node) <= begin


def test_a_place_is_used_again() -> None:
    """By what is made when the one before it has been read, and by the first that fits."""
    values = made_up([(0, 10, 64), (1, 3, 32), (2, 12, 16), (4, 9, 16), (5, 9, 16), (6, 9, 17)])
    found = [places(values)[saved.node] for saved in values]
    assert found == [0, 256, 384, 256, 320, 448]


# -- when copies come and go


CASES: list[dict[str, Any]] = [
    {},
    {"micro_batches": 2},
    {"make": transposed},
    {"options": {**VALUES, "memory": "all_host"}, "micro_batches": 2},
    {"zero": 3, "world_size": 8, "micro_batches": 2},
]
everywhere = pytest.mark.parametrize("case", CASES)


@everywhere
def test_a_value_is_there_before_it_comes_back(case: dict[str, Any]) -> None:
    """The wait of the copy down stands before the launch of the copy up."""
    graph = moved(**case)
    values = [copy for copy in downloads(graph) if not copy.of_parameters]
    assert values
    for down in values:
        up = upload_of(graph, down)
        assert down.launch < down.wait < down.parts[0] < up.launch


@everywhere
def test_a_copy_up_starts_before_what_reads_it_and_not_too_early(case: dict[str, Any]) -> None:
    """Not before the phase before its own has begun, whose values are others'."""
    graph = moved(**case)
    segments = list(graph.segments())
    for up in uploads(graph):
        first = min(user for part in up.parts for user in part.users)
        assert up.launch < up.wait < first
        place = segments.index(up.stamp.segment)
        if place > 1:
            before = [n for n in graph.nodes(segment=segments[place - 2]) if is_compute(n)]
            assert max(before) < up.launch


def test_a_copy_starts_no_earlier_than_the_phase_before_its_own() -> None:
    """However slow it is: by its cost alone it would have to be there long before."""
    options = {**EAGER, "memory": "all_host"}
    with costing(replace(QUICK, latency_us=1e6)):
        graph = step_graph(build, options=options, micro_batches=2, **ONE_PROCESS)
    segments = list(graph.segments())
    late = [copy for copy in uploads(graph) if segments.index(copy.stamp.segment) > 1]
    assert late
    for up in late:
        segment = segments[segments.index(up.stamp.segment) - 2]
        assert max(filter(is_compute, graph.nodes(segment=segment))) < up.launch


def test_a_copy_up_is_on_its_way_while_something_is_computed() -> None:
    """As late as may be: one operator is enough here."""
    graph = moved()
    order = list(graph.graph.nodes)
    found = sorted(uploads(graph), key=lambda copy: copy.wait)
    for copy in found[1:]:
        between = order[order.index(copy.launch) : order.index(copy.wait)]
        assert len([n for n in between if is_compute(n) and not is_view(n)]) == 1


def test_a_value_is_let_go_of_when_its_copy_should_be_there() -> None:
    """By its cost, and not at the end: the device holds it until then."""
    graph = moved()
    order = list(graph.graph.nodes)
    *others, last = downloads(graph)
    for copy in others:
        between = order[order.index(copy.launch) : order.index(copy.wait)]
        own = [n for n in between if is_compute(n) and not is_view(n)]
        assert own == []
    assert last.wait < upload_of(graph, last).launch


# -- settings


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half", True])
def test_a_share_is_a_number_from_nothing_to_all(share: Any) -> None:
    """Of another type, or out of range."""
    with pytest.raises(fxzero.ConfigError, match=r"offload_activations.share=.* must be"):
        fxzero.Config.from_options({"offload_activations": {"share": share}})


@pytest.mark.parametrize("least", [0, -1, 1.5, "few", True])
def test_min_bytes_is_a_number_of_bytes(least: Any) -> None:
    """One at least."""
    with pytest.raises(fxzero.ConfigError, match=r"offload_activations.min_bytes=.* must be"):
        fxzero.Config.from_options({"offload_activations": {"min_bytes": least}})


@pytest.mark.parametrize("name", ["relu_x", "mm", "primals_1", "threshold_backward"])
def test_a_plan_that_names_what_is_not_saved(name: str) -> None:
    """No node, one that backward does not read, an input, one of backward."""
    rule = rf"moves '{name}' to the host, which is no value that forward saves"
    with pytest.raises(fxzero.ConfigError, match=rule):
        OffloadActivations(share=1.0).apply(plain(), Moved((name,)), compiled().context)


def test_a_plan_may_name_any_of_them() -> None:
    """The last one alone, say, however little time there is."""
    decided = mock.patch.object(OffloadActivations, "decide", return_value=Moved(("relu_3",)))
    with decided:
        graph = step_graph(build, options={**EAGER, **VALUES}, **ONE_PROCESS)
    assert gone(graph) == ["relu_3"]
    assert_moved(graph)


def test_a_plan_that_names_nothing() -> None:
    """Leaves the graph as it is."""
    graph = plain()
    assert dict(OffloadActivations(share=1.0).apply(graph, Moved(), compiled().context)) == {}
    assert [n.name for n in graph.graph.nodes] == [n.name for n in plain().graph.nodes]


def test_the_ordinary_loop_is_refused() -> None:
    """Its forward and backward are called apart."""
    model = torch.compile(nn.Linear(4, 4), backend="fxzero", options=VALUES)
    with pytest.raises(Exception, match=r"(?s)offload_activations.share=1.*fxzero.compile_step"):
        model(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()


# -- a timeline

_US: dict[Any, float] = {
    torch.ops.aten.mm.default: 10.0,
    torch.ops.aten.relu.default: 3.0,
}
BY_HAND = FixedCosts(compute=lambda nodes: sum(_US.get(node.target, 0.0) for node in nodes))


def read_late() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Layers of several operators, and a batch."""
    return Layers(), (torch.ones(4, 8),)


@functools.cache
def by_hand() -> tuple[Timeline, list[fx.Node], list[fx.Node]]:
    """A timeline of two layers, their products and their activations."""
    graph = step_graph(chain_of(2, WIDTH, ROWS), options=EAGER, **ONE_PROCESS)
    timeline = Timeline(graph, BY_HAND, Throttle(), fuses=False)
    mm, relu = (find(graph, target) for target in _US)
    return timeline, mm, relu


def test_one_operator_behind_the_other() -> None:
    """Two layers forward, and three products backward."""
    timeline, mm, relu = by_hand()
    assert [timeline.begin_us(node) for node in mm] == [0, 13, 26, 36, 46]
    assert [timeline.end_us(node) for node in mm] == [10, 23, 36, 46, 56]
    assert [(timeline.begin_us(node), timeline.end_us(node)) for node in relu] == [
        (10, 13),
        (23, 26),
    ]


@pytest.mark.parametrize(
    ("us", "running", "following"),
    [
        (-0.1, None, 0),
        (0.0, 0, 0),
        (0.1, 0, "relu"),
        (9.9, 0, "relu"),
        (10.0, "relu", "relu"),
        (13.0, 1, 1),
        (45.9, 3, 4),
        (46.0, 4, 4),
        (46.1, 4, None),
        (56.0, 4, None),
        (1e9, 4, None),
    ],
)
def test_what_runs_at_some_time_and_what_is_next(us: float, running: Any, following: Any) -> None:
    """At a border, what begins there is both."""
    timeline, mm, relu = by_hand()

    def node(which: Any) -> fx.Node | None:
        return None if which is None else relu[0] if which == "relu" else mm[which]

    assert timeline.running_at(us) is node(running)
    assert timeline.next_at(us) is node(following)


@pytest.mark.parametrize("fuses", [True, False])
def test_a_region_is_one(fuses: bool) -> None:
    """Its nodes begin and end together."""
    graph = plain(read_late)
    timeline = Timeline(graph, BY_HAND, Throttle(), fuses=fuses)
    products = find(graph, torch.ops.aten.mm.default)[:2]
    for sine, product in zip(find(graph, torch.ops.aten.sin.default), products, strict=False):
        assert timeline.begin_us(sine) == timeline.begin_us(product)
        assert timeline.end_us(sine) == timeline.end_us(product) - (0 if fuses else 10)
    assert timeline.running_at(9.9) is timeline.running_at(0.0)
    assert (timeline.running_at(0.0) is products[0]) == (not fuses)
    assert [timeline.end_us(node) for node in products] == [10, 20]


def test_transfers_take_no_time_of_compute() -> None:
    """What a node waits for is another matter."""
    graph = plain(zero=3, world_size=8)
    timeline = timeline_of(graph, BY_HAND)
    *_, last = find(graph, torch.ops.aten.mm.default)
    products = len(find(graph, torch.ops.aten.mm.default))
    assert timeline.end_us(last) == 10 * products + 3 * DEPTH
    for gather in graph.transfers(name="gather"):
        assert timeline.begin_us(gather.launch) == timeline.end_us(gather.launch)
    assert of_role(graph, Role.WAIT)


@pytest.mark.parametrize(("lane", "rate"), [(Lane.H2D, 1e6), (Lane.D2H, 2e6)])
def test_what_a_copy_takes(lane: Lane, rate: float) -> None:
    """By the throttle of its own lane, whatever its record says."""
    throttle = Throttle(h2d="1MB/s", d2h="2MB/s")
    timeline = timeline_of(plain(), SLOW_OPERATORS, throttle)
    saved, *_ = saved_values(plain(), 1)
    latency_us = _LAPTOP.host.latency_us
    for known in (0.0, 5.0):
        found = timeline.copy_us(record_of(saved.node, lane, known))
        assert found == pytest.approx(latency_us + VALUE_BYTES / rate * 1e6)
