# ruff: noqa: E501
"""Stamps: phase, layer and role, read once from what the tracer left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxzero.errors import CaptureError
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.passes.stamp import ancestors, module_path
from tests.tracing import (
    Chain,
    chain,
    find,
    of,
    of_role,
    params_of,
    record_of,
    texts,
    trace,
    up_to,
    words,
)
from tests.tracing import run as run_passes

_aten = torch.ops.aten


def stamped(*args: Any, **setup: Any) -> StepGraph:
    """A graph after the pass."""
    graph = trace(*args, **setup)
    run_passes(graph, up_to("stamp"))
    return graph


@texts
def test_before_and_after() -> None:
    """Nothing changes but stamps, and the order of what backward prepares."""
    record = record_of(chain(1, relu=False), "stamp", world_size=8)
    assert_expected_inline(
        words(record.before),
        """\
primals_1: f32[4, 8] = input
primals_2: f32[1, 8] = input
tangents_1: f32[] = input
unshard: f32[8, 8] = fxzero.unshard(primals_2, N/layers.0.weight, reduce)
t: f32[8, 8] = aten.t(unshard)
mm: f32[4, 8] = aten.mm(primals_1, t)
sum_1: f32[] = aten.sum(mm)
expand: f32[4, 8] = aten.expand(tangents_1, [4, 8])
t_1: f32[8, 4] = aten.t(expand)
mm_1: f32[8, 8] = aten.mm(t_1, primals_1)
t_2: f32[8, 8] = aten.t(mm_1)
t_3: f32[8, 8] = aten.t(t)
mm_2: f32[4, 8] = aten.mm(expand, t_3)
t_4: f32[8, 8] = aten.t(t_2)
reshard_grad: f32[1, 8] = fxzero.reshard_grad(t_4, N/layers.0.weight, reduce)
return [sum_1, mm_2, reshard_grad]""",
    )
    assert_expected_inline(
        words(record.after),
        """\
primals_1: f32[4, 8] = input
primals_2: f32[1, 8] = input
tangents_1: f32[] = input
unshard: f32[8, 8] = fxzero.unshard(primals_2, N/layers.0.weight, reduce)  # forward compute unshard layers.0
t: f32[8, 8] = aten.t(unshard)  # forward compute compute layers.0
mm: f32[4, 8] = aten.mm(primals_1, t)  # forward compute compute layers.0
sum_1: f32[] = aten.sum(mm)  # forward compute compute layers.0
expand: f32[4, 8] = aten.expand(tangents_1, [4, 8])  # backward compute compute layers.0
t_1: f32[8, 4] = aten.t(expand)  # backward compute compute layers.0
mm_1: f32[8, 8] = aten.mm(t_1, primals_1)  # backward compute compute layers.0
t_2: f32[8, 8] = aten.t(mm_1)  # backward compute compute layers.0
t_3: f32[8, 8] = aten.t(t)  # backward compute compute layers.0
mm_2: f32[4, 8] = aten.mm(expand, t_3)  # backward compute compute layers.0
t_4: f32[8, 8] = aten.t(t_2)  # backward compute compute layers.0
reshard_grad: f32[1, 8] = fxzero.reshard_grad(t_4, N/layers.0.weight, reduce)  # backward compute reshard layers.0
return [sum_1, mm_2, reshard_grad]""",
    )


def test_roles() -> None:
    """Markers, inputs and the output are told apart from compute, with their parameters."""
    graph = stamped(chain(2))
    assert params_of(of_role(graph, Role.UNSHARD)) == [("layers.0.weight",), ("layers.1.weight",)]
    assert params_of(of_role(graph, Role.RESHARD)) == [("layers.1.weight",), ("layers.0.weight",)]
    inputs = [n for n in of_role(graph, Role.INPUT) if stamp_of(n).params]
    assert params_of(inputs) == [("layers.0.weight",), ("layers.1.weight",)]
    assert stamp_of(graph.output).role is Role.OUTPUT


def test_phases() -> None:
    """Forward is what the forward's outputs need; a tangent belongs to backward."""
    graph = stamped(chain(2))
    (loss,) = find(graph, _aten.sum.default)
    forward = ancestors([loss])
    for node in graph.graph.nodes:
        if node.op == "call_function":
            assert (stamp_of(node).phase is Phase.FORWARD) == (node in forward), node
    tangents = [n for n in graph.graph.nodes if n.name.startswith("tangents")]
    assert [stamp_of(n).phase for n in tangents] == [Phase.BACKWARD]


class Residual(nn.Module):
    """A block whose last operation is its own, not a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → (B, 8)."""
        return x + self.inner(x).sin()


def test_layers_of_blocks() -> None:
    """Each operator, forward and backward, is in the block that it was written in."""
    graph = stamped(of(lambda: nn.Sequential(Residual(), Residual()), 4, 8))
    for target in (_aten.sin.default, _aten.add.Tensor):
        nodes = find(graph, target, phase=Phase.FORWARD)
        assert [stamp_of(n).layer for n in nodes] == ["0", "1"]
    cosines = find(graph, _aten.cos.default)
    assert [stamp_of(n).layer for n in cosines] == ["1", "0"]


def test_backward_is_in_the_layer_of_its_forward() -> None:
    """Also where the model's own forward, and no layer, applied the operator."""
    graph = stamped(of(lambda: Chain(2), 4, 8))
    layer = {n.meta["seq_nr"]: stamp_of(n).layer for n in find(graph, _aten.relu.default)}
    gradients = find(graph, _aten.threshold_backward.default)
    assert len(gradients) == 2
    assert [stamp_of(n).layer for n in gradients] == [layer[n.meta["seq_nr"]] for n in gradients]


def test_sinking() -> None:
    """What backward prepares without a gradient stands right before what reads it."""
    graph = stamped(chain(2))
    nodes = list(graph.graph.nodes)
    prepared = [n for n in find(graph, _aten.t.default, phase=Phase.BACKWARD) if is_of_weight(n)]
    assert len(prepared) == 2
    for node in prepared:
        (reader,) = node.users
        assert nodes.index(reader) - nodes.index(node) == 1


def is_of_weight(node: fx.Node) -> bool:
    """Whether a transpose is of a parameter, not of a gradient."""
    source = node.all_input_nodes[0]
    return stamp_of(source).phase is Phase.FORWARD


def test_an_unknown_parameter_is_an_error() -> None:
    """A marker whose model is gone is named."""
    graph = trace(chain(1))
    graph.specs.clear()
    with pytest.raises(CaptureError, match=r"node unshard reads the unknown parameter '\d+/layers"):
        run_passes(graph, up_to("stamp"))


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (
            {"a": ("L['self']", nn.Module), "b": ("L['self'].blocks[3].mlp", nn.Module)},
            "blocks.3.mlp",
        ),
        ({"a": ("L['self']._orig_mod.blocks['x']", nn.Module)}, "blocks.x"),
        ({"a": ("L['self']", nn.Module)}, ""),
        ({"a": ("L['args'][0].model.layers.7.mlp", nn.Module)}, "model.layers.7.mlp"),
        ({"a": ("L['blocks'][2].mlp", nn.Module)}, "2.mlp"),
        ({"a": ("L['self'].m._modules['a[0]']._modules['[b]'].c[2]", nn.Module)}, "m.a[0].[b].c.2"),
        ({"a": ("L['self']._modules['0.weight']", nn.Module)}, "0.weight"),
        ({}, None),
    ],
)
def test_module_path(stack: dict[str, Any], expected: str | None) -> None:
    """Dynamo's way of writing paths, as `named_modules` writes them."""
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = stack
    assert module_path(node) == expected
