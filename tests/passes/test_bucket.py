# ruff: noqa: E501
"""Which parameters travel together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from examples.models import gpt_bench
from fxzero.errors import ConfigError
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.inspect.capture import capture
from fxzero.passes import Bucket
from fxzero.passes.bucket import join_small
from tests.passes.test_shard_params import scaled
from tests.tracing import Build, find, of, of_role, params_of, record_of, scheduled, texts, words


def mlp() -> nn.Module:
    """Two blocks of two layers with biases: 4 parameters a block, 288 B + 288 B."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
    return nn.Sequential(*blocks)


blocks = of(mlp, 4, 8)
linear = of(lambda: nn.Linear(8, 8), 4, 8)


def buckets(graph: StepGraph, lane: str, phase: Phase) -> list[tuple[str, ...]]:
    """The parameters of each bucket."""
    return params_of([t.launch for t in graph.transfers(phase=phase, name=lane)])


@texts
def test_before_and_after() -> None:
    """A layer's weight and bias share a gather and a reduce."""
    record = record_of(linear, "bucket", world_size=8)
    assert_expected_inline(
        words(record.before),
        """\
primals_1: f32[1, 8] = input
primals_2: f32[1] = input
primals_3: f32[4, 8] = input
tangents_1: f32[4, 8] = input
gather_: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_1], 8, 0)  # forward gather launch
gather__done: (f32[8, 8]) = wait(gather_)  # forward gather wait
weight: f32[8, 8] = getitem(gather__done, 0)  # forward gather part
t: f32[8, 8] = aten.t(weight)  # forward compute compute
gather__2: (f32[8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_2], 8, 0)  # forward gather launch
gather__2_done: (f32[8]) = wait(gather__2)  # forward gather wait
bias: f32[8] = getitem(gather__2_done, 0)  # forward gather part
addmm: f32[4, 8] = aten.addmm(bias, primals_3, t)  # forward compute compute
release_default_2: None = fxzero.release([bias])  # forward gather release
release_default: None = fxzero.release([weight])  # forward gather release
gather__1: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_1], 8, 0)  # backward gather launch
gather__1_done: (f32[8, 8]) = wait(gather__1)  # backward gather wait
weight_1: f32[8, 8] = getitem(gather__1_done, 0)  # backward gather part
t_5: f32[8, 8] = aten.t(weight_1)  # backward compute compute
t_1: f32[8, 8] = aten.t(t_5)  # backward compute compute
mm: f32[4, 8] = aten.mm(tangents_1, t_1)  # backward compute compute
release_default_1: None = fxzero.release([weight_1])  # backward gather release
t_2: f32[8, 4] = aten.t(tangents_1)  # backward compute compute
mm_1: f32[8, 8] = aten.mm(t_2, primals_3)  # backward compute compute
t_3: f32[8, 8] = aten.t(mm_1)  # backward compute compute
sum_1: f32[1, 8] = aten.sum.dim_IntList(tangents_1, [0], True)  # backward compute compute
view: f32[8] = aten.view(sum_1, [8])  # backward compute compute
reduce__1: (f32[1]) = _c10d_functional.reduce_scatter_tensor_coalesced([view], avg, 8, 0)  # backward reduce launch
reduce__1_done: (f32[1]) = wait(reduce__1)  # backward reduce wait
getitem_1: f32[1] = getitem(reduce__1_done, 0)  # backward reduce part
t_4: f32[8, 8] = aten.t(t_3)  # backward compute compute
reduce_: (f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([t_4], avg, 8, 0)  # backward reduce launch
reduce__done: (f32[1, 8]) = wait(reduce_)  # backward reduce wait
getitem: f32[1, 8] = getitem(reduce__done, 0)  # backward reduce part
return (addmm, getitem, getitem_1, mm)""",
    )
    assert_expected_inline(
        words(record.after),
        """\
primals_1: f32[1, 8] = input
primals_2: f32[1] = input
primals_3: f32[4, 8] = input
tangents_1: f32[4, 8] = input
gather__3: (f32[8, 8], f32[8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_1, primals_2], 8, 0)  # forward gather launch gather.forward.0
gather__3_done: (f32[8, 8], f32[8]) = wait(gather__3)  # forward gather wait gather.forward.0
weight: f32[8, 8] = getitem(gather__3_done, 0)  # forward gather part gather.forward.0
bias: f32[8] = getitem(gather__3_done, 1)  # forward gather part gather.forward.0
t: f32[8, 8] = aten.t(weight)  # forward compute compute
addmm: f32[4, 8] = aten.addmm(bias, primals_3, t)  # forward compute compute
release_default: None = fxzero.release([bias, weight])  # forward gather release gather.forward.0
gather__1: (f32[8, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_1], 8, 0)  # backward gather launch gather.backward.1
gather__1_done: (f32[8, 8]) = wait(gather__1)  # backward gather wait gather.backward.1
weight_1: f32[8, 8] = getitem(gather__1_done, 0)  # backward gather part gather.backward.1
t_5: f32[8, 8] = aten.t(weight_1)  # backward compute compute
t_1: f32[8, 8] = aten.t(t_5)  # backward compute compute
mm: f32[4, 8] = aten.mm(tangents_1, t_1)  # backward compute compute
release_default_1: None = fxzero.release([weight_1])  # backward gather release gather.backward.1
t_2: f32[8, 4] = aten.t(tangents_1)  # backward compute compute
mm_1: f32[8, 8] = aten.mm(t_2, primals_3)  # backward compute compute
t_3: f32[8, 8] = aten.t(mm_1)  # backward compute compute
sum_1: f32[1, 8] = aten.sum.dim_IntList(tangents_1, [0], True)  # backward compute compute
view: f32[8] = aten.view(sum_1, [8])  # backward compute compute
t_4: f32[8, 8] = aten.t(t_3)  # backward compute compute
reduce__2: (f32[1], f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([view, t_4], avg, 8, 0)  # backward reduce launch reduce.backward.0
reduce__2_done: (f32[1], f32[1, 8]) = wait(reduce__2)  # backward reduce wait reduce.backward.0
getitem_1: f32[1] = getitem(reduce__2_done, 0)  # backward reduce part reduce.backward.0
getitem: f32[1, 8] = getitem(reduce__2_done, 1)  # backward reduce part reduce.backward.0
return (addmm, getitem, getitem_1, mm)""",
    )


@pytest.mark.parametrize("world_size", [8, 256, 1024])
def test_a_bucket_per_layer(world_size: int) -> None:
    """Equal layers give equal buckets; backward gathers only what it reads."""
    graph = scheduled(blocks, "bucket", world_size=world_size)
    both = ("0.weight", "0.bias", "2.weight", "2.bias")
    names = [tuple(f"{layer}.{name}" for name in both) for layer in (0, 1)]
    assert [sorted(b) for b in buckets(graph, "gather", Phase.FORWARD)] == [
        sorted(n) for n in names
    ]
    assert [sorted(b) for b in buckets(graph, "reduce", Phase.BACKWARD)] == [
        sorted(n) for n in names[::-1]
    ]
    assert [sorted(b) for b in buckets(graph, "gather", Phase.BACKWARD)] == [
        ["1.0.weight", "1.2.weight"],
        ["0.0.weight", "0.2.weight"],
    ]


@pytest.mark.parametrize("cap_bytes", [1, 256, 288, 300, 1 << 20])
def test_the_cap(cap_bytes: int) -> None:
    """No bucket of several parameters is larger; each parameter travels exactly once."""
    graph = scheduled(blocks, "bucket", Bucket(cap_bytes, 0))
    for lane, phase in (("gather", Phase.FORWARD), ("reduce", Phase.BACKWARD)):
        transfers = graph.transfers(phase=phase, name=lane)
        for transfer in transfers:
            assert len(transfer.tensors) == 1 or transfer.record.full_bytes <= cap_bytes
        names = [name for bucket in buckets(graph, lane, phase) for name in bucket]
        assert len(names) == len(set(names)) == 8
    if cap_bytes == 1:
        assert len(graph.transfers(phase=Phase.FORWARD)) == 8
    if cap_bytes == 288:  # a weight of 256 B and a bias of 32 B
        assert len(graph.transfers(phase=Phase.FORWARD)) == 4


def test_each_part_goes_where_it_went() -> None:
    """Joining moves tensors to other positions: each part is still its own parameter's."""
    graph = scheduled(blocks, "bucket")
    found = 0
    for transfer in graph.transfers():
        assert len(transfer.tensors) == len(transfer.parts) == transfer.record.num_tensors
        for part in transfer.parts:
            sent = transfer.tensors[part.args[1]]  # type: ignore[index]
            assert len(stamp_of(part).params) == 1
            source = sent
            while source.op != "placeholder" and transfer.stamp.lane.value == "gather":
                source = source.all_input_nodes[0]
            if source.op == "placeholder":
                assert graph.inputs[source] == stamp_of(part).params[0]
                found += 1
    assert found > 1


def test_dtypes_are_not_mixed() -> None:
    """A float64 layer next to a float32 one."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleList(
                [nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False, dtype=torch.float64)]
            )
            self.layers = nn.ModuleList([self.block])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block[1](self.block[0](x).double()).sum()

    graph = scheduled(of(Mixed, 4, 8), "bucket")
    for transfer in graph.transfers():
        assert len({n.meta["val"].dtype for n in transfer.tensors}) == 1
    assert len(graph.transfers(phase=Phase.FORWARD)) == 2


def test_groups_and_operators_are_not_mixed() -> None:
    """On two axes the second stage is joined on its own, and starts after the first."""
    graph = scheduled(linear, "bucket", mesh_shape=(2, 4))
    inside, across = graph.transfers(name="reduce")
    assert len(inside.tensors) == len(across.tensors) == 2
    assert set(across.tensors) <= set(inside.results)
    assert across.launch > inside.launch


def test_a_scalar_does_not_join_a_scatter() -> None:
    """Its all-reduce is another operator."""
    graph = scheduled(scaled, "bucket")
    assert sorted(buckets(graph, "reduce", Phase.BACKWARD)) == [("layer.weight",), ("scale",)]


def test_releases_are_joined() -> None:
    """A bucket's parameters end together."""
    graph = scheduled(linear, "bucket")
    forward = of_role(graph, Role.RELEASE, phase=Phase.FORWARD)
    assert [len(n.args[0]) for n in forward] == [2]  # type: ignore[arg-type]


def test_every_node_of_a_bucket_names_it() -> None:
    """From the first preparation to the release."""
    graph = scheduled(of(lambda: nn.Linear(8, 13), 4, 8), "bucket")
    names = [t.stamp.bucket for t in graph.transfers()]
    assert len(names) == len(set(names))
    for transfer in graph.transfers():
        nodes = (*transfer.prepare, transfer.wait, *transfer.parts, *transfer.finish)
        assert {stamp_of(n).bucket for n in nodes} == {transfer.stamp.bucket}
    for release in of_role(graph, Role.RELEASE):
        assert stamp_of(release).bucket in names


@pytest.mark.parametrize("cap_bytes", [0, -1])
def test_a_cap_must_be_positive(cap_bytes: int) -> None:
    """Nothing fits into zero bytes."""
    with pytest.raises(ConfigError, match=f"bucket.cap_bytes={cap_bytes} must be positive"):
        Bucket(cap_bytes, 0)


def test_padding_is_in_the_bucket() -> None:
    """Parameters of odd sizes join too."""
    build: Build = of(lambda: nn.Linear(8, 13), 4, 8)
    graph = scheduled(build, "bucket", world_size=3, rank=2)
    (forward,) = graph.transfers(phase=Phase.FORWARD)
    assert [n.meta["val"].shape[0] for n in forward.tensors] == [5, 5]
    assert find(graph, torch.ops.aten.constant_pad_nd.default)


def joined_one_by_one(buckets: list[Any], cap_bytes: int, min_bytes: int) -> list[list[Any]]:
    """The rule, looking at everything again each time."""
    joined: list[list[Any]] = []

    def size_of(bucket: list[Any]) -> int:
        return sum(transfer.record.full_bytes for transfer in bucket)

    for i, bucket in enumerate(buckets):
        is_small = size_of(bucket) < min_bytes
        for other in reversed(joined if is_small else joined[-1:]):
            alike = other[0].record.combines == bucket[0].record.combines
            if alike and size_of(other) + size_of(bucket) <= cap_bytes:
                if size_of(other) < min_bytes or (is_small and i == len(buckets) - 1):
                    other += bucket
                    break
                joined.append(list(bucket))
                break
        else:
            joined.append(list(bucket))
    return joined


@settings(max_examples=500, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12),
    cap_bytes=st.integers(1, 12),
    min_bytes=st.integers(0, 12),
)
def test_small_ones_join_as_if_all_were_looked_at(
    sizes: list[tuple[int, bool]], cap_bytes: int, min_bytes: int
) -> None:
    """What has no room for the smallest of its kind is not looked at, and is not missed."""
    buckets: list[Any] = [
        [SimpleNamespace(record=SimpleNamespace(full_bytes=size, combines=kind))]
        for size, kind in sizes
    ]
    found = join_small(buckets, cap_bytes, min_bytes)
    assert found == joined_one_by_one(buckets, cap_bytes, min_bytes)


def test_what_starts_from_a_joined_reduce_comes_behind_it() -> None:
    """At stage 0 on two axes a gradient is all-reduced over one and then over the other: where the
    first ones are joined at the last, the second of an earlier parameter follows. The order is
    verified behind every pass."""
    captured = capture(
        lambda: gpt_bench(num_layers=4),
        zero=0,
        world_size=8,
        mesh=(2, 4),
        step=True,
        micro_batches=4,
        options={"cost": {"cluster": "laptop"}},
    )
    (compilation,) = captured.compilations
    assert compilation.joint is not None
    reduces = [t.record for t in compilation.joint.transfers() if t.of_parameters]
    assert {record.size for record in reduces} == {2, 4}
    assert max(record.num_tensors for record in reduces) > 1
