"""Which copies of parameters there are, what reads each, and how many are on their way."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

import fxzero
from fxzero.cost import FixedCosts
from fxzero.graph import Lane, Phase, Role, Segment, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import TransferNodes
from fxzero.passes import Context
from fxzero.passes.offload_params import Brought, OffloadParams
from fxzero.passes.recompute import Policy
from fxzero.runtime import copies
from fxzero.runtime.ahead import Take
from tests.mutants.graphs import KEEP_ALL, SLOW_LINK
from tests.passes.test_offload_states import (
    HOST,
    ONE_PROCESS,
    compiled,
    downloads,
    offloaded,
    uploads,
)
from tests.stepping import EAGER, chain_of, compiled_step
from tests.tracing import of_role, params_of

ALL: dict[str, Any] = {**EAGER, "memory": "all_host"}
L2L: dict[str, Any] = {**EAGER, "memory": "l2l"}
HALF: dict[str, Any] = {**HOST, "offload_params": {"share": 0.5, "in_flight": 1}}
IN_ONE: dict[str, Any] = {**ALL, "bucket": {}}
"""All layers in one bucket."""

SETTINGS: list[dict[str, Any]] = [
    {**ONE_PROCESS},
    {"zero": 3, "micro_batches": 2},
    {**ONE_PROCESS, "micro_batches": 2, "clip_grad_norm": 1.0},
    {"zero": 3, "options": IN_ONE},
    {**ONE_PROCESS, "options": L2L},
]
everywhere = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def with_params(depth: int = 3, options: dict[str, Any] = ALL, **settings: Any) -> StepGraph:
    """A scheduled graph with parameters on the host."""
    return offloaded(depth, options, **settings)


def split_copies(graph: StepGraph) -> list[TransferNodes]:
    """Copies that are made for each use, in the order of their waits."""
    found = [copy for copy in uploads(graph) if copy.stamp.made_by == "offload_params"]
    return sorted(found, key=lambda copy: copy.wait)


def segment_of(node: fx.Node) -> Segment:
    """The phase and the micro-step in which a copy is read."""
    return stamp_of(node).segment


def is_compute(node: fx.Node) -> bool:
    """Whether a node computes something, and is no copy nor waits for one."""
    return stamp_of(node).role is Role.COMPUTE


def names(params: tuple[str, ...]) -> list[str]:
    """Parameters without their models' numbers."""
    return [key.partition("/")[2] for key in params]


# -- which copies there are


@everywhere
def test_a_copy_is_read_in_its_own_segment_alone(settings: dict[str, Any]) -> None:
    """All that it brings is read, in the forward or backward of the micro-step that it is of."""
    graph = with_params(4, **settings)
    assert split_copies(graph) == sorted(uploads(graph), key=lambda copy: copy.wait)
    for copy in split_copies(graph):
        for part in copy.parts:
            assert part.users
            assert {segment_of(user) for user in part.users} == {copy.stamp.segment}
        assert copy.launch < copy.wait < copy.parts[0]


@everywhere
def test_a_segment_that_reads_a_parameter_has_one_copy_of_it(settings: dict[str, Any]) -> None:
    """Not two, and no copy of what is read elsewhere."""
    graph = with_params(4, **settings)
    found = Counter(
        (copy.stamp.segment, param) for copy in split_copies(graph) for param in copy.tensors
    )
    assert set(found.values()) == {1}
    assert {param for _, param in found} == set(graph.inputs)
    micro_steps = settings.get("micro_batches", 1)
    forward = [segment for segment, _ in found if segment.phase is Phase.FORWARD]
    assert Counter(forward) == {Segment(Phase.FORWARD, i): 4 for i in range(micro_steps)}


def test_backward_has_no_copy_of_what_it_does_not_read() -> None:
    """The first layer's input wants no gradient, even where all layers are copied together."""
    graph = with_params(4, IN_ONE, zero=0)
    first, second = split_copies(graph)
    assert names(first.stamp.params) == [f"layers.{i}.weight" for i in range(4)]
    assert second.stamp.phase is Phase.BACKWARD
    assert sorted(names(second.stamp.params)) == [f"layers.{i}.weight" for i in (1, 2, 3)]


@pytest.mark.parametrize("zero", [1, 2])
def test_stages_that_gather_once_copy_once(zero: int) -> None:
    """Forward and backward of all micro-steps read what is gathered: there is one copy."""
    graph = with_params(4, zero=zero, micro_batches=2)
    assert {copy.stamp.segment for copy in uploads(graph)} == {Segment(Phase.FORWARD, 0)}
    assert sorted(params_of([copy.launch for copy in uploads(graph)])) == [
        (f"layers.{i}.weight",) for i in range(4)
    ]


@everywhere
def test_records_and_stamps_are_of_what_is_copied(settings: dict[str, Any]) -> None:
    """Bytes, parameters, and names that no other copy has."""
    graph = with_params(4, **settings)
    for copy in split_copies(graph):
        assert copy.launch.target is copies.upload
        assert copy.record.full_bytes == sum(map(num_bytes, copy.tensors))
        assert copy.record.num_tensors == len(copy.tensors) == len(copy.parts)
        assert copy.stamp.params == tuple(stamp_of(p).params[0] for p in copy.tensors)
        for param, part in zip(copy.tensors, copy.parts, strict=True):
            assert stamp_of(part).params == stamp_of(param).params
            assert part.meta["val"].shape == param.meta["val"].shape
    buckets = [copy.stamp.bucket for copy in split_copies(graph)]
    assert len(set(buckets)) == len(buckets)


def test_16_bits_are_copied_where_16_bits_are_computed() -> None:
    """For each use."""
    graph = with_params(precision="bf16")
    assert len(split_copies(graph)) > 3
    for copy in split_copies(graph):
        assert copy.record.dtype is copy.launch.args[1] is torch.bfloat16
        assert copy.record.full_bytes * 2 == sum(map(num_bytes, copy.tensors))
        assert all(part.meta["val"].dtype is torch.bfloat16 for part in copy.parts)


def test_a_throttle_is_in_them_too() -> None:
    """In the launches and in the records."""
    graph = with_params(options={**ALL, "throttle": {"h2d": "1GB/s"}})
    for copy in split_copies(graph):
        assert copy.record.bytes_per_s == copy.launch.args[-1] == 1e9


def test_gradients_go_down_as_they_did() -> None:
    """What is updated on the host is another matter."""
    mine, theirs = with_params(4, **ONE_PROCESS), offloaded(4, HOST, **ONE_PROCESS)
    assert [c.launch.name for c in downloads(mine)] == [c.launch.name for c in downloads(theirs)]


def test_what_it_says_of_itself() -> None:
    """How many copies there were, and how many there are."""
    notes = {r.name: r.notes for r in compiled(4, ALL, **ONE_PROCESS).records}
    assert dict(notes["offload_params"]) == {"params": 4, "copies": 7}
    assert notes["join_copies"]["uploads"] == 7


# -- a share


def test_half_of_it_are_those_that_are_read_first() -> None:
    """What is read last is soon read again, and stays."""
    graph = with_params(4, HALF, **ONE_PROCESS)
    halves = split_copies(graph)
    assert {name for copy in halves for name in names(copy.stamp.params)} == {
        "layers.0.weight",
        "layers.1.weight",
    }
    others = [copy for copy in uploads(graph) if copy.stamp.made_by == "offload_states"]
    assert sorted(params_of([copy.launch for copy in others])) == [
        ("layers.2.weight",),
        ("layers.3.weight",),
    ]
    assert all(isinstance(copy.launch.target, Take) for copy in others)
    assert sorted(params_of(of_role(graph, Role.AHEAD))) == [
        ("layers.2.weight",),
        ("layers.3.weight",),
    ]


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 0), (0.1, 0), (0.2, 1), (0.3, 1), (0.9, 4), (1.0, 4)]
)
def test_a_share_is_rounded_to_whole_buckets(share: float, count: int) -> None:
    """To the nearest number of them, by those that are read first."""
    decided = OffloadParams(share=share).decide(offloaded(4, **ONE_PROCESS), Context())
    assert decided == Brought(tuple(f"upload.layers_{i}" for i in range(count)))


@everywhere
def test_nothing_is_copied_for_the_next_step(settings: dict[str, Any]) -> None:
    """It would be on the device from step to step."""
    graph = with_params(4, **settings)
    assert of_role(graph, Role.AHEAD) == []
    assert not [copy for copy in uploads(graph) if isinstance(copy.launch.target, Take)]


def test_no_share_leaves_the_copies_of_the_states() -> None:
    """A share that is given counts, and not what `memory` fills in."""
    given = with_params(options={**ALL, "offload_params": {"share": 0.0}})
    assert [n.name for n in given.graph.nodes] == [n.name for n in offloaded().graph.nodes]


# -- what prefetch decides


def test_a_gather_that_does_not_happen_has_no_copy() -> None:
    """Where backward reads what forward gathered, nothing is brought for it."""
    keeping = {**ALL, **SLOW_LINK, "prefetch": {"budget_bytes": KEEP_ALL}}
    graph = with_params(5, keeping)
    again = [g.stamp.params for g in graph.transfers(phase=Phase.BACKWARD, name=Lane.GATHER.value)]
    without = with_params(5, {**keeping, "prefetch": {"keep": False, "distance": 1}})
    assert len(again) < len(without.transfers(phase=Phase.BACKWARD, name=Lane.GATHER.value))
    for each in (graph, without):
        gathered = each.transfers(name=Lane.GATHER.value)
        parts = [part for copy in uploads(each) for part in copy.parts]
        assert len(gathered) == len(uploads(each))
        assert all(part.users for part in parts)
        assert {part for gather in gathered for part in gather.tensors} == set(parts)
        launches = [n for n in each.graph.nodes if n.target is copies.upload]
        waits = [n for n in each.graph.nodes if n.target is copies.join_upload]
        assert len(launches) == len(waits) == len(uploads(each))


# -- when copies start


def test_a_copy_starts_as_late_as_it_can() -> None:
    """Backward's, where one operator is enough to hide it, behind the one before it."""
    costs = FixedCosts(compute=10.0, latency_us=1.0)
    with mock.patch("fxzero.cost.settings.CostSettings.make", return_value=costs):
        graph = compiled_step(chain_of(4, 16, 8), options=ALL, **ONE_PROCESS).joint
    assert graph is not None
    order = list(graph.graph.nodes)
    for copy in split_copies(graph)[1:]:
        between = order[order.index(copy.launch) : order.index(copy.wait)]
        own = [n for n in between if is_compute(n) and not is_view(n)]
        assert len(own) == 1, copy.launch


@pytest.mark.parametrize(
    ("in_flight", "settings"),
    [(1, ONE_PROCESS), (2, ONE_PROCESS), (1, {"zero": 3, "micro_batches": 2})],
    ids=str,
)
def test_so_many_are_in_flight_at_most(in_flight: int, settings: dict[str, Any]) -> None:
    """The launch of one stands behind the wait of the one so many places before it."""
    options = {**ALL, "offload_params": {"in_flight": in_flight}}
    found = split_copies(with_params(4, options, **settings))
    for before, copy in zip(found, found[in_flight:], strict=False):
        assert before.wait < copy.launch
        assert before.parts[-1] < copy.launch < copy.wait


def test_others_start_as_many_as_have_to_be() -> None:
    """Without a bound, several at once: tiny layers hide no copy."""
    found = split_copies(with_params(4, **ONE_PROCESS))
    assert any(copy.launch < before.wait for before, copy in pairwise(found))


def test_a_layer_at_a_time() -> None:
    """l2l: a launch stands behind the wait before it, and each copy is of one layer."""
    graph = with_params(
        4, {"lower_regions": EAGER["lower_regions"], "memory": "l2l"}, **ONE_PROCESS
    )
    found = split_copies(graph)
    assert len(found) == 7
    for before, copy in pairwise(found):
        assert before.wait < copy.launch
    assert {len(copy.tensors) for copy in found} == {1}


def test_a_bound_leaves_alone_what_stays_from_step_to_step() -> None:
    """Copies of the states start with the step."""
    graph = with_params(4, HALF, **ONE_PROCESS)
    first = min(filter(is_compute, graph.nodes()))
    others = [copy for copy in uploads(graph) if isinstance(copy.launch.target, Take)]
    assert len(others) == 2
    assert all(copy.launch < first for copy in others)
    for before, copy in pairwise(split_copies(graph)):
        assert before.wait < copy.launch


@everywhere
def test_no_copy_starts_before_the_phase_before_its_own(settings: dict[str, Any]) -> None:
    """So that a micro-step may stand for others."""
    graph = with_params(4, **settings)
    segments = list(graph.segments())
    for copy in split_copies(graph):
        place = segments.index(copy.stamp.segment)
        if place > 1:
            before = [n for n in graph.nodes(segment=segments[place - 2]) if is_compute(n)]
            assert max(before) < copy.launch


# -- settings


def test_what_presets_fill_in() -> None:
    """Settings of passes that have their defaults."""
    filled = fxzero.Config.from_options({"memory": "l2l"}).filled
    assert filled.offload_states.share == filled.offload_params.share == 1.0
    assert filled.offload_params.in_flight == 1
    assert filled.recompute.policy is Policy.FULL
    assert filled.bucket.min_bytes == 0
    assert filled.offload_activations.share is None
    filled = fxzero.Config.from_options({"memory": "all_host"}).filled
    default = fxzero.Config()
    assert filled.offload_states.share == filled.offload_params.share == 1.0
    assert filled.offload_params.in_flight is None
    assert (filled.recompute, filled.bucket) == (default.recompute, default.bucket)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("offload_params", "share", 0.5),
        ("offload_params", "share", 0.0),
        ("offload_params", "in_flight", 3),
        ("recompute", "policy", "cheap"),
        ("bucket", "min_bytes", 4096),
        ("bucket", "cap_bytes", 1 << 20),
    ],
)
def test_what_is_given_by_hand_stays(name: str, key: str, value: Any) -> None:
    """And the rest of what a preset says is filled in."""
    filled = fxzero.Config.from_options({"memory": "l2l", name: {key: value}}).filled
    without = fxzero.Config.from_options({"memory": "l2l"}).filled
    assert getattr(getattr(filled, name), key) == value
    for other in ("offload_states", "offload_params", "recompute", "bucket"):
        if other != name:
            assert getattr(filled, other) == getattr(without, other)


@pytest.mark.parametrize(
    "options",
    [
        {"offload_params": {"share": 1.0}},
        {"offload_params": {"share": 0.6}, "offload_states": {"share": 0.5}},
        {"memory": "all_host", "offload_states": {"share": 0.5}},
        {"memory": "l2l", "offload_states": {"share": 0.0}},
    ],
    ids=str,
)
def test_what_lives_on_the_host_is_updated_there(options: dict[str, Any]) -> None:
    """No more parameters than state."""
    rule = r"offload_params.share=\S+ is more than offload_states.share=.*all_host"
    with pytest.raises(fxzero.ConfigError, match=rule):
        fxzero.Config.from_options(options)


def test_a_share_of_both_is_enough() -> None:
    """`memory` only fills them in."""
    shares = {"offload_states": {"share": 1.0}, "offload_params": {"share": 1.0}}
    graph = with_params(options={**EAGER, **shares})
    assert [n.name for n in graph.graph.nodes] == [n.name for n in with_params().graph.nodes]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "half", True])
def test_a_share_is_a_number_from_nothing_to_all(share: Any) -> None:
    """Of another type, or out of range."""
    with pytest.raises(fxzero.ConfigError, match=r"offload_params.share=.* must be"):
        fxzero.Config.from_options({"memory": "all_host", "offload_params": {"share": share}})


@pytest.mark.parametrize("in_flight", [0, -1, 1.5, "two", True])
def test_in_flight_is_a_number_of_copies(in_flight: Any) -> None:
    """One at least."""
    with pytest.raises(fxzero.ConfigError, match=r"offload_params.in_flight=.* must be"):
        fxzero.Config.from_options({"offload_params": {"in_flight": in_flight}})


def test_a_bound_on_nothing_is_said() -> None:
    """An error under strict."""
    given = {**HOST, "offload_params": {"in_flight": 2}}
    with pytest.warns(fxzero.FxZeroWarning, match=r"in_flight=2 has no effect"):
        compiled_step(chain_of(2), options=given)
    with pytest.raises(fxzero.ConfigError, match=r"in_flight=2 has no effect"):
        compiled_step(chain_of(2), options={**given, "strict": True})


def test_a_plan_that_names_a_copy_that_there_is_not() -> None:
    """As somebody may have written it."""
    decided = mock.patch.object(OffloadParams, "decide", return_value=Brought(("upload.x",)))
    rule = r"splits the copy 'upload.x', and could split: upload.layers_0, upload.layers_1"
    with decided, pytest.raises(fxzero.ConfigError, match=rule):
        compiled_step(chain_of(2), options=ALL)


def test_a_plan_may_name_any_of_them() -> None:
    """The last layer's alone, say, which no share would choose."""
    decided = mock.patch.object(OffloadParams, "decide", return_value=Brought(("upload.layers_1",)))
    with decided:
        joint = compiled_step(chain_of(2), options=ALL).joint
    assert joint is not None
    assert {tuple(names(c.stamp.params)) for c in split_copies(joint)} == {("layers.1.weight",)}
