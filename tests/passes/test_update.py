"""Parameters are updated where their gradients arrive, by torch's fused kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch.optim import Optimizer

import fxzero
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.kernels.bucket_update import BucketAdam
from fxzero.passes.update import Update, Updates
from fxzero.runtime import updates
from tests.stepping import EAGER, chain_of, compiled_step, step_graph
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


# -- our own kernel

FORCED = {**EAGER, "lower_kernels": {"force": "adamw"}}


def own_updates(graph: StepGraph) -> list[bool]:
    """By update, whether our kernel does it."""
    return [isinstance(node.target, BucketAdam) for node in update_nodes(graph)]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_our_kernel_updates_where_it_is_asked_for(optimizer: type[Optimizer]) -> None:
    """Every bucket, with the weight decay of the optimizer."""
    assert own_updates(step_graph(chain_of(3), optimizer=optimizer)) == [False] * 3
    graph = step_graph(chain_of(3), optimizer=optimizer, options=FORCED)
    assert own_updates(graph) == [True] * 3
    decoupled = {node.target.decoupled for node in update_nodes(graph)}  # type: ignore[union-attr]
    assert decoupled == {optimizer is torch.optim.AdamW}


def test_a_table_says_from_which_size_on_it_wins(tmp_path: Path) -> None:
    """A bucket of 28 bytes an element, at the nearest size that was measured."""
    small, large = 28 * 16 * 2, 28 * 64 * 64 // 8
    rows = [
        {"kernel": "adamw", "dtype": "float32", "num_bytes": n, "kernel_us": 1.0, "compiler_us": us}
        for n, us in ((small, 0.5), (large, 3.0))
    ]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"device": "made up", "rows": rows}))
    options = {**EAGER, "lower_kernels": {"table": str(table)}}
    for width, wins in ((16, False), (64, True)):
        compilation = compiled_step(chain_of(2, width), options=options)
        assert compilation.joint is not None
        assert own_updates(compilation.joint) == [wins] * 2
        decided = compilation.context.decisions.made["update"]
        assert isinstance(decided, Updates)
        assert [u.speedup for u in decided.updates] == [3.0 if wins else 0.5] * 2


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, maximize=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p),
    ],
    ids=["amsgrad", "maximize", "sgd", "rmsprop"],
)
def test_what_it_does_not_compute_is_torchs_and_said(optimizer: Any) -> None:
    """A setting without effect is a warning, and an error under strict."""
    with pytest.warns(fxzero.FxZeroWarning, match="adamw has no effect on"):
        graph = step_graph(chain_of(2), optimizer=optimizer, options=FORCED)
    assert not any(own_updates(graph))
    with pytest.raises(fxzero.ConfigError, match="adamw has no effect on"):
        step_graph(chain_of(2), optimizer=optimizer, options={**FORCED, "strict": True})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"place": "reduce.backward.7"},
            "7, group 0, is none of this graph: reduce.backward.1 of group 0",
        ),
        ({"kernel": "fast"}, "'torch' or 'fxzero'"),
        ({"group": 1}, "group 1, is none of this graph"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    """As somebody may have written it into a plan."""
    decided = compiled_step(chain_of(2), options=FORCED).context.decisions.made["update"]
    assert isinstance(decided, Updates)
    wrong = Updates((replace(decided.updates[0], **changes),))
    with (
        mock.patch.object(Update, "decide", return_value=wrong),
        pytest.raises(fxzero.ConfigError, match=words),
    ):
        compiled_step(chain_of(2))


def test_a_kernel_that_cannot_is_refused() -> None:
    """A plan for AdamW, replayed with amsgrad."""
    decided = compiled_step(chain_of(2), options=FORCED).context.decisions.made["update"]
    with (
        mock.patch.object(Update, "decide", return_value=decided),
        pytest.raises(fxzero.ConfigError, match="adamw_, which does not compute AdamW"),
    ):
        compiled_step(chain_of(2), optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True))


def test_ranks_with_unequal_shards_choose_alike(tmp_path: Path) -> None:
    """Thirteen rows on eight ranks: two, or one, or none. What all hold must not drift apart."""
    rows = [
        {"kernel": "adamw", "dtype": "float32", "num_bytes": n, "kernel_us": 1.0, "compiler_us": us}
        for n, us in ((1, 0.5), (28 * 2 * 13, 3.0))
    ]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"device": "made up", "rows": rows}))
    options = {**EAGER, "lower_kernels": {"table": str(table)}}
    for rank in (0, 6, 7):
        compilation = compiled_step(chain_of(2, 13), options=options, rank=rank)
        assert compilation.joint is not None
        assert own_updates(compilation.joint) == [True] * 2
