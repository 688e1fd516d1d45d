"""What Dynamo is told to leave out is what nobody misses; what it lets through stays what it is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxzero
from fxzero._compat import passing_through_dynamo, write_no_asserts_without_symbols
from fxzero.errors import ConfigError


def graphs_of(function: Callable[..., Any], *inputs: Any, **settings: Any) -> list[fx.GraphModule]:
    """The graphs that Dynamo makes of a function."""
    write_no_asserts_without_symbols()
    torch._dynamo.reset()
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: Any) -> fx.GraphModule:
        found.append(module)
        return module

    torch.compile(function, backend=keep, **settings)(*inputs)
    return found


_LOOKS = ("assert", "_check")
"""What Dynamo writes for an assertion; torch 2.11 leaves the call of `torch._check`."""


def asserts_in(graphs: list[fx.GraphModule]) -> int:
    """How many assertions about numbers the graphs hold."""
    return sum(
        any(word in str(getattr(node.target, "__name__", node.target)) for word in _LOOKS)
        for graph in graphs
        for node in graph.graph.nodes
    )


def test_a_number_from_the_data_is_still_looked_at() -> None:
    """Symbols bring assertions, and those fail where they should."""

    def rows(x: Tensor, n: Tensor) -> Tensor:
        count = n.item()
        torch._check(count >= 2)
        return x[:1] * torch.ones(count).sum()  # type: ignore[call-overload]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graphs = graphs_of(rows, torch.ones(3), torch.tensor(3), fullgraph=True)
        assert asserts_in(graphs) > 0
        compiled = torch.compile(rows, backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError):
            compiled(torch.ones(3), torch.tensor(1))


def test_two_sizes() -> None:
    """A size that changes is a symbol."""
    write_no_asserts_without_symbols()
    torch._dynamo.reset()
    double = torch.compile(lambda x: (x * x.shape[0]).sum(), backend="eager")
    for rows in (2, 3, 5):
        assert double(torch.ones(rows, 2)) == rows * rows * 2


def test_where_sizes_are_known_there_is_no_assertion_and_no_setting_left() -> None:
    """The same nodes as ever; what is said to Dynamo is said for its one graph."""
    before = torch._dynamo.config.do_not_emit_runtime_asserts
    model = fxzero.shard(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), zero=3)
    (graph,) = graphs_of(model, torch.ones(2, 3))
    assert asserts_in([graph]) == 0
    assert torch._dynamo.config.do_not_emit_runtime_asserts is before


def test_a_backend_that_fails_leaves_no_setting() -> None:
    """Nor does one that raises."""

    def fail(module: fx.GraphModule, _: Any) -> Any:
        raise ValueError("no")

    before = torch._dynamo.config.do_not_emit_runtime_asserts
    write_no_asserts_without_symbols()
    with pytest.raises(Exception, match="no"):
        torch.compile(nn.Linear(2, 2), backend=fail)(torch.ones(1, 2))
    assert torch._dynamo.config.do_not_emit_runtime_asserts is before


@pytest.mark.parametrize("off", [False, True])
def test_what_a_backend_compiles_is_as_before(off: bool) -> None:
    """A graph with symbols inside of the compilation of one without keeps its assertions."""
    write_no_asserts_without_symbols()
    torch._dynamo.reset()
    seen: list[bool] = []
    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: Any) -> fx.GraphModule:
        graphs.append(module)
        return module

    places = torch.compile(lambda x: x.nonzero().squeeze(1) + torch.zeros(3), backend=keep)

    def around(module: fx.GraphModule, _: Any) -> fx.GraphModule:
        seen.append(torch._dynamo.config.do_not_emit_runtime_asserts)
        places(torch.ones(3))
        return module

    config = torch._dynamo.config
    with config.patch(capture_dynamic_output_shape_ops=True, do_not_emit_runtime_asserts=off):
        torch.compile(torch.sin, backend=around)(torch.ones(2))
    assert seen == [off]
    assert (asserts_in(graphs) > 0) is not off


def test_an_error_that_passes_through_dynamo_goes_to_other_processes() -> None:
    """ZeRO stages are estimated side by side: there the error itself arrives, notes and all."""
    error = ConfigError("no such cluster")
    error.add_note("in cost.cluster")
    passing = passing_through_dynamo(error)
    passing.add_note("seen by Dynamo")
    arrived = pickle.loads(pickle.dumps(passing))
    assert type(arrived) is ConfigError
    assert arrived.args == ("no such cluster",)
    assert arrived.__notes__ == passing.__notes__
