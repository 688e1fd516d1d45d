# ruff: noqa: E501
"""Every gradient is reduced once, over each group that shares it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxzero.errors import PassError
from fxzero.graph import Lane, Phase, Role, Stamp, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.step_graph import Transfer
from fxzero.passes import Context, ShardGrads
from fxzero.sharding.params import GradSync
from tests.passes.test_shard_params import Scaled, scaled, tied, twice
from tests.tracing import (
    chain,
    find,
    of,
    of_role,
    params_of,
    record_of,
    run,
    scheduled,
    texts,
    trace,
    up_to,
    words,
)

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_SCATTER = _c10d.reduce_scatter_tensor_coalesced.default
_ALL_REDUCE = _c10d.all_reduce_coalesced.default


def reduces(graph: StepGraph) -> list[Transfer]:
    """The reductions, in launch order."""
    return graph.transfers(name="reduce")


def reduced_params(graph: StepGraph) -> list[tuple[str, ...]]:
    """The parameters of each reduction."""
    return params_of([t.launch for t in reduces(graph)])


def gradient(graph: StepGraph, name: str) -> fx.Node:
    """The graph's output that is a parameter's gradient."""
    (position,) = (p for p, key in graph.gradients.items() if key.endswith(f"/{name}"))
    node = graph.output_values[position]
    assert isinstance(node, fx.Node)
    return node


@texts
def test_before_and_after() -> None:
    """A marker becomes a launch, its part and its wait; the view that DTensor left goes."""
    record = record_of(chain(1, relu=False), "shard_grads", world_size=256)
    assert_expected_inline(
        words(record.before),
        """\
primals_1: f32[4, 8] = input
primals_2: f32[1, 8] = input
tangents_1: f32[] = input
constant_pad_nd_default: f32[1, 8] = aten.constant_pad_nd(primals_2, [0, 0, 0, 0])  # forward gather prepare layers.0
gather_layers_0: (f32[256, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([constant_pad_nd_default], 256, 0)  # forward gather launch layers.0
gather_layers_0_done: (f32[256, 8]) = wait(gather_layers_0)  # forward gather wait layers.0
layers_0_weight: f32[256, 8] = getitem(gather_layers_0_done, 0)  # forward gather part layers.0
slice_tensor: f32[8, 8] = aten.slice.Tensor(layers_0_weight, 0, 0, 8)  # forward gather finish layers.0
t: f32[8, 8] = aten.t(slice_tensor)  # forward compute compute layers.0
mm: f32[4, 8] = aten.mm(primals_1, t)  # forward compute compute layers.0
release_default: None = fxzero.release([layers_0_weight])  # forward gather release layers.0
sum_1: f32[] = aten.sum(mm)  # forward compute compute layers.0
expand: f32[4, 8] = aten.expand(tangents_1, [4, 8])  # backward compute compute layers.0
t_1: f32[8, 4] = aten.t(expand)  # backward compute compute layers.0
mm_1: f32[8, 8] = aten.mm(t_1, primals_1)  # backward compute compute layers.0
t_2: f32[8, 8] = aten.t(mm_1)  # backward compute compute layers.0
constant_pad_nd_default_1: f32[1, 8] = aten.constant_pad_nd(primals_2, [0, 0, 0, 0])  # backward gather prepare layers.0
gather_layers_1: (f32[256, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([constant_pad_nd_default_1], 256, 0)  # backward gather launch layers.0
gather_layers_1_done: (f32[256, 8]) = wait(gather_layers_1)  # backward gather wait layers.0
layers_0_weight_1: f32[256, 8] = getitem(gather_layers_1_done, 0)  # backward gather part layers.0
slice_tensor_1: f32[8, 8] = aten.slice.Tensor(layers_0_weight_1, 0, 0, 8)  # backward gather finish layers.0
t_5: f32[8, 8] = aten.t(slice_tensor_1)  # backward compute compute layers.0
t_3: f32[8, 8] = aten.t(t_5)  # backward compute compute layers.0
mm_2: f32[4, 8] = aten.mm(expand, t_3)  # backward compute compute layers.0
release_default_1: None = fxzero.release([layers_0_weight_1])  # backward gather release layers.0
t_4: f32[8, 8] = aten.t(t_2)  # backward compute compute layers.0
reshard_grad: f32[1, 8] = fxzero.reshard_grad(t_4, N/layers.0.weight, reduce)  # backward compute reshard layers.0
return [sum_1, mm_2, reshard_grad]""",
    )
    assert_expected_inline(
        words(record.after),
        """\
primals_1: f32[4, 8] = input
primals_2: f32[1, 8] = input
tangents_1: f32[] = input
constant_pad_nd_default: f32[1, 8] = aten.constant_pad_nd(primals_2, [0, 0, 0, 0])  # forward gather prepare layers.0
gather_layers_0: (f32[256, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([constant_pad_nd_default], 256, 0)  # forward gather launch layers.0
gather_layers_0_done: (f32[256, 8]) = wait(gather_layers_0)  # forward gather wait layers.0
layers_0_weight: f32[256, 8] = getitem(gather_layers_0_done, 0)  # forward gather part layers.0
slice_tensor: f32[8, 8] = aten.slice.Tensor(layers_0_weight, 0, 0, 8)  # forward gather finish layers.0
t: f32[8, 8] = aten.t(slice_tensor)  # forward compute compute layers.0
mm: f32[4, 8] = aten.mm(primals_1, t)  # forward compute compute layers.0
release_default: None = fxzero.release([layers_0_weight])  # forward gather release layers.0
sum_1: f32[] = aten.sum(mm)  # forward compute compute layers.0
expand: f32[4, 8] = aten.expand(tangents_1, [4, 8])  # backward compute compute layers.0
t_1: f32[8, 4] = aten.t(expand)  # backward compute compute layers.0
mm_1: f32[8, 8] = aten.mm(t_1, primals_1)  # backward compute compute layers.0
t_2: f32[8, 8] = aten.t(mm_1)  # backward compute compute layers.0
constant_pad_nd_default_1: f32[1, 8] = aten.constant_pad_nd(primals_2, [0, 0, 0, 0])  # backward gather prepare layers.0
gather_layers_1: (f32[256, 8]) = _c10d_functional.all_gather_into_tensor_coalesced([constant_pad_nd_default_1], 256, 0)  # backward gather launch layers.0
gather_layers_1_done: (f32[256, 8]) = wait(gather_layers_1)  # backward gather wait layers.0
layers_0_weight_1: f32[256, 8] = getitem(gather_layers_1_done, 0)  # backward gather part layers.0
slice_tensor_1: f32[8, 8] = aten.slice.Tensor(layers_0_weight_1, 0, 0, 8)  # backward gather finish layers.0
t_5: f32[8, 8] = aten.t(slice_tensor_1)  # backward compute compute layers.0
t_3: f32[8, 8] = aten.t(t_5)  # backward compute compute layers.0
mm_2: f32[4, 8] = aten.mm(expand, t_3)  # backward compute compute layers.0
release_default_1: None = fxzero.release([layers_0_weight_1])  # backward gather release layers.0
t_4: f32[8, 8] = aten.t(t_2)  # backward compute compute layers.0
constant_pad_nd_default_2: f32[256, 8] = aten.constant_pad_nd(t_4, [0, 0, 0, 248])  # backward reduce prepare layers.0
reduce_layers_0: (f32[1, 8]) = _c10d_functional.reduce_scatter_tensor_coalesced([constant_pad_nd_default_2], avg, 256, 0)  # backward reduce launch layers.0
reduce_layers_0_done: (f32[1, 8]) = wait(reduce_layers_0)  # backward reduce wait layers.0
getitem: f32[1, 8] = getitem(reduce_layers_0_done, 0)  # backward reduce part layers.0
slice_tensor_2: f32[1, 8] = aten.slice.Tensor(getitem, 0, 0, 1)  # backward reduce finish layers.0
return (sum_1, mm_2, slice_tensor_2)""",
    )


def test_stage_0_all_reduces() -> None:
    """The whole gradient, averaged."""
    record = record_of(chain(1, relu=False), "shard_grads", zero=0, world_size=1024)
    assert_expected_inline(
        words(record.diff()),
        """\
--- before shard_grads
+++ after shard_grads
@@ -13,4 +13,6 @@
 mm_2: f32[4, 8] = aten.mm(expand, t_3)  # backward compute compute layers.0
 t_4: f32[8, 8] = aten.t(t_2)  # backward compute compute layers.0
-reshard_grad: f32[8, 8] = fxzero.reshard_grad(t_4, N/layers.0.weight, reduce)  # backward compute reshard layers.0
-return [sum_1, mm_2, reshard_grad]
+reduce_layers_0: (f32[8, 8]) = _c10d_functional.all_reduce_coalesced([t_4], avg, 0)  # backward reduce launch layers.0
+reduce_layers_0_done: (f32[8, 8]) = wait(reduce_layers_0)  # backward reduce wait layers.0
+getitem: f32[8, 8] = getitem(reduce_layers_0_done, 0)  # backward reduce part layers.0
+return (sum_1, mm_2, getitem)""",
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharded_stages_reduce_scatter(zero: int) -> None:
    """Averaged over the eight ranks; what leaves is one of the eight rows."""
    graph = scheduled(chain(2), "shard_grads", zero=zero)
    for transfer in reduces(graph):
        assert transfer.launch.target is _SCATTER
        assert transfer.launch.args[1:3] == ("avg", 8)
    assert gradient(graph, "layers.0.weight").meta["val"].shape == (1, 8)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("build", [tied, twice], ids=["tied", "twice"])
def test_many_reads_are_reduced_once(build: object, zero: int) -> None:
    """Full gradients are summed first: one reduction, whatever the number of reads."""
    graph = scheduled(build, "shard_grads", zero=zero)  # type: ignore[arg-type]
    names = reduced_params(graph)
    assert len(names) == len(set(names)) == len(graph.gradients)
    sums = [n for n in find(graph, _aten.add.Tensor) if stamp_of(n).made_by == "shard_grads"]
    assert len(sums) == 1
    assert sums[0].meta["val"].shape == (graph.specs[stamp_of(sums[0]).params[0]].shape)


def test_scalars_are_all_reduced() -> None:
    """A 0-d parameter has no rows to scatter."""
    graph = scheduled(scaled, "shard_grads")
    kinds = {t.stamp.params[0].partition("/")[2]: t.launch.target for t in reduces(graph)}
    assert kinds == {"scale": _ALL_REDUCE, "layer.weight": _SCATTER}
    assert gradient(graph, "scale").meta["val"].shape == ()


def test_two_axes() -> None:
    """Inside the group by reduce-scatter, then across the replicas by all-reduce."""
    graph = scheduled(chain(1), "shard_grads", zero=3, mesh_shape=(4, 8))
    inside, across = reduces(graph)
    assert (inside.launch.target, across.launch.target) == (_SCATTER, _ALL_REDUCE)
    assert inside.launch.args[2] == 8
    assert inside.launch.args[-1] != across.launch.args[-1]
    assert across.tensors == list(inside.parts)
    assert across.tensors[0].meta["val"].shape == (1, 8)
    spec = next(iter(graph.specs.values()))
    assert spec.shard_group is not None
    assert (inside.launch.args[-1], across.launch.args[-1]) == (
        spec.shard_group.name,
        spec.replica_groups[0].name,
    )


def test_two_axes_at_stage_0() -> None:
    """Nothing is sharded: an all-reduce over each axis."""
    graph = scheduled(chain(1), "shard_grads", zero=0, mesh_shape=(4, 8))
    assert [t.launch.target for t in reduces(graph)] == [_ALL_REDUCE, _ALL_REDUCE]
    assert len({t.launch.args[-1] for t in reduces(graph)}) == 2


class Frozen(nn.Module):
    """A frozen layer below a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return self.layer(self.frozen(x)).sum()


@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_parameters_are_not_reduced(zero: int) -> None:
    """They have no gradient, but backward may still read them."""
    graph = scheduled(of(Frozen, 4, 8), "shard_grads", zero=zero)
    assert reduced_params(graph) == [("layer.weight",)]
    if zero == 3:
        again = params_of([t.launch for t in graph.transfers(phase=Phase.BACKWARD, name="gather")])
        assert ("frozen.weight",) in again


@pytest.mark.parametrize("zero", [0, 1])
def test_no_sync_keeps(zero: int) -> None:
    """Inside `no_sync` nothing is sent: a zero shard leaves the graph."""
    graph = scheduled(chain(2), "shard_grads", zero=zero, sync=GradSync.ACCUMULATE)
    assert reduces(graph) == []
    kept = of_role(graph, Role.KEEP)
    assert {n.target for n in kept} == {torch.ops.fxzero.keep_grad.default}
    assert sorted(params_of(kept)) == [("layers.0.weight",), ("layers.1.weight",)]
    assert gradient(graph, "layers.0.weight") in kept
    assert gradient(graph, "layers.0.weight").meta["val"].shape == ((1, 8) if zero else (8, 8))


@pytest.mark.parametrize("zero", [0, 1])
def test_after_no_sync_what_was_kept_is_added(zero: int) -> None:
    """Then the sum is reduced, once."""
    graph = scheduled(chain(2), "shard_grads", zero=zero, sync=GradSync.REDUCE_ACCUMULATED)
    added = find(graph, torch.ops.fxzero.add_kept_grad.default)
    assert len(added) == len(reduces(graph)) == 2
    assert [t.tensors[0] for t in reduces(graph)] == added


@pytest.mark.parametrize(
    ("world_size", "rank", "rows"), [(2, 1, 6), (3, 2, 3), (4, 3, 1), (8, 7, 0), (256, 0, 1)]
)
def test_13_rows(world_size: int, rank: int, rows: int) -> None:
    """Gradients are padded to equal parts, and this rank's padding is cut off."""
    build = of(lambda: nn.Linear(8, 13, bias=False), 4, 8)
    graph = scheduled(build, "shard_grads", world_size=world_size, rank=rank)
    (transfer,) = reduces(graph)
    (pad,) = transfer.prepare
    padded = -(-13 // world_size) * world_size
    assert pad.meta["val"].shape == (padded, 8)
    assert transfer.parts[0].meta["val"].shape == (padded // world_size, 8)
    assert transfer.results[0].meta["val"].shape == (rows, 8)


def test_reduce_dtype() -> None:
    """Computed in bfloat16, reduced in float32, kept in the masters' float64."""

    def build() -> tuple[nn.Module, tuple[Tensor]]:
        return nn.Linear(8, 8, bias=False, dtype=torch.float64), (torch.randn(4, 8),)

    graph = scheduled(build, "shard_grads", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (transfer,) = reduces(graph)
    assert transfer.tensors[0].meta["val"].dtype is torch.float32
    assert transfer.tensors[0].all_input_nodes[0].meta["val"].dtype is torch.bfloat16
    assert transfer.results[0].meta["val"].dtype is torch.float64


def test_the_cast_before_is_compute_and_the_cast_after_is_not() -> None:
    """The first fuses with the gradient's producer, the second must wait for the transfer."""
    graph = scheduled(
        chain(1), "shard_grads", param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    (transfer,) = reduces(graph)
    cast = transfer.tensors[0]
    assert (stamp_of(cast).lane, stamp_of(cast).role) == (Lane.COMPUTE, Role.COMPUTE)


def test_markers_are_gone() -> None:
    """With the views and sums that hung on them."""
    graph = scheduled(of(Scaled, 4, 8), "shard_grads")
    assert not of_role(graph, Role.RESHARD)
    for node in graph.nodes():
        assert node.users or node.target != _aten.view.default, node.format_node()


def test_a_gradient_that_something_was_done_to_is_an_error() -> None:
    """A hook that scales the shard's gradient would be dropped silently otherwise."""
    graph = trace(chain(1))
    run(graph, up_to("shard_params"))
    ((position, _),) = graph.gradients.items()
    values = list(graph.output_values)
    with graph.graph.inserting_before(graph.output):
        values[position] = graph.call(
            _aten.mul.Tensor, (values[position], 2.0), stamp=Stamp(Phase.BACKWARD)
        )
    graph.set_output_values(values)
    with pytest.raises(
        PassError, match=r"expected the gradient mul_?.* to be a sum of reshard_grad"
    ):
        run_grads(graph)


def run_grads(graph: StepGraph) -> None:
    """The pass alone, on a graph that is stamped and gathered."""
    ShardGrads().run(graph, Context())
