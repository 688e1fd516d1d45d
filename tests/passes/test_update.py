"""Parameters are updated where their gradients arrive, by torch's fused kernels."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.runtime import updates
from tests.stepping import chain_of, compiled_step, step_graph
from tests.tracing import find, of_role, params_of


def update_nodes(graph: StepGraph) -> list[fx.Node]:
    """In launch order."""
    return of_role(graph, Role.UPDATE)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_parameter_once(zero: int) -> None:
    """Last layer first, as gradients come."""
    nodes = update_nodes(step_graph(chain_of(3), zero=zero))
    assert params_of(nodes) == [(f"layers.{i}.weight",) for i in (2, 1, 0)]
    assert {n.target for n in nodes} == {updates.adamw}


@pytest.mark.parametrize("zero", [0, 3])
def test_an_update_does_not_wait_for_the_others(zero: int) -> None:
    """The first one runs while backward goes on."""
    graph = step_graph(chain_of(4), zero=zero)
    nodes = list(graph.nodes())
    first = nodes.index(update_nodes(graph)[0])
    last_product = max(i for i, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default)
    assert first < last_product


def test_an_update_waits_for_all_readers_of_its_parameter() -> None:
    """In one process backward reads the parameter itself."""
    graph = step_graph(chain_of(3), zero=0, world_size=1)
    seen: set[fx.Node] = set()
    changed: set[fx.Node] = set()
    for node in graph.nodes():
        if stamp_of(node).role is Role.UPDATE:
            changed.update(node.args[0])  # type: ignore[arg-type]
        else:
            assert changed.isdisjoint(node.all_input_nodes), f"{node} reads a new parameter"
        seen.add(node)
    assert len(changed) == 3


def test_clipping_makes_updates_wait_for_the_norm_and_nothing_else() -> None:
    """Gathers, reduces and backward stay where they were."""
    free = [n.name for n in step_graph(chain_of(3)).nodes() if stamp_of(n).phase != Phase.OPTIMIZER]
    graph = step_graph(chain_of(3), clip_grad_norm=1.0)
    clipped = [n.name for n in graph.nodes() if stamp_of(n).phase != Phase.OPTIMIZER]
    assert clipped == free
    (norm,) = find(graph, updates.total_norm)
    assert all(norm < node for node in update_nodes(graph))
    launches = [t for t in graph.transfers() if t.stamp.phase is Phase.OPTIMIZER]
    assert [[n.meta["val"].shape for n in t.tensors] for t in launches] == [[(1,)]]


def test_another_optimizer_steps_once_at_the_end() -> None:
    """Its own code, on the model's own parameters."""
    compilation = compiled_step(chain_of(3), optimizer=torch.optim.RMSprop)
    assert compilation.joint is not None
    (node,) = update_nodes(compilation.joint)
    assert isinstance(node.target, updates.OwnStep)
    assert len(stamp_of(node).params) == 3
    (record,) = [r for r in compilation.records if r.name == "update"]
    assert record.notes["by"] == "RMSprop.step()"


def test_the_graph_returns_no_gradient() -> None:
    """A loss, a norm, and whether the step was skipped."""
    graph = step_graph(chain_of(2), clip_grad_norm=1.0)
    loss, norm, skip = graph.output_values
    assert loss.meta["val"].shape == norm.meta["val"].shape == ()
    assert skip is None
