# ruff: noqa: E501
"""Saved activations end at their last use in backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxzero.compiler.run import run_passes
from fxzero.graph import Role, StepGraph
from fxzero.graph.aliases import root
from fxzero.graph.stamps import stamp_of
from fxzero.graph.verify import verify
from fxzero.passes import Context, Fact, Notes, Recompute, ReleaseSaved
from fxzero.passes.release_saved import last_reader
from tests.tracing import chain, find, of, of_role, sides, texts, words

large = chain(2, width=64, batch=32)
_GIVEN = {Fact.STAMPED, Fact.GATHERED, Fact.CUT}


def released(build: Any, **setup: Any) -> tuple[StepGraph, Notes]:
    """A backward after the pass, verified."""
    side = sides(build, **setup).backward
    (record,) = run_passes([ReleaseSaved()], side, Context(), given=_GIVEN)
    return side, record.notes


@texts
def test_before_and_after() -> None:
    """The first activation ends after the second layer's gradient."""
    side = sides(chain(2, width=64, batch=32, relu=False), zero=0, world_size=8).backward
    (record,) = run_passes([ReleaseSaved()], side, Context(), given=_GIVEN, keep_text=True)
    assert_expected_inline(
        words(record.before),
        """\
mm: f32[32, 64] = input
primals_3: f32[64, 64] = input
primals_1: f32[32, 64] = input
primals_2: f32[64, 64] = input
tangents_1: f32[] = input
expand: f32[32, 64] = aten.expand(tangents_1, [32, 64])  # backward compute compute layers.1
clone: f32[32, 64] = aten.clone(expand, memory_format=torch.contiguous_format)  # backward compute compute layers.1
t_2: f32[64, 32] = aten.t(clone)  # backward compute compute layers.1
mm_2: f32[64, 64] = aten.mm(t_2, mm)  # backward compute compute layers.1
t_3: f32[64, 64] = aten.t(mm_2)  # backward compute compute layers.1
t_10: f32[64, 64] = aten.t(primals_3)  # backward compute compute layers.1
t_4: f32[64, 64] = aten.t(t_10)  # backward compute compute layers.1
mm_3: f32[32, 64] = aten.mm(clone, t_4)  # backward compute compute layers.1
t_5: f32[64, 64] = aten.t(t_3)  # backward compute compute layers.1
reduce_layers_1: (f32[64, 64]) = _c10d_functional.all_reduce_coalesced([t_5], avg, 0)  # backward reduce launch layers.1 reduce.backward.0
t_6: f32[64, 32] = aten.t(mm_3)  # backward compute compute layers.0
mm_4: f32[64, 64] = aten.mm(t_6, primals_1)  # backward compute compute layers.0
t_7: f32[64, 64] = aten.t(mm_4)  # backward compute compute layers.0
t_11: f32[64, 64] = aten.t(primals_2)  # backward compute compute layers.0
t_8: f32[64, 64] = aten.t(t_11)  # backward compute compute layers.0
mm_5: f32[32, 64] = aten.mm(mm_3, t_8)  # backward compute compute layers.0
t_9: f32[64, 64] = aten.t(t_7)  # backward compute compute layers.0
reduce_layers_1_done: (f32[64, 64]) = wait(reduce_layers_1)  # backward reduce wait layers.1 reduce.backward.0
getitem_1: f32[64, 64] = getitem(reduce_layers_1_done, 0)  # backward reduce part layers.1 reduce.backward.0
reduce_layers_0: (f32[64, 64]) = _c10d_functional.all_reduce_coalesced([t_9], avg, 0)  # backward reduce launch layers.0 reduce.backward.1
reduce_layers_0_done: (f32[64, 64]) = wait(reduce_layers_0)  # backward reduce wait layers.0 reduce.backward.1
getitem: f32[64, 64] = getitem(reduce_layers_0_done, 0)  # backward reduce part layers.0 reduce.backward.1
return (mm_5, getitem, getitem_1)""",
    )
    assert_expected_inline(
        words(record.after),
        """\
mm: f32[32, 64] = input
primals_3: f32[64, 64] = input
primals_1: f32[32, 64] = input
primals_2: f32[64, 64] = input
tangents_1: f32[] = input
expand: f32[32, 64] = aten.expand(tangents_1, [32, 64])  # backward compute compute layers.1
clone: f32[32, 64] = aten.clone(expand, memory_format=torch.contiguous_format)  # backward compute compute layers.1
t_2: f32[64, 32] = aten.t(clone)  # backward compute compute layers.1
mm_2: f32[64, 64] = aten.mm(t_2, mm)  # backward compute compute layers.1
t_3: f32[64, 64] = aten.t(mm_2)  # backward compute compute layers.1
t_10: f32[64, 64] = aten.t(primals_3)  # backward compute compute layers.1
t_4: f32[64, 64] = aten.t(t_10)  # backward compute compute layers.1
mm_3: f32[32, 64] = aten.mm(clone, t_4)  # backward compute compute layers.1
t_5: f32[64, 64] = aten.t(t_3)  # backward compute compute layers.1
release_saved_default: None = fxzero.release_saved([mm])  # backward compute release layers.1
reduce_layers_1: (f32[64, 64]) = _c10d_functional.all_reduce_coalesced([t_5], avg, 0)  # backward reduce launch layers.1 reduce.backward.0
t_6: f32[64, 32] = aten.t(mm_3)  # backward compute compute layers.0
mm_4: f32[64, 64] = aten.mm(t_6, primals_1)  # backward compute compute layers.0
t_7: f32[64, 64] = aten.t(mm_4)  # backward compute compute layers.0
t_11: f32[64, 64] = aten.t(primals_2)  # backward compute compute layers.0
t_8: f32[64, 64] = aten.t(t_11)  # backward compute compute layers.0
mm_5: f32[32, 64] = aten.mm(mm_3, t_8)  # backward compute compute layers.0
t_9: f32[64, 64] = aten.t(t_7)  # backward compute compute layers.0
reduce_layers_1_done: (f32[64, 64]) = wait(reduce_layers_1)  # backward reduce wait layers.1 reduce.backward.0
getitem_1: f32[64, 64] = getitem(reduce_layers_1_done, 0)  # backward reduce part layers.1 reduce.backward.0
reduce_layers_0: (f32[64, 64]) = _c10d_functional.all_reduce_coalesced([t_9], avg, 0)  # backward reduce launch layers.0 reduce.backward.1
reduce_layers_0_done: (f32[64, 64]) = wait(reduce_layers_0)  # backward reduce wait layers.0 reduce.backward.1
getitem: f32[64, 64] = getitem(reduce_layers_0_done, 0)  # backward reduce part layers.0 reduce.backward.1
return (mm_5, getitem, getitem_1)""",
    )


def test_what_is_released() -> None:
    """Activations; not parameters or inputs, which the user holds."""
    graph, notes = released(large, zero=3)
    owners = [n for release in of_role(graph, Role.RELEASE) for n in release.all_input_nodes]
    names = [n.name for n in owners if n.op == "placeholder"]
    assert names == ["relu_1", "relu"]
    assert notes["released"] == 2
    assert notes["bytes"] == 2 * 32 * 64 * 4


def test_views_count_as_readers() -> None:
    """Nothing reads the memory after its release, through any view."""
    graph, _ = released(large, zero=3)
    nodes = list(graph.graph.nodes)
    releases = find(graph, torch.ops.fxzero.release_saved.default)
    assert releases
    for release in releases:
        assert release.all_input_nodes
        for owner in release.all_input_nodes:
            readers = [n for n in nodes if owner in {root(i) for i in n.all_input_nodes}]
            assert max(readers, key=nodes.index) is release


def test_last_reader_looks_through_views() -> None:
    """A view of a view."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.aten.t.default, (x,))
    view = graph.call_function(torch.ops.aten.view.default, (view, [-1]))
    last = graph.call_function(torch.ops.aten.sin.default, (view,))
    graph.output((last,))
    assert last_reader(x) is last
    graph.erase_node(next(iter(reversed(graph.nodes))))
    graph.output((view,))
    assert last_reader(x) is None, "what leaves the graph must stay"


def test_small_tensors_are_left_alone() -> None:
    """A call costs more than they do."""
    _, notes = released(chain(2), zero=3)
    assert dict(notes) == {"released": 0, "bytes": 0}


class Exposed(nn.Module):
    """Returns an activation that backward reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 64) → scalar, (B, 64)."""
        hidden = self.layer(x).exp()
        return (hidden * x).sum(), hidden


def test_what_the_user_holds_is_not_released() -> None:
    """An output of the forward that backward reads as well."""
    cut = sides(of(Exposed, 32, 64), Recompute(max_nodes=0), zero=0)
    assert "exp" in [n.name for n in cut.saved]
    private = {
        n.name for n in cut.backward.graph.find_nodes(op="placeholder") if n.meta["fxzero_private"]
    }
    assert "exp" not in private
    ReleaseSaved().run(cut.backward, Context())
    assert "exp" not in [
        n.name for r in of_role(cut.backward, Role.RELEASE) for n in r.all_input_nodes
    ]


def test_a_release_does_not_split_a_run() -> None:
    """It stands where the layer's compute ends, so equal layers stay equal regions."""
    graph, _ = released(large, zero=0)
    for release in find(graph, torch.ops.fxzero.release_saved.default):
        following = release.next
        if stamp_of(following).role is Role.COMPUTE:
            assert stamp_of(following).layer != stamp_of(release).layer
    verify(graph, {"stamped", "cut"}, after="release_saved")


def test_parts_of_a_split_keep_what_was_saved_alive() -> None:
    """Backward splits a saved tensor, and reads a part after it has read the whole."""
    graph = fx.Graph()
    saved = graph.placeholder("saved")
    parts = graph.call_function(torch.ops.aten.split.Tensor, (saved, 2))
    part = graph.call_function(operator.getitem, (parts, 0))
    graph.call_function(torch.ops.aten.sum.default, (saved,))
    view = graph.call_function(torch.ops.aten.t.default, (part,))
    last = graph.call_function(torch.ops.aten.sum.default, (view,))
    graph.output((last,))
    assert last_reader(saved) is last
