"""What each stage of a pipeline keeps, and what it gives to the others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn

from fxzero.graph import Role
from fxzero.graph.aliases import is_view, readers, root
from fxzero.graph.stamps import Phase, stamp_of
from fxzero.graph.step_graph import StepGraph, TransferNodes
from fxzero.pipeline.schedules import table_of
from fxzero.pipeline.tables import Action, Table, Work
from fxzero.transfer import TransferKind
from tests.passes.pipelined import DECODER, Decoder, scheduled

ROW = 8 * 4
"""Bytes of a row of what a layer makes, in fp32."""


def messages(graph: StepGraph, kind: TransferKind, phase: Phase) -> list[TransferNodes]:
    return [
        t for t in graph.transfers(phase=phase) if t.record.kind is kind and t.stamp.micro_step == 0
    ]


def sent(graph: StepGraph, phase: Phase) -> list[int]:
    """Bytes of each tensor that goes to another stage, for one micro-step."""
    found = messages(graph, TransferKind.SEND, phase)
    return [node.meta["val"].nbytes for transfer in found for node in transfer.tensors]


@pytest.fixture(scope="module")
def graphs() -> list[StepGraph]:
    return [scheduled(place) for place in range(4)]


def test_a_skip_travels_by_all_stages_between(graphs: list[StepGraph]) -> None:
    # The first stage has one value for both readers; the others pass it on beside their own.
    assert [sent(graph, Phase.FORWARD) for graph in graphs] == [
        [2 * ROW],
        [2 * ROW] * 2,
        [2 * ROW] * 2,
        [],
    ]


def test_its_gradient_comes_back_and_is_added_where_they_meet(graphs: list[StepGraph]) -> None:
    assert [sent(graph, Phase.BACKWARD) for graph in graphs] == [
        [],
        [2 * ROW],
        [2 * ROW] * 2,
        [2 * ROW] * 2,
    ]


def test_both_sides_mean_the_same(graphs: list[StepGraph]) -> None:
    assert len({graph.in_common for graph in graphs}) == 1
    for earlier, later in pairwise(graphs):
        for phase, source, target in (
            (Phase.FORWARD, earlier, later),
            (Phase.BACKWARD, later, earlier),
        ):
            given = messages(source, TransferKind.SEND, phase)
            taken = messages(target, TransferKind.RECEIVE, phase)
            arrived = [part.meta["val"] for transfer in taken for part in transfer.parts]
            tensors = [node.meta["val"] for transfer in given for node in transfer.tensors]
            assert [(t.shape, t.stride()) for t in arrived] == [
                (t.shape, t.stride()) for t in tensors
            ]


def test_gradients_of_weights_come_behind_what_is_sent(graphs: list[StepGraph]) -> None:
    """In each micro-step of each stage that sends a gradient: nobody waits for them."""
    for graph in graphs[1:]:
        place = {node: i for i, node in enumerate(graph.graph.nodes)}
        sends = {
            t.stamp.micro_step: place[t.launch]
            for t in graph.transfers(phase=Phase.BACKWARD)
            if t.record.kind is TransferKind.SEND
        }
        made = [n for n in graph.nodes(phase=Phase.BACKWARD) if is_weight_gradient(n)]
        assert {stamp_of(node).micro_step for node in made} == sends.keys()
        assert all(place[node] > sends[stamp_of(node).micro_step] for node in made)


class Norms(nn.Module):
    """Layers behind norms, whose gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


@pytest.mark.parametrize("place", [1, 3])
def test_only_products_and_what_follows_are_put_off(place: int) -> None:
    """A sum, as a bias's gradient is, stays where its terms are: put off, they would be kept."""
    stages = {f"h.{i}": i for i in range(4)}
    batch = torch.ones(12, 8)
    graph = scheduled(place, schedule="zb_h1", build=Norms, stages=stages, batch=batch)
    halves = {
        (stamp_of(node).params[0].partition("/")[2], stamp_of(node).half)
        for node in graph.nodes(role=Role.ACCUMULATE)
    }
    assert halves == {
        (f"h.{place}.0.weight", 0),
        (f"h.{place}.0.bias", 0),
        (f"h.{place}.1.bias", 0),
        (f"h.{place}.1.weight", 1),
    }


class Wide(nn.Module):
    """Backward's product for the last weight reads what is cheap to repeat from a saved value."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)).to(self.dtype)).float()


class Wides(nn.Module):
    """Four of them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.h = nn.ModuleList(Wide(dtype) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.pow(2).mean()


def repeated_for_products(graph: StepGraph) -> list[fx.Node]:
    """What is repeated and read by products, through views."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return [
        node
        for node in graph.nodes(phase=Phase.BACKWARD)
        if stamp_of(node).again
        and not is_view(node)
        and any(user.target in products for user in readers(node))
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("place", range(4))
def test_what_is_repeated_for_a_product_that_is_put_off_is_not_put_off(
    place: int, schedule: str
) -> None:
    """gelu is one kernel with its gradient, which computes the same tanh or erf, and is then held
    in place of what it is made of."""
    stages = {f"h.{i}": i for i in range(4)}
    batch = torch.ones(12, 8)
    graph = scheduled(place, schedule=schedule, build=Wides, stages=stages, batch=batch)
    order = {node: i for i, node in enumerate(graph.nodes())}
    gelus = repeated_for_products(graph)
    assert len(gelus) == 6
    for gelu in gelus:
        (saved,) = gelu.all_input_nodes
        (gradient,) = (
            n for n in readers(saved) if n.target is torch.ops.aten.gelu_backward.default
        )
        assert stamp_of(gelu).segment == stamp_of(gradient).segment
        if place:  # the first stage puts nothing off
            assert order[gelu] < order[gradient] < min(order[n] for n in gelu.users)


@pytest.mark.parametrize("place", range(1, 4))
def test_what_is_larger_than_what_it_is_made_of_is_put_off(place: int) -> None:
    """In place of a float it would be a double that is held until the product."""
    stages = {f"h.{i}": i for i in range(4)}
    graph = scheduled(
        place,
        schedule="zb_h1",
        build=lambda: Wides(torch.float64),
        stages=stages,
        batch=torch.ones(12, 8),
    )
    repeated = repeated_for_products(graph)
    assert len(repeated) == 6
    assert {node.meta["val"].dtype for node in repeated} == {torch.float64}
    assert {stamp_of(node).half for node in repeated} == {1}


class Scale(nn.Module):
    """No product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Scales(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Scale() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("place", range(4))
def test_a_backward_without_products_has_nothing_to_put_off(place: int) -> None:
    """Its other half is empty, but for the first stage's, for which nobody waits."""
    stages = {f"h.{i}": i for i in range(4)}
    batch = torch.ones(12, 8)
    graph = scheduled(place, schedule="zb_h1", build=Scales, stages=stages, batch=batch)
    halves = {stamp_of(node).half for node in graph.nodes(role=Role.ACCUMULATE)}
    assert halves == ({1} if place == 0 else {0})


def is_weight_gradient(node: fx.Node) -> bool:
    """Of a layer of width 8, whose batches have another number of rows: and not of a bias."""
    return node.target is torch.ops.aten.mm.default and tuple(node.meta["val"].shape) == (8, 8)


def test_each_has_its_own_parameters(graphs: list[StepGraph]) -> None:
    names = [{spec.name for spec in graph.specs.values()} for graph in graphs]
    assert names == [
        {"table.weight", "h.0.weight", "h.0.bias"},
        {"h.1.weight", "h.1.bias"},
        {"h.2.weight", "h.2.bias"},
        {"h.3.weight", "h.3.bias", "table.weight"},
    ]
    updated = [{k for n in g.nodes(role=Role.UPDATE) for k in stamp_of(n).params} for g in graphs]
    assert [len(keys) for keys in updated] == [3, 2, 2, 3]


def test_what_needs_no_parameter_is_not_sent(graphs: list[StepGraph]) -> None:
    for graph in graphs[1:]:
        masks = [n for n in graph.nodes() if "gt.Scalar" in str(n.target)]
        assert masks, "the mask is made on each stage that reads it"


def test_what_is_read_later_is_looked_up_there() -> None:
    """The first stage holds the table too, and could send what the third one reads of it."""
    first = scheduled(0, build=Decoder, stages=DECODER)
    assert sent(first, Phase.FORWARD) == [2 * ROW]


class Deep(nn.Module):
    """Six layers, the first three of which are one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def test_gradients_are_added_up_behind_the_layer_that_they_are_of() -> None:
    """And not behind the whole backward, until which all of them would be alive; nor are they
    copied before."""
    stages = {f"h.{i}": max(0, i - 2) for i in range(6)}
    graph = scheduled(0, build=Deep, stages=stages, batch=torch.ones(12, 8))
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    sums = {
        (stamp_of(node).params[0].partition("/")[2], stamp_of(node).micro_step): node
        for node in graph.nodes(role=Role.ACCUMULATE)
    }
    for micro_step in range(1, 6):
        deepest, first = (sums[f"h.{i}.weight", micro_step] for i in (2, 0))
        assert place[deepest] < place[root(first.all_input_nodes[1])]
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert not [node for node in copies if stamp_of(node).made_by == "shard_grads"]


def test_what_the_stage_before_waits_for_is_counted_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the views between two operators: `auto` chooses by how long the halves take."""
    seen = []

    def first(places: object, micro_batches: int, action_us: Callable[[Action], float]) -> Table:
        seen.append([action_us(Action(1, work, 0)) for work in Work])
        return table_of("1f1b", 4, micro_batches)

    monkeypatch.setattr("fxzero.passes.split_stages.fastest", first)
    stages = {f"h.{i}": max(0, i - 2) for i in range(6)}
    batch = torch.ones(12, 2, 8)  # its linear layers look at rows
    scheduled(0, build=Deep, stages=stages, batch=batch, schedule="auto")
    ((_, both_us, inputs_us, weights_us),) = seen
    assert both_us == inputs_us + weights_us
    # A product and tanh's gradient each, against a product and a sum.
    assert 0.8 <= inputs_us / weights_us <= 1.25
