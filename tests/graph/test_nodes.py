"""Nodes that are made, copied and stamped the short way are what torch's own way makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from fxzero._compat import by_identity, copy_node, create_node, set_args, set_meta
from fxzero.graph import Lane, Phase, Role, Stamp
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import is_cast_or_copy

_aten = torch.ops.aten


def test_the_graph_finds_what_was_changed() -> None:
    """By its target; and values know who reads them."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = create_node(graph, "call_function", _aten.add.Tensor, (x, x), {"alpha": 2}, "z")
    copy = copy_node(graph, node)
    set_args(node, (x, y))
    set_meta(node, {"val": 1})
    graph.output((node, copy))
    assert graph.find_nodes(op="call_function", target=_aten.add.Tensor) == [node, copy]
    assert (node.args, dict(node.kwargs), node.meta) == ((x, y), {"alpha": 2}, {"val": 1})
    assert node in y.users
    assert set(x.users) == {node, copy}
    assert (copy.args, dict(copy.kwargs)) == ((x, x), {"alpha": 2})
    set_args(node, (y, y))
    assert list(x.users) == [copy]
    node.target = _aten.mul.Tensor
    assert graph.find_nodes(op="call_function", target=_aten.mul.Tensor) == [node]
    graph.lint()


def test_a_stamp_but_for_some_fields() -> None:
    """Equal to what dataclasses make, and as frozen."""
    stamp = Stamp(Phase.FORWARD, layer="h.0", params=("0/w",))
    changes = {"role": Role.PART, "lane": Lane.GATHER, "micro_step": 3}
    made = stamp.but(**changes)
    assert made == replace(stamp, **changes)
    assert hash(made) == hash(replace(stamp, **changes))
    assert stamp == Stamp(Phase.FORWARD, layer="h.0", params=("0/w",))
    with pytest.raises(TypeError, match="a stamp has no bukket, rule"):
        stamp.but(bukket="", rule="", role=Role.PART)
    with pytest.raises(AttributeError):
        made.role = Role.WAIT  # type: ignore[misc]


def test_a_fact_is_of_one_operator() -> None:
    """Also where one that is gone had the same place in memory."""
    asked = 0

    @by_identity
    def name(target: object) -> str:
        nonlocal asked
        asked += 1
        return str(target)

    for i in range(200):
        assert name([i]) == str([i])  # each list would take the place of the last
    assert asked == 200


def test_views_and_casts() -> None:
    """What the schema hides is a view, too."""
    graph = fx.Graph()
    x = graph.placeholder("x")

    def called(target: object, *args: object) -> fx.Node:
        return graph.call_function(target, (x, *args))  # type: ignore[arg-type]

    assert is_view(called(_aten.t.default))
    assert is_view(called(_aten._unsafe_view.default, [1]))
    assert not is_view(called(_aten.relu.default))
    assert is_cast_or_copy(called(_aten._to_copy.default))
    assert is_cast_or_copy(called(_aten.clone.default))
    assert not is_cast_or_copy(called(_aten.relu.default))
