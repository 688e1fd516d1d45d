# ruff: noqa: E501
"""When transfers start and where they are joined."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxzero.errors import ConfigError
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.verify import verify
from fxzero.passes import Bucket, Context, Fact, Prefetch
from tests.passes.test_bucket import blocks
from tests.passes.test_shard_params import tied
from tests.tracing import chain, of, of_role, record_of, run, scheduled, texts, trace, up_to, words

deep = chain(4)


def events(graph: StepGraph, phase: Phase, lane: Lane = Lane.GATHER) -> str:
    """Launches, waits, the compute of layers and releases: ``"launch 0, wait 0, mm 0"``."""
    found: list[str] = []
    for node in graph.nodes(phase=phase):
        stamp = stamp_of(node)
        layer = stamp.layer.removeprefix("layers.")
        if stamp.lane is lane and stamp.role in (Role.LAUNCH, Role.WAIT):
            found.append(f"{stamp.role.value} {layer}")
        elif stamp.role is Role.RELEASE and lane is Lane.GATHER:
            found.append(f"release {layer}")
        elif node.target is torch.ops.aten.mm.default and found[-1:] != [f"mm {layer}"]:
            found.append(f"mm {layer}")
    return ", ".join(found)


@texts
def test_before_and_after() -> None:
    """The second layer's gather starts before the first layer's is joined."""
    record = record_of(chain(2, relu=False), "prefetch", world_size=8)
    assert_expected_inline(
        words(record.before),
        """\
primals_1: f32[4, 8] = input
primals_2: f32[1, 8] = input
primals_3: f32[1, 8] = input
tangents_1: f32[] = input
gather_layers_0: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_2], 8, 0)  # forward gather launch layers.0 gather.forward.0
gather_layers_0_done: (f32[8, 8]) = wait(gather_layers_0)  # forward gather wait layers.0 gather.forward.0
layers_0_weight: f32[8, 8] = getitem(gather_layers_0_done, 0)  # forward gather part layers.0 gather.forward.0
t: f32[8, 8] = aten.t(layers_0_weight)  # forward compute compute layers.0
mm: f32[4, 8] = aten.mm(primals_1, t)  # forward compute compute layers.0
release_default: None = fxzero.release([layers_0_weight])  # forward gather release layers.0 gather.forward.0
gather_layers_2: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_3], 8, 0)  # forward gather launch layers.1 gather.forward.1
gather_layers_2_done: (f32[8, 8]) = wait(gather_layers_2)  # forward gather wait layers.1 gather.forward.1
layers_1_weight: f32[8, 8] = getitem(gather_layers_2_done, 0)  # forward gather part layers.1 gather.forward.1
t_1: f32[8, 8] = aten.t(layers_1_weight)  # forward compute compute layers.1
mm_1: f32[4, 8] = aten.mm(mm, t_1)  # forward compute compute layers.1
release_default_2: None = fxzero.release([layers_1_weight])  # forward gather release layers.1 gather.forward.1
sum_1: f32[] = aten.sum(mm_1)  # forward compute compute layers.1
expand: f32[4, 8] = aten.expand(tangents_1, [4, 8])  # backward compute compute layers.1
clone: f32[4, 8] = aten.clone(expand, memory_format=torch.contiguous_format)  # backward compute compute layers.1
t_2: f32[8, 4] = aten.t(clone)  # backward compute compute layers.1
mm_2: f32[8, 8] = aten.mm(t_2, mm)  # backward compute compute layers.1
t_3: f32[8, 8] = aten.t(mm_2)  # backward compute compute layers.1
gather_layers_3: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_3], 8, 0)  # backward gather launch layers.1 gather.backward.2
gather_layers_3_done: (f32[8, 8]) = wait(gather_layers_3)  # backward gather wait layers.1 gather.backward.2
layers_1_weight_1: f32[8, 8] = getitem(gather_layers_3_done, 0)  # backward gather part layers.1 gather.backward.2
t_10: f32[8, 8] = aten.t(layers_1_weight_1)  # backward compute compute layers.1
t_4: f32[8, 8] = aten.t(t_10)  # backward compute compute layers.1
mm_3: f32[4, 8] = aten.mm(clone, t_4)  # backward compute compute layers.1
release_default_3: None = fxzero.release([layers_1_weight_1])  # backward gather release layers.1 gather.backward.2
t_5: f32[8, 8] = aten.t(t_3)  # backward compute compute layers.1
reduce_layers_1: (f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([t_5], avg, 8, 0)  # backward reduce launch layers.1 reduce.backward.0
reduce_layers_1_done: (f32[1, 8]) = wait(reduce_layers_1)  # backward reduce wait layers.1 reduce.backward.0
getitem_1: f32[1, 8] = getitem(reduce_layers_1_done, 0)  # backward reduce part layers.1 reduce.backward.0
t_6: f32[8, 4] = aten.t(mm_3)  # backward compute compute layers.0
mm_4: f32[8, 8] = aten.mm(t_6, primals_1)  # backward compute compute layers.0
t_7: f32[8, 8] = aten.t(mm_4)  # backward compute compute layers.0
gather_layers_1: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_2], 8, 0)  # backward gather launch layers.0 gather.backward.3
gather_layers_1_done: (f32[8, 8]) = wait(gather_layers_1)  # backward gather wait layers.0 gather.backward.3
layers_0_weight_1: f32[8, 8] = getitem(gather_layers_1_done, 0)  # backward gather part layers.0 gather.backward.3
t_11: f32[8, 8] = aten.t(layers_0_weight_1)  # backward compute compute layers.0
t_8: f32[8, 8] = aten.t(t_11)  # backward compute compute layers.0
mm_5: f32[4, 8] = aten.mm(mm_3, t_8)  # backward compute compute layers.0
release_default_1: None = fxzero.release([layers_0_weight_1])  # backward gather release layers.0 gather.backward.3
t_9: f32[8, 8] = aten.t(t_7)  # backward compute compute layers.0
reduce_layers_0: (f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([t_9], avg, 8, 0)  # backward reduce launch layers.0 reduce.backward.1
reduce_layers_0_done: (f32[1, 8]) = wait(reduce_layers_0)  # backward reduce wait layers.0 reduce.backward.1
getitem: f32[1, 8] = getitem(reduce_layers_0_done, 0)  # backward reduce part layers.0 reduce.backward.1
return (sum_1, mm_5, getitem, getitem_1)""",
    )
    assert_expected_inline(
        words(record.after),
        """\
primals_1: f32[4, 8] = input
primals_2: f32[1, 8] = input
primals_3: f32[1, 8] = input
tangents_1: f32[] = input
gather_layers_0: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_2], 8, 0)  # forward gather launch layers.0 gather.forward.0
gather_layers_2: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_3], 8, 0)  # forward gather launch layers.1 gather.forward.1
gather_layers_0_done: (f32[8, 8]) = wait(gather_layers_0)  # forward gather wait layers.0 gather.forward.0
layers_0_weight: f32[8, 8] = getitem(gather_layers_0_done, 0)  # forward gather part layers.0 gather.forward.0
t: f32[8, 8] = aten.t(layers_0_weight)  # forward compute compute layers.0
mm: f32[4, 8] = aten.mm(primals_1, t)  # forward compute compute layers.0
release_default: None = fxzero.release([layers_0_weight])  # forward gather release layers.0 gather.forward.0
gather_layers_2_done: (f32[8, 8]) = wait(gather_layers_2)  # forward gather wait layers.1 gather.forward.1
layers_1_weight: f32[8, 8] = getitem(gather_layers_2_done, 0)  # forward gather part layers.1 gather.forward.1
t_1: f32[8, 8] = aten.t(layers_1_weight)  # forward compute compute layers.1
mm_1: f32[4, 8] = aten.mm(mm, t_1)  # forward compute compute layers.1
sum_1: f32[] = aten.sum(mm_1)  # forward compute compute layers.1
release_default_2: None = fxzero.release([layers_1_weight])  # forward gather release layers.1 gather.forward.1
gather_layers_3: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_3], 8, 0)  # backward gather launch layers.1 gather.backward.2
gather_layers_1: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_2], 8, 0)  # backward gather launch layers.0 gather.backward.3
gather_layers_3_done: (f32[8, 8]) = wait(gather_layers_3)  # backward gather wait layers.1 gather.backward.2
layers_1_weight_1: f32[8, 8] = getitem(gather_layers_3_done, 0)  # backward gather part layers.1 gather.backward.2
expand: f32[4, 8] = aten.expand(tangents_1, [4, 8])  # backward compute compute layers.1
clone: f32[4, 8] = aten.clone(expand, memory_format=torch.contiguous_format)  # backward compute compute layers.1
t_2: f32[8, 4] = aten.t(clone)  # backward compute compute layers.1
mm_2: f32[8, 8] = aten.mm(t_2, mm)  # backward compute compute layers.1
t_3: f32[8, 8] = aten.t(mm_2)  # backward compute compute layers.1
t_10: f32[8, 8] = aten.t(layers_1_weight_1)  # backward compute compute layers.1
t_4: f32[8, 8] = aten.t(t_10)  # backward compute compute layers.1
mm_3: f32[4, 8] = aten.mm(clone, t_4)  # backward compute compute layers.1
t_5: f32[8, 8] = aten.t(t_3)  # backward compute compute layers.1
release_default_3: None = fxzero.release([layers_1_weight_1])  # backward gather release layers.1 gather.backward.2
reduce_layers_1: (f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([t_5], avg, 8, 0)  # backward reduce launch layers.1 reduce.backward.0
gather_layers_1_done: (f32[8, 8]) = wait(gather_layers_1)  # backward gather wait layers.0 gather.backward.3
layers_0_weight_1: f32[8, 8] = getitem(gather_layers_1_done, 0)  # backward gather part layers.0 gather.backward.3
t_6: f32[8, 4] = aten.t(mm_3)  # backward compute compute layers.0
mm_4: f32[8, 8] = aten.mm(t_6, primals_1)  # backward compute compute layers.0
t_7: f32[8, 8] = aten.t(mm_4)  # backward compute compute layers.0
t_11: f32[8, 8] = aten.t(layers_0_weight_1)  # backward compute compute layers.0
t_8: f32[8, 8] = aten.t(t_11)  # backward compute compute layers.0
mm_5: f32[4, 8] = aten.mm(mm_3, t_8)  # backward compute compute layers.0
t_9: f32[8, 8] = aten.t(t_7)  # backward compute compute layers.0
release_default_1: None = fxzero.release([layers_0_weight_1])  # backward gather release layers.0 gather.backward.3
reduce_layers_1_done: (f32[1, 8]) = wait(reduce_layers_1)  # backward reduce wait layers.1 reduce.backward.0
getitem_1: f32[1, 8] = getitem(reduce_layers_1_done, 0)  # backward reduce part layers.1 reduce.backward.0
reduce_layers_0: (f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([t_9], avg, 8, 0)  # backward reduce launch layers.0 reduce.backward.1
reduce_layers_0_done: (f32[1, 8]) = wait(reduce_layers_0)  # backward reduce wait layers.0 reduce.backward.1
getitem: f32[1, 8] = getitem(reduce_layers_0_done, 0)  # backward reduce part layers.0 reduce.backward.1
return (sum_1, mm_5, getitem, getitem_1)""",
    )


@pytest.mark.parametrize("world_size", [8, 256, 1024])
def test_distance_0(world_size: int) -> None:
    """Each gather right before its use."""
    graph = scheduled(deep, "prefetch", Prefetch(0), world_size=world_size)
    assert events(graph, Phase.FORWARD) == (
        "launch 0, wait 0, mm 0, release 0, "
        "launch 1, wait 1, mm 1, release 1, "
        "launch 2, wait 2, mm 2, release 2, "
        "launch 3, wait 3, mm 3, release 3"
    )
    assert events(graph, Phase.BACKWARD) == (
        "launch 3, wait 3, mm 3, release 3, "
        "launch 2, wait 2, mm 2, release 2, "
        "launch 1, wait 1, mm 1, release 1, "
        "launch 0, wait 0, mm 0, release 0"
    )


@pytest.mark.parametrize("world_size", [8, 256, 1024])
def test_distance_1(world_size: int) -> None:
    """One bucket ahead: two full layers at most."""
    graph = scheduled(deep, "prefetch", Prefetch(1), world_size=world_size)
    assert events(graph, Phase.FORWARD) == (
        "launch 0, launch 1, wait 0, mm 0, release 0, "
        "launch 2, wait 1, mm 1, release 1, "
        "launch 3, wait 2, mm 2, release 2, "
        "wait 3, mm 3, release 3"
    )
    assert events(graph, Phase.BACKWARD) == (
        "launch 3, launch 2, wait 3, mm 3, release 3, "
        "launch 1, wait 2, mm 2, release 2, "
        "launch 0, wait 1, mm 1, release 1, "
        "wait 0, mm 0, release 0"
    )


def test_distance_2() -> None:
    """Two buckets ahead."""
    graph = scheduled(deep, "prefetch", Prefetch(2))
    assert events(graph, Phase.FORWARD) == (
        "launch 0, launch 1, launch 2, wait 0, mm 0, release 0, "
        "launch 3, wait 1, mm 1, release 1, "
        "wait 2, mm 2, release 2, "
        "wait 3, mm 3, release 3"
    )


def test_a_distance_past_the_end_launches_everything_first() -> None:
    """There are four gathers to start."""
    graph = scheduled(deep, "prefetch", Prefetch(100))
    assert events(graph, Phase.FORWARD).startswith("launch 0, launch 1, launch 2, launch 3, wait 0")


@pytest.mark.parametrize("distance", [0, 1, 2, 3])
def test_gathers_in_flight(distance: int) -> None:
    """Never more buckets than `distance` beyond the one that is waited for."""
    graph = scheduled(deep, "prefetch", Prefetch(distance))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert most_in_flight(graph, phase, Lane.GATHER) == distance + 1


@pytest.mark.parametrize(("reduce_distance", "expected"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 4)])
def test_reduces_in_flight(reduce_distance: int, expected: int) -> None:
    """Full gradients on the wire are bounded by the distance."""
    graph = scheduled(deep, "prefetch", Prefetch(1, reduce_distance))
    assert most_in_flight(graph, Phase.BACKWARD, Lane.REDUCE) == expected


JOINED = {
    0: "mm 3, launch 3, wait 3, mm 2, launch 2, wait 2, mm 1, launch 1, wait 1, mm 0, launch 0, wait 0",
    1: "mm 3, launch 3, mm 2, wait 3, launch 2, mm 1, wait 2, launch 1, mm 0, wait 1, launch 0, wait 0",
    2: "mm 3, launch 3, mm 2, launch 2, mm 1, wait 3, launch 1, mm 0, wait 2, launch 0, wait 1, wait 0",
}


@pytest.mark.parametrize("reduce_distance", JOINED)
def test_reduces_are_joined_late(reduce_distance: int) -> None:
    """0 joins before the next layer; 1 behind it, when the next one is launched; 2 one later."""
    graph = scheduled(deep, "prefetch", Prefetch(1, reduce_distance))
    assert events(graph, Phase.BACKWARD, Lane.REDUCE) == JOINED[reduce_distance]


def test_a_reduce_overlaps_the_next_layer() -> None:
    """With distance 1 layer 2's products stand between layer 3's launch and its wait."""
    text = events(scheduled(deep, "prefetch", Prefetch(1)), Phase.BACKWARD, Lane.REDUCE)
    assert text.index("launch 3") < text.index("mm 2") < text.index("wait 3")
    at_once = events(scheduled(deep, "prefetch", Prefetch(1, 0)), Phase.BACKWARD, Lane.REDUCE)
    assert "launch 3, wait 3" in at_once


def most_in_flight(graph: StepGraph, phase: Phase, lane: Lane) -> int:
    """The largest number of transfers of a lane that were launched and not yet joined."""
    most = 0
    open_buckets: set[str] = set()
    for node in graph.nodes(phase=phase):
        stamp = stamp_of(node)
        if stamp.lane is lane and stamp.role is Role.LAUNCH:
            open_buckets.add(stamp.bucket)
        elif stamp.lane is lane and stamp.role is Role.WAIT:
            open_buckets.discard(stamp.bucket)
        most = max(most, len(open_buckets))
    return most


def test_two_axes_start_the_second_stage_when_the_first_is_joined() -> None:
    """The all-reduce follows its reduce-scatter, and both end before backward does."""
    graph = scheduled(chain(2), "prefetch", mesh_shape=(2, 4))
    transfers = graph.transfers(name="reduce")
    assert len(transfers) == 4
    launches = {t.launch.target: [] for t in transfers}
    for transfer in transfers:
        launches[transfer.launch.target].append(transfer)
    inside, across = launches.values()
    for first, second in zip(inside, across, strict=True):
        assert first.wait < second.launch


def test_releases_come_before_the_next_launch() -> None:
    """Memory that is free is free before more is asked for."""
    text = events(scheduled(deep, "prefetch", Prefetch(1)), Phase.FORWARD)
    assert text.index("release 0") < text.index("launch 2")


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    build=st.sampled_from([deep, blocks, tied]),
    zero=st.sampled_from([0, 2, 3]),
    mesh_shape=st.sampled_from([(8,), (2, 4)]),
    distance=st.integers(0, 9),
    reduce_distance=st.integers(0, 9),
    cap_bytes=st.sampled_from([1, 300, 1 << 20]),
)
def test_any_distance_is_a_valid_order(
    build: object,
    zero: int,
    mesh_shape: tuple[int, ...],
    distance: int,
    reduce_distance: int,
    cap_bytes: int,
) -> None:
    """The same nodes; each after what it reads; compute in its own order."""
    graph = trace(build, zero=zero, mesh_shape=mesh_shape)  # type: ignore[arg-type]
    run(graph, up_to("bucket", Bucket(cap_bytes, 0)))
    before = list(graph.graph.nodes)
    Prefetch(distance, reduce_distance).run(graph, Context())
    verify(graph, set(Fact) - {Fact.CUT}, after="prefetch")
    after = list(graph.graph.nodes)
    assert sorted(before, key=id) == sorted(after, key=id)
    position = {node: i for i, node in enumerate(after)}
    for node in after:
        assert all(position[source] < position[node] for source in node.all_input_nodes)
    graph.graph.lint()
    compute = [n for n in before if stamp_of(n).role is Role.COMPUTE]
    assert compute == sorted(compute, key=position.__getitem__)
    assert len(of_role(graph, Role.LAUNCH)) == len(graph.transfers())


@pytest.mark.parametrize("field", ["distance", "reduce_distance"])
def test_negative_distances_are_refused(field: str) -> None:
    """Nothing is joined before it is launched."""
    with pytest.raises(ConfigError, match=f"prefetch.{field}=-1 must be 0 or more"):
        Prefetch(**{field: -1})


def test_a_layer_that_is_too_large_for_a_bucket_waits_where_it_reads() -> None:
    """Its second bucket is not joined before its first use."""
    build = of(lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), 4, 8)
    graph = scheduled(build, "prefetch", Bucket(256, 0), Prefetch(0))
    waits = [
        i for i, n in enumerate(graph.nodes(phase=Phase.FORWARD)) if stamp_of(n).role is Role.WAIT
    ]
    products = [
        i
        for i, n in enumerate(graph.nodes(phase=Phase.FORWARD))
        if n.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    ]
    assert waits[-1] > products[0]
