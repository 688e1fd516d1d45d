# ruff: noqa: E501
"""Weights in blocks of columns: what is rewritten, decided and refused, and that it means the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import loop_passes
from fxzero.compiler.run import run_passes
from fxzero.errors import ConfigError, VerificationError
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.verify import verify
from fxzero.passes import Context, Fact, Pass, TileLinear
from fxzero.passes.tile_linear import Tiled, Tiles
from fxzero.schedule.inventory import through_views
from tests import simulated_ranks, tracing
from tests.passes.test_meaning import assert_equal, graphs_of
from tests.stepping import compiled_step
from tests.tiers import exhaustive, in_two_tiers
from tests.tracing import JOINT, OUTLINED, chain, of, run, texts, trace, words

_DOUBLE = {"dtype": torch.float64}


def tiled(max_bytes: int, passes: Sequence[Pass] = JOINT) -> list[Pass]:
    """All joint passes, with the one that this is about at its place."""
    names = [one.name for one in passes]
    place = names.index("recompute") + 1
    return [*passes[:place], TileLinear(max_bytes), *passes[place:]]


class Small(nn.Module):
    """A wide layer between narrow ones, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, **_DOUBLE)
        self.wide = nn.Linear(6, 10, **_DOUBLE)
        self.last = nn.Linear(10, 6, bias=False, **_DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        """(…, 6) → scalar."""
        return self.last(self.wide(self.first(x).relu()).relu()).square().sum()


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, padding_idx, **_DOUBLE)
        self.middle = nn.Linear(6, 6, **_DOUBLE)
        self.head = nn.Linear(6, 10, bias=False, **_DOUBLE)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """(4, 6) → scalar."""
        tokens = torch.arange(4) % 3
        return self.head(self.middle(x + self.embedding(tokens))).square().sum()


class Turned(nn.Module):
    """Weights as GPT-2 has them, (in, out): columns stand side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 7, **_DOUBLE))
        self.bias = nn.Parameter(torch.randn(7, **_DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        """(4, 6) → scalar."""
        return torch.addmm(self.bias, x, self.weight).square().sum()


class Twice(nn.Module):
    """One layer, applied twice, and on the left of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False, **_DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        """(4, 6) → scalar."""
        y = self.layer(self.layer(x).relu())
        return torch.mm(self.layer.weight, y.t()).sum()


def double(make: Any, *shape: int) -> tracing.Build:
    """A model, and an input in float64."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        return make(), (torch.randn(*shape, dtype=torch.float64, requires_grad=True),)

    return build


_MODELS = {
    "small": double(Small, 4, 6),
    "deep-batch": double(Small, 2, 4, 6),
    "tied": double(Tied, 4, 6),
    "padding": double(lambda: Tied(1), 4, 6),
    "turned": double(Turned, 4, 6),
    "twice": double(Twice, 4, 6),
}


_PASSES: dict[str, Sequence[Pass]] = {"operators": JOINT, "pieces": OUTLINED}


@pytest.mark.parametrize(
    ("model", "world_size", "passes"),
    in_two_tiers([*product(_MODELS, (2, 3), _PASSES)], always=[("small", 2, "operators")]),
)
def test_nothing_changes_in_meaning(model: str, world_size: int, passes: str) -> None:
    """On whole numbers, whose sums are exact in any order, after every pass, on rows that ranks
    have unequal numbers of; results are NaN before their wait and after their release."""
    graphs = graphs_of(_MODELS[model], 3, world_size)
    inputs = simulated_ranks.random_inputs(graphs)
    expected = simulated_ranks.run(graphs, inputs)
    contexts = [Context() for _ in graphs]
    facts: frozenset[Any] = frozenset()
    for step in tiled(8 * 12 * 2, _PASSES[passes]):
        for graph, context in zip(graphs, contexts, strict=True):
            run_passes([step], graph, context, given=facts)
        facts |= step.provides
        if step.name == "tile_linear":
            assert graphs[0].blocks
        assert_equal(simulated_ranks.run(graphs, inputs), expected, step.name)


@texts
def test_before_and_after() -> None:
    """Two blocks of four columns: what they give is summed in forward, and side by side in
    backward."""
    graph = trace(chain(1, width=8, batch=6, relu=False), world_size=2)
    passes = tiled(8 * 4 * 4)
    (*_, record) = run(graph, passes[: [p.name for p in passes].index("tile_linear") + 1])
    assert str(record.notes) == "weights=1, blocks=2, gathers=4"
    lines = [line.partition("  # ")[0] for line in words(record.after).splitlines()]
    assert "\n".join(lines) == (
        """\
primals_1: f32[6, 8] = input
primals_2: f32[4, 8] = input
tangents_1: f32[] = input
unshard_default: f32[8, 4] = fxzero.unshard(primals_2, N/layers.0.weight.block0, reduce)
t_default: f32[4, 8] = aten.t(unshard_default)
slice_tensor: f32[6, 4] = aten.slice.Tensor(primals_1, 1, 0, 4)
mm_default: f32[6, 8] = aten.mm(slice_tensor, t_default)
unshard_default_1: f32[8, 4] = fxzero.unshard(primals_2, N/layers.0.weight.block1, reduce)
t_default_1: f32[4, 8] = aten.t(unshard_default_1)
slice_tensor_1: f32[6, 4] = aten.slice.Tensor(primals_1, 1, 4, 8)
addmm__default: f32[6, 8] = aten.addmm_(mm_default, slice_tensor_1, t_default_1)
sum_1: f32[] = aten.sum(addmm__default)
expand: f32[6, 8] = aten.expand(tangents_1, [6, 8])
t_1: f32[8, 6] = aten.t(expand)
unshard_default_2: f32[8, 4] = fxzero.unshard(primals_2, N/layers.0.weight.block0, reduce)
t_default_2: f32[4, 8] = aten.t(unshard_default_2)
t_default_3: f32[8, 4] = aten.t(t_default_2)
mm_default_1: f32[6, 4] = aten.mm(expand, t_default_3)
begin_blocks_default: f32[6, 8] = fxzero.begin_blocks(mm_default_1, 1, 0, 8)
unshard_default_3: f32[8, 4] = fxzero.unshard(primals_2, N/layers.0.weight.block1, reduce)
t_default_4: f32[4, 8] = aten.t(unshard_default_3)
t_default_5: f32[8, 4] = aten.t(t_default_4)
mm_default_2: f32[6, 4] = aten.mm(expand, t_default_5)
put_block__default: f32[6, 8] = fxzero.put_block_(begin_blocks_default, mm_default_2, 1, 4)
slice_tensor_2: f32[6, 4] = aten.slice.Tensor(primals_1, 1, 0, 4)
mm_default_3: f32[8, 4] = aten.mm(t_1, slice_tensor_2)
t_default_6: f32[4, 8] = aten.t(mm_default_3)
t_default_7: f32[8, 4] = aten.t(t_default_6)
reshard_grad_default: f32[4, 4] = fxzero.reshard_grad(t_default_7, N/layers.0.weight.block0, reduce)
slice_tensor_3: f32[6, 4] = aten.slice.Tensor(primals_1, 1, 4, 8)
mm_default_4: f32[8, 4] = aten.mm(t_1, slice_tensor_3)
t_default_8: f32[4, 8] = aten.t(mm_default_4)
t_default_9: f32[8, 4] = aten.t(t_default_8)
reshard_grad_default_1: f32[4, 4] = fxzero.reshard_grad(t_default_9, N/layers.0.weight.block1, reduce)
cat_default: f32[4, 8] = aten.cat([reshard_grad_default, reshard_grad_default_1], 1)
return [sum_1, put_block__default, cat_default]"""
    )


def decided(build: tracing.Build, max_bytes: int, **setup: Any) -> tuple[Tiles, list[str]]:
    """What the pass decides for a model, and what it warns of."""
    context = Context()
    passes = tiled(max_bytes)
    run(trace(build, **setup), passes[: [p.name for p in passes].index("tile_linear") + 1], context)
    found = context.decisions.made["tile_linear"]
    assert isinstance(found, Tiles)
    return found, context.warnings


@pytest.mark.parametrize("world_size", [2, 256])
@pytest.mark.parametrize(
    ("max_bytes", "columns", "blocks"),
    [(4 * 64 * 10, 10, 7), (4 * 64 * 32, 32, 2), (4 * 64, 1, 64)],
)
def test_as_few_equal_blocks_as_the_limit_allows(
    world_size: int, max_bytes: int, columns: int, blocks: int
) -> None:
    """The bytes that are gathered count, rows that ranks fill up among them."""
    rows = max(64, world_size)
    found, warnings = decided(chain(1, 64), max_bytes * rows // 64, world_size=world_size)
    assert not warnings
    size = 4 * rows
    expected = Tiled("layers.0.weight", columns, blocks, columns * size, 64 * size)
    assert found == Tiles((expected,))
    assert columns * size <= max_bytes * rows // 64
    assert Tiles.from_json(found.to_json(), "plan") == found


def test_nothing_to_do_is_a_note() -> None:
    """A limit above every weight."""
    found, warnings = decided(chain(2, 8), 8 * 8 * 4)
    assert (found.weights, warnings) == ((), [])


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None]).sum()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight * 2).sum()


class Viewed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight.view(4, 16)[:, :8]).sum()


class Returned(Scaled):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).sum(), self.layer.weight.t()


class Squared(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.layer.weight @ self.layer.weight)).sum()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Convolved, "it has 3 dimensions"),
        (Scaled, r"mul reads it by aten\.mul\.Tensor|mul_1 reads it by"),
        (Viewed, r"reads it by aten\.view"),
        (Returned, "the model returns it"),
        (Squared, r"reads it by aten\.mm"),
    ],
)
def test_what_is_needed_whole_stays_whole(model: type[nn.Module], why: str) -> None:
    """With its name and the reason, once."""
    found, warnings = decided(of(model, 4, 8), 64)
    assert not found.weights
    (warning,) = warnings
    assert "tile_linear.max_bytes=64 has no effect on layer.weight" in warning
    assert re.search(why, warning), warning


def test_a_column_above_the_limit() -> None:
    """Blocks are columns: a smaller one there is not."""
    found, (warning,) = decided(chain(1, 8), 31)
    assert not found.weights
    assert "one column of it has 32 bytes" in warning


@pytest.mark.parametrize(
    ("zero", "world_size", "why"), [(2, 2, "zero=2"), (3, 1, "in one process")]
)
def test_what_is_on_the_device_anyway(zero: int, world_size: int, why: str) -> None:
    """Stages that hold full parameters, and a rank that is alone."""
    found, (warning,) = decided(chain(1, 8), 64, zero=zero, world_size=world_size)
    assert not found.weights
    assert "has no effect on layers.0.weight" in warning
    assert why in warning


def test_a_limit_is_a_number_of_bytes() -> None:
    """None and 0 are none."""
    names = [one.name for one in loop_passes(Config()).scheduling]
    assert "tile_linear" not in names
    off = Config.from_options({"tile_linear": {"max_bytes": 0}})
    assert "tile_linear" not in [one.name for one in loop_passes(off).scheduling]
    with pytest.raises(ConfigError, match=r"tile_linear\.max_bytes=-1"):
        Config.from_options({"tile_linear": {"max_bytes": -1}})


@pytest.mark.parametrize(
    ("weight", "columns", "why"),
    [("layers.7.weight", 4, "does not have"), ("layers.0.weight", 8, "by 8 columns")],
)
def test_a_plan_that_does_not_fit(weight: str, columns: int, why: str) -> None:
    """It says which weight, and what is wrong."""
    graph = trace(chain(1, 8), world_size=2)
    run(graph, tiled(64)[:4])
    with pytest.raises(ConfigError, match=why):
        TileLinear(64).apply(graph, Tiles((Tiled(weight, columns, 2, 0, 0),)), Context())


def most_at_once(graph: StepGraph, lane: Lane, owner: str) -> int:
    """How many blocks of a parameter, or of its full gradient, are there at a time at most."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    spans: list[tuple[int, int]] = []
    for transfer in graph.transfers(name=lane.value):
        if graph.owner_of(transfer.stamp.params[0]).partition("/")[2] != owner:
            continue
        assert graph.is_block(transfer)
        if lane is Lane.GATHER:
            ends = [u for u in transfer.parts[0].users if stamp_of(u).role is Role.RELEASE]
            assert set(ends) <= through_views(transfer.parts)
            spans.append((order[transfer.launch], min(order[end] for end in ends)))
        else:
            begin = min(order[n] for n in _made_for(transfer.tensors[0]))
            spans.append((begin, order[transfer.wait]))
    assert len(spans) > 2
    return max(sum(a <= point <= b for a, b in spans) for point, _ in spans)


def _made_for(gradient: fx.Node) -> list[fx.Node]:
    """The operator that makes a full gradient, and what turns it."""
    found = [gradient]
    while found[-1].target in (torch.ops.aten.t.default, torch.ops.aten.clone.default):
        found.append(found[-1].all_input_nodes[0])
    return found


@pytest.mark.parametrize(
    ("passes", "door"),
    [
        *(("far ahead", "loop"), ("by cost", "step"), ("by cost", "budget")),
        *exhaustive(("by cost", "loop"), ("far ahead", "step"), ("far ahead", "budget")),
    ],
)
def test_no_more_than_two_blocks_and_one_gradient(passes: str, door: str) -> None:
    """However far ahead transfers may run, and whatever is kept for backward elsewhere."""
    build = of(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), 4, 64)
    limits = {"tile_linear": {"max_bytes": 64 * 4 * 8}, "lower_regions": {"backend": "eager"}}
    ahead = (
        {"distance": 9, "reduce_distance": 9}
        if passes == "far ahead"
        else {"budget_bytes": 1 << 30}
    )
    options: dict[str, Any] = {**limits, "prefetch": ahead}
    if door == "loop":
        graph = trace(build, world_size=8)
        run(graph, loop_passes(Config.from_options(options)).scheduling)
    else:
        if door == "budget":
            options |= {"memory_budget": "150KiB", "prefetch": {}}
        compiled = compiled_step(
            lambda: (nn.Sequential(build()[0], Mean()), (torch.randn(4, 64),)),
            options=options,
            micro_batches=2,
        )
        assert compiled.joint is not None
        graph = compiled.joint
    first = "0.weight" if door == "loop" else "0.0.weight"
    assert most_at_once(graph, Lane.GATHER, first) <= 2
    assert most_at_once(graph, Lane.REDUCE, first) == 1


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_a_chain_whose_layers_are_in_blocks_is_traced_whole() -> None:
    """A layer's blocks are no part of it: all of the layers are in the graph."""
    build = of(
        lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)), Mean()), 4, 8, grad=False
    )
    compiled = compiled_step(
        build, options={"tile_linear": {"max_bytes": 128}, "lower_regions": {"backend": "eager"}}
    )
    graph = compiled.joint
    assert graph is not None
    assert len(graph.blocks) == 9
    assert all(len(keys) == 2 for keys in graph.blocks.values())


def scheduled(build: tracing.Build, max_bytes: int = 8 * 2 * 4) -> StepGraph:
    """The graph behind `shard_grads`, with a weight in blocks."""
    graph = trace(build, world_size=2)
    passes = tiled(max_bytes)
    run(graph, passes[: [p.name for p in passes].index("shard_grads") + 1])
    return graph


_FACTS = [Fact.STAMPED, Fact.GATHERED, Fact.REDUCED]


def test_a_gather_of_other_columns_is_found() -> None:
    """They would have the same shape."""
    graph = scheduled(chain(1, 8))
    cut = next(n for n in graph.nodes(role=Role.PREPARE) if n.target is torch.ops.aten.slice.Tensor)
    cut.args = (*cut.args[:2], 2, 4)
    with pytest.raises(VerificationError, match=r"columns 0 to 2 of .*, and sends \[\(1, 2, 4\)"):
        verify(graph, _FACTS, after="test")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda put: put.update_arg(3, 0), "from column 0 on"),
        (lambda put: put.replace_all_uses_with(put.args[0]), "lacks layers.0.weight.block"),
    ],
)
def test_a_gradient_with_a_block_elsewhere_is_found(change: Any, why: str) -> None:
    """Or without one."""
    graph = scheduled(chain(1, 8))
    change(graph.output_values[-1])
    with pytest.raises(VerificationError, match=why):
        verify(graph, _FACTS, after="test")


def test_shards_of_gradients_are_put_in_place() -> None:
    """One tensor for all of them, filled as they come: the blocks of the head, and added to them
    those of the embedding, which backward comes to last."""
    graph = scheduled(_MODELS["tied"], 8 * 10 * 2)
    (owner,) = (key for key in graph.blocks if key.endswith("embedding.weight"))
    found = [
        node.target
        for node in graph.nodes(phase=Phase.BACKWARD, role=Role.ACCUMULATE)
        if stamp_of(node).params == (owner,)
    ]
    ops = torch.ops.fxzero
    assert found == [
        *(ops.begin_blocks.default, ops.put_block_.default, ops.put_block_.default),
        *(ops.add_block_.default, ops.add_block_.default, ops.add_block_.default),
    ]
