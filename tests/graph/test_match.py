"""Small graphs found in large ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxzero.graph.match import Mapping, Pattern, accumulated_terms, captured, matches

_aten = torch.ops.aten


def traced(function: Callable[..., object], *shapes: tuple[int, ...]) -> fx.Graph:
    """The ATen graph of a function of tensors."""
    with FakeTensorMode():
        tensors = [torch.empty(shape) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*tensors).graph


def found(pattern: fx.Graph, graph: fx.Graph, *, exact: bool = True) -> list[Mapping]:
    """All matches, from the pattern's last call."""
    whole = Pattern(pattern)
    begin = whole.calls()[-1]
    candidates = [n for n in graph.nodes if n.op == "call_function"]
    return list(matches(whole, begin, candidates, exact=exact))


def test_factors_in_any_order() -> None:
    pattern = traced(lambda x, y: x.exp() * y.sin(), (3,), (3,))
    graph = traced(lambda x, y: (y.sin() * x.exp()) + (x.exp() * y.sin()), (3,), (3,))
    assert len(found(pattern, graph)) == 2
    apart = traced(lambda x, y: x.exp() - y.sin(), (3,), (3,))
    assert found(pattern, apart) == []


def test_arguments_of_a_difference_are_not_swapped() -> None:
    pattern = traced(lambda x, y: x.exp() - y.sin(), (3,), (3,))
    assert found(pattern, traced(lambda x, y: y.sin() - x.exp(), (3,), (3,))) == []


def test_one_node_stands_for_one_node() -> None:
    """A value that the pattern reads twice must be one value in the graph."""
    pattern = traced(lambda x: x.exp() * x, (3,))
    assert len(found(pattern, traced(lambda x, y: x.exp() * x, (3,), (3,)))) == 1
    assert found(pattern, traced(lambda x, y: x.exp() * y, (3,), (3,))) == []


def test_two_nodes_of_the_pattern_are_two_nodes() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.exp()

    pattern = traced(lambda x: x.exp() * x.exp(), (3,))
    assert len(pattern.find_nodes(op="call_function", target=_aten.exp.default)) == 2
    graph = traced(lambda x: (lambda e: e * e)(x.exp()), (3,))
    assert found(pattern, graph) == []


def test_the_right_one_of_several_users() -> None:
    """Users are followed by backtracking: the first one that fits locally may be the wrong one."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        e = x.exp()
        wrong, right = (e * 2).sin(), (e * 3).cos()
        return wrong + right

    pattern = fx.Graph()
    x = pattern.placeholder("x")
    e = pattern.call_function(_aten.exp.default, (x,))
    scaled = pattern.call_function(_aten.mul.Tensor, (e, 3))
    cosine = pattern.call_function(_aten.cos.default, (scaled,))
    pattern.output((cosine,))
    graph = traced(function, (3,), (3,))
    (exp,) = graph.find_nodes(op="call_function", target=_aten.exp.default)
    (mapping,) = matches(Pattern(pattern), e, [exp], exact=False)
    assert mapping[cosine].target is _aten.cos.default
    assert mapping[scaled].args[1] == 3


def test_numbers_count_in_exact_matches_only() -> None:
    pattern = traced(lambda x: (x + 1.5).mean(-1), (3, 4))
    graph = traced(lambda x: (x + 2.5).mean(0), (5, 6))
    assert found(pattern, graph) == []
    (mapping,) = found(pattern, graph, exact=False)
    assert captured(Pattern(pattern, {1.5: "shift"}), mapping) == {"shift": 2.5}


def test_numbers_that_disagree_are_not_captured() -> None:
    pattern = Pattern(traced(lambda x: (x + 1.5) * (x.exp() + 1.5), (3,)), {1.5: "shift"})
    graph = traced(lambda x: (x + 2.5) * (x.exp() + 3.5), (3,))
    (mapping,) = matches(pattern, pattern.calls()[-1], list(graph.nodes), exact=False)
    assert captured(pattern, mapping) is None


def test_reshapes_are_compared_by_what_they_make() -> None:
    pattern = traced(lambda x: x.view(12).exp(), (3, 4))
    assert len(found(pattern, traced(lambda x: x.view(-1).exp(), (3, 4)))) == 1
    assert found(pattern, traced(lambda x: x.view(6, 2).exp(), (3, 4))) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_terms_of_a_sum(depth: int) -> None:
    def total(x: Tensor) -> Tensor:
        found = x.exp()
        for _ in range(depth - 1):
            found = found + x.sin()
        return found

    graph = traced(total, (3,))
    last = [n for n in graph.nodes if n.op == "call_function"][-1]
    assert len(accumulated_terms(last)) == depth
