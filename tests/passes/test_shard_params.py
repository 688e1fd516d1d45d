# ruff: noqa: E501
"""How long full parameters live, stage by stage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import root
from fxzero.graph.stamps import stamp_of
from tests.tracing import (
    chain,
    find,
    of,
    of_role,
    params_of,
    record_of,
    scheduled,
    sides,
    texts,
    words,
)

_aten = torch.ops.aten
_WORLDS = (8, 256, 1024)


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.middle = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        tokens = torch.arange(4) % 16
        return self.head(self.middle(x + self.embedding(tokens))).sum()


class Twice(nn.Module):
    """One layer, applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return self.layer(self.layer(x).relu()).sum()


class Scaled(nn.Module):
    """A 0-d parameter next to a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return (self.layer(x) * self.scale).sum()


tied = of(Tied, 4, 8)
twice = of(Twice, 4, 8)
scaled = of(Scaled, 4, 8)
biased = of(lambda: nn.Linear(8, 8), 4, 8)


def gathers(graph: StepGraph, phase: Phase | None = None) -> list[tuple[str, ...]]:
    """The parameters of each gather."""
    return params_of([t.launch for t in graph.transfers(phase=phase, name="gather")])


def looks_at_full_parameter(node: fx.Node) -> bool:
    """Whether a node is a gathered parameter, or a view or a cast of one."""
    owner = root(node)
    return owner.op == "call_function" and stamp_of(owner).lane is Lane.GATHER


@texts
@pytest.mark.parametrize("world_size", _WORLDS)
def test_before_and_after(world_size: int) -> None:
    """The world's size shows in the shard and in the gather, and nowhere else."""
    record = record_of(
        chain(1, width=1024, batch=6, relu=False), "shard_params", world_size=world_size
    )
    before, after = (
        words(text)
        .replace(f", {world_size}, ", ", N, ")
        .replace(f"[{1024 // world_size}, ", "[1024/N, ")
        for text in (record.before, record.after)
    )
    assert before == (
        """\
primals_1: f32[6, 1024] = input
primals_2: f32[1024/N, 1024] = input
tangents_1: f32[] = input
unshard: f32[1024, 1024] = fxzero.unshard(primals_2, N/layers.0.weight, reduce)  # forward compute unshard layers.0
t: f32[1024, 1024] = aten.t(unshard)  # forward compute compute layers.0
mm: f32[6, 1024] = aten.mm(primals_1, t)  # forward compute compute layers.0
sum_1: f32[] = aten.sum(mm)  # forward compute compute layers.0
expand: f32[6, 1024] = aten.expand(tangents_1, [6, 1024])  # backward compute compute layers.0
t_1: f32[1024, 6] = aten.t(expand)  # backward compute compute layers.0
mm_1: f32[1024, 1024] = aten.mm(t_1, primals_1)  # backward compute compute layers.0
t_2: f32[1024, 1024] = aten.t(mm_1)  # backward compute compute layers.0
t_5: f32[1024, 1024] = aten.t(unshard)  # backward compute compute layers.0
t_3: f32[1024, 1024] = aten.t(t_5)  # backward compute compute layers.0
mm_2: f32[6, 1024] = aten.mm(expand, t_3)  # backward compute compute layers.0
t_4: f32[1024, 1024] = aten.t(t_2)  # backward compute compute layers.0
reshard_grad: f32[1024/N, 1024] = fxzero.reshard_grad(t_4, N/layers.0.weight, reduce)  # backward compute reshard layers.0
return [sum_1, mm_2, reshard_grad]"""
    )
    assert after == (
        """\
primals_1: f32[6, 1024] = input
primals_2: f32[1024/N, 1024] = input
tangents_1: f32[] = input
gather_layers_0: (f32[1024, 1024]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_2], N, 0)  # forward gather launch layers.0
gather_layers_0_done: (f32[1024, 1024]) = wait(gather_layers_0)  # forward gather wait layers.0
layers_0_weight: f32[1024, 1024] = getitem(gather_layers_0_done, 0)  # forward gather part layers.0
t: f32[1024, 1024] = aten.t(layers_0_weight)  # forward compute compute layers.0
mm: f32[6, 1024] = aten.mm(primals_1, t)  # forward compute compute layers.0
release_default: None = fxzero.release([layers_0_weight])  # forward gather release layers.0
sum_1: f32[] = aten.sum(mm)  # forward compute compute layers.0
expand: f32[6, 1024] = aten.expand(tangents_1, [6, 1024])  # backward compute compute layers.0
t_1: f32[1024, 6] = aten.t(expand)  # backward compute compute layers.0
mm_1: f32[1024, 1024] = aten.mm(t_1, primals_1)  # backward compute compute layers.0
t_2: f32[1024, 1024] = aten.t(mm_1)  # backward compute compute layers.0
gather_layers_1: (f32[1024, 1024]) = _c10d_functional.all_gather_into_tensor_coalesced([primals_2], N, 0)  # backward gather launch layers.0
gather_layers_1_done: (f32[1024, 1024]) = wait(gather_layers_1)  # backward gather wait layers.0
layers_0_weight_1: f32[1024, 1024] = getitem(gather_layers_1_done, 0)  # backward gather part layers.0
t_5: f32[1024, 1024] = aten.t(layers_0_weight_1)  # backward compute compute layers.0
t_3: f32[1024, 1024] = aten.t(t_5)  # backward compute compute layers.0
mm_2: f32[6, 1024] = aten.mm(expand, t_3)  # backward compute compute layers.0
release_default_1: None = fxzero.release([layers_0_weight_1])  # backward gather release layers.0
t_4: f32[1024, 1024] = aten.t(t_2)  # backward compute compute layers.0
reshard_grad: f32[1024/N, 1024] = fxzero.reshard_grad(t_4, N/layers.0.weight, reduce)  # backward compute reshard layers.0
return [sum_1, mm_2, reshard_grad]"""
    )


@pytest.mark.parametrize("world_size", _WORLDS)
def test_stage_3_saves_no_full_parameter(world_size: int) -> None:
    """Nor a view or a transpose of one: backward gathers again."""
    cut = sides(chain(2), zero=3, world_size=world_size)
    assert not [n for n in cut.saved if looks_at_full_parameter(n)]
    assert gathers(cut.forward) == [("layers.0.weight",), ("layers.1.weight",)]
    assert gathers(cut.backward) == [("layers.1.weight",), ("layers.0.weight",)]
    for side in (cut.forward, cut.backward):
        assert len(of_role(side, Role.RELEASE)) == 2


@pytest.mark.parametrize("zero", [1, 2])
def test_stages_1_and_2_gather_once(zero: int) -> None:
    """Backward reads what forward gathered, and nothing is released early."""
    cut = sides(chain(2), zero=zero)
    saved = [n for n in cut.saved if looks_at_full_parameter(n)]
    assert params_of([root(n) for n in saved]) == [("layers.1.weight",), ("layers.0.weight",)]
    assert gathers(cut.forward) == [("layers.0.weight",), ("layers.1.weight",)]
    assert gathers(cut.backward) == []
    assert not of_role(cut.forward, Role.RELEASE)
    assert not of_role(cut.backward, Role.RELEASE)


def test_stage_0_gathers_nothing() -> None:
    """Parameters are read as they are."""
    graph = scheduled(chain(2), "shard_params", zero=0)
    assert gathers(graph) == []
    assert not of_role(graph, Role.UNSHARD)
    assert not of_role(graph, Role.RELEASE)
    (first, second) = find(graph, _aten.mm.default, phase=Phase.FORWARD)
    assert root(first.args[1]).op == root(second.args[1]).op == "placeholder"  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", [2, 3])
def test_tied_parameters_are_gathered_once_per_phase(zero: int) -> None:
    """The first module that owns it gives its name; the middle layer is not affected."""
    graph = scheduled(tied, "shard_params", zero=zero)
    names = gathers(graph, Phase.FORWARD)
    assert sorted(names) == [("embedding.weight",), ("middle.weight",)]
    assert gathers(graph, Phase.BACKWARD).count(("embedding.weight",)) == (1 if zero == 3 else 0)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_module_used_twice_is_gathered_once_per_phase(zero: int) -> None:
    """Both calls read one full parameter."""
    graph = scheduled(twice, "shard_params", zero=zero)
    assert gathers(graph, Phase.FORWARD) == [("layer.weight",)]
    assert gathers(graph, Phase.BACKWARD) == ([("layer.weight",)] if zero == 3 else [])
    (launch,) = graph.transfers(phase=Phase.FORWARD)
    assert len({u for n in launch.results for u in n.users if u.target is _aten.t.default}) >= 1


@pytest.mark.parametrize(
    ("world_size", "rank", "shard_rows", "padded"),
    [
        (2, 0, 7, 14),
        (2, 1, 6, 14),
        (3, 0, 5, 15),
        (3, 2, 3, 15),
        (4, 3, 1, 16),
        (8, 6, 1, 16),
        (8, 7, 0, 16),
        (256, 12, 1, 256),
        (256, 255, 0, 256),
    ],
)
def test_13_rows(world_size: int, rank: int, shard_rows: int, padded: int) -> None:
    """Shards follow `torch.chunk`; a gather carries equal parts and its padding is cut off."""
    graph = scheduled(
        of(lambda: nn.Linear(8, 13, bias=False), 4, 8),
        "shard_params",
        world_size=world_size,
        rank=rank,
    )
    (forward, backward) = graph.transfers(name="gather")
    for transfer in (forward, backward):
        (pad,) = transfer.prepare
        assert pad.target is _aten.constant_pad_nd.default
        assert pad.all_input_nodes[0].meta["val"].shape == (shard_rows, 8)
        assert pad.meta["val"].shape == (padded // world_size, 8)
        assert transfer.parts[0].meta["val"].shape == (padded, 8)
        (full,) = transfer.results
        assert full.target is _aten.slice.Tensor
        assert full.meta["val"].shape == (13, 8)


def test_even_rows_are_not_padded() -> None:
    """No copy where none is needed."""
    graph = scheduled(chain(1), "shard_params")
    assert not find(graph, _aten.constant_pad_nd.default)
    assert not find(graph, _aten.slice.Tensor)


def test_scalars_stay_replicated() -> None:
    """A 0-d parameter cannot be split: every rank reads its own."""
    graph = scheduled(scaled, "shard_params")
    assert ("scale",) not in gathers(graph)
    (product,) = find(graph, _aten.mul.Tensor, phase=Phase.FORWARD)
    assert root(product.args[1]).op == "placeholder"  # type: ignore[arg-type]


def test_a_bias_is_not_gathered_again() -> None:
    """Backward never reads it."""
    graph = scheduled(biased, "shard_params")
    assert sorted(gathers(graph, Phase.FORWARD)) == [("bias",), ("weight",)]
    assert gathers(graph, Phase.BACKWARD) == [("weight",)]


def test_mixed_precision_casts_the_shard() -> None:
    """The wire carries the compute dtype, not the masters'."""
    graph = scheduled(chain(1), "shard_params", param_dtype=torch.bfloat16)
    transfers = list(graph.transfers(name="gather"))
    assert transfers
    for transfer in transfers:
        (cast,) = transfer.prepare
        assert cast.target is _aten._to_copy.default
        assert cast.meta["val"].shape == (1, 8)
        assert transfer.tensors[0].meta["val"].dtype is torch.bfloat16


def test_a_returned_parameter_is_not_released() -> None:
    """What leaves the graph must stay."""

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x).sum(), self.layer.weight.t()

    graph = scheduled(of(Returning, 4, 8), "shard_params", zero=3)
    assert not of_role(graph, Role.RELEASE, phase=Phase.FORWARD)


def test_releases_follow_the_last_reader() -> None:
    """Of the parameter or of any view of it."""
    graph = scheduled(chain(2), "shard_params", zero=3)
    nodes = list(graph.graph.nodes)
    releases = of_role(graph, Role.RELEASE)
    assert releases
    for release in releases:
        (owner,) = release.all_input_nodes
        readers = [
            n for n in nodes if n is not release and owner in {root(i) for i in n.all_input_nodes}
        ]
        assert max(map(nodes.index, readers)) < nodes.index(release)


def test_an_inference_gathers_and_releases() -> None:
    """A graph without backward, with the embedding read in eval mode."""
    graph = scheduled(chain(2), "shard_params", zero=3, training=False)
    assert gathers(graph) == [("layers.0.weight",), ("layers.1.weight",)]
    assert len(of_role(graph, Role.RELEASE)) == 2


def test_functional_reads_count_as_reads() -> None:
    """`F.linear` with another module's weight reads the same full parameter."""

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.layer(x), self.layer.weight.t()).sum()

    graph = scheduled(of(Borrowing, 4, 8), "shard_params", zero=3)
    assert gathers(graph, Phase.FORWARD) == [("layer.weight",)]
    assert gathers(graph, Phase.BACKWARD) == [("layer.weight",)]
