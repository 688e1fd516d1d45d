# ruff: noqa: E501
"""Layers become calls of pieces, and the step that is scheduled and lowered stays the same."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxzero.cost import AnalyticCosts, load_cluster
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.digest import graph_digest
from fxzero.graph.pieces import called, is_call, piece_of, spelled_out
from fxzero.inspect.capture import capture
from fxzero.passes import Bucket, Prefetch, Recompute
from fxzero.passes.outline import split_at_buckets
from fxzero.regions.cutout import cut_out, move_parts_together, runs
from fxzero.schedule.inventory import Inventory
from fxzero.schedule.problem import problem_of
from tests.tiers import in_two_tiers
from tests.tracing import JOINT, OUTLINED, Build, chain, of, run, texts, trace, up_to, words


class Block(nn.Module):
    """A residual block with a norm, whose weights are read in three places."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → (B, width)."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Blocks between a projection that is used twice."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.tied = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → scalar."""
        x = self.tied(x)
        for block in self.blocks:
            x = block(x)
        return self.tied(x).square().sum()


class Casting(nn.Module):
    """Casts its weight itself, as autocast does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) → scalar."""
        for layer in self.layers:
            x = (x.bfloat16() @ layer.weight.bfloat16().t()).float().tanh()
        return x.sum()


class Handing(nn.Module):
    """Layers that hand on views of what they compute, and of what they got."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 12) → scalar."""
        total = x.sum()
        for layer in self.layers:
            left, middle, right = layer(x).tanh().chunk(3, dim=1)
            total = total + (middle * right.flip(0)).sum()
            x = torch.cat([left, x[:, 4:]], dim=1).view(-1, 12)
        return total + x.sum()


MODELS: dict[str, Build] = {
    "chain": chain(4),
    "tower": of(Tower, 4, 8),
    "casting": of(Casting, 4, 16),
    "handing": of(Handing, 4, 12),
}


def outlined(build: Build, *instead: Any, last: str = "outline", **setup: Any) -> StepGraph:
    """A model's graph after the passes up to `last`."""
    graph = trace(build, **setup)
    run(graph, up_to(last, *instead, passes=OUTLINED))
    return graph


@texts
def test_before_and_after() -> None:
    """Three equal layers call one piece, in either direction; markers stand aside."""
    graph = outlined(chain(3), world_size=8)
    assert_expected_inline(
        words(graph.text()),
        """\
primals_1: f32[4, 8] = input
primals_2: f32[1, 8] = input
primals_3: f32[1, 8] = input
primals_4: f32[1, 8] = input
tangents_1: f32[] = input
unshard: f32[8, 8] = fxzero.unshard(primals_2, N/layers.0.weight, reduce)  # forward compute unshard layers.0
unshard_1: f32[8, 8] = fxzero.unshard(primals_3, N/layers.1.weight, reduce)  # forward compute unshard layers.1
unshard_2: f32[8, 8] = fxzero.unshard(primals_4, N/layers.2.weight, reduce)  # forward compute unshard layers.2
layers_0_forward: (f32[4, 8]) = layers_forward(unshard, primals_1)  # forward compute compute layers.0
relu: f32[4, 8] = getitem(layers_0_forward, 0)  # forward compute compute layers.0
layers_1_forward: (f32[4, 8]) = layers_forward(unshard_1, relu)  # forward compute compute layers.1
relu_1: f32[4, 8] = getitem(layers_1_forward, 0)  # forward compute compute layers.1
layers_2_forward: (f32[4, 8], f32[]) = layers_forward_2(unshard_2, relu_1)  # forward compute compute layers.2
relu_2: f32[4, 8] = getitem(layers_2_forward, 0)  # forward compute compute layers.2
sum_1: f32[] = getitem(layers_2_forward, 1)  # forward compute compute layers.2
layers_2_backward: (f32[4, 8], f32[8, 8]) = layers_backward(tangents_1, relu_2, relu_1, unshard_2)  # backward compute compute layers.2
mm_4: f32[4, 8] = getitem(layers_2_backward, 0)  # backward compute compute layers.2
t_6: f32[8, 8] = getitem(layers_2_backward, 1)  # backward compute compute layers.2
layers_1_backward: (f32[4, 8], f32[8, 8]) = layers_backward_2(relu_1, mm_4, relu, unshard_1)  # backward compute compute layers.1
mm_6: f32[4, 8] = getitem(layers_1_backward, 0)  # backward compute compute layers.1
t_10: f32[8, 8] = getitem(layers_1_backward, 1)  # backward compute compute layers.1
layers_0_backward: (f32[4, 8], f32[8, 8]) = layers_backward_2(relu, mm_6, primals_1, unshard)  # backward compute compute layers.0
mm_8: f32[4, 8] = getitem(layers_0_backward, 0)  # backward compute compute layers.0
t_14: f32[8, 8] = getitem(layers_0_backward, 1)  # backward compute compute layers.0
reshard_grad: f32[1, 8] = fxzero.reshard_grad(t_6, N/layers.2.weight, reduce)  # backward compute reshard layers.2
reshard_grad_1: f32[1, 8] = fxzero.reshard_grad(t_10, N/layers.1.weight, reduce)  # backward compute reshard layers.1
reshard_grad_2: f32[1, 8] = fxzero.reshard_grad(t_14, N/layers.0.weight, reduce)  # backward compute reshard layers.0
return [sum_1, mm_8, reshard_grad_2, reshard_grad_1, reshard_grad]

layers_forward:
    input_0: f32[8, 8] = input
    input_1: f32[4, 8] = input
    t: f32[8, 8] = aten.t(input_0)  # forward compute compute layers.0
    mm: f32[4, 8] = aten.mm(input_1, t)  # forward compute compute layers.0
    relu: f32[4, 8] = aten.relu(mm)  # forward compute compute layers.0
    return (relu,)

layers_forward_2:
    input_0: f32[8, 8] = input
    input_1: f32[4, 8] = input
    t_2: f32[8, 8] = aten.t(input_0)  # forward compute compute layers.2
    mm_2: f32[4, 8] = aten.mm(input_1, t_2)  # forward compute compute layers.2
    relu_2: f32[4, 8] = aten.relu(mm_2)  # forward compute compute layers.2
    sum_1: f32[] = aten.sum(relu_2)  # forward compute compute layers.2
    return (relu_2, sum_1)

layers_backward:
    input_0: f32[] = input
    input_1: f32[4, 8] = input
    input_2: f32[4, 8] = input
    input_3: f32[8, 8] = input
    expand: f32[4, 8] = aten.expand(input_0, [4, 8])  # backward compute compute layers.2
    detach_2: f32[4, 8] = aten.detach(input_1)  # backward compute compute layers.2
    detach_3: f32[4, 8] = aten.detach(detach_2)  # backward compute compute layers.2
    threshold_backward: f32[4, 8] = aten.threshold_backward(expand, detach_3, 0)  # backward compute compute layers.2
    t_3: f32[8, 4] = aten.t(threshold_backward)  # backward compute compute layers.2
    mm_3: f32[8, 8] = aten.mm(t_3, input_2)  # backward compute compute layers.2
    t_15: f32[8, 8] = aten.t(input_3)  # backward compute compute layers.2
    t_5: f32[8, 8] = aten.t(t_15)  # backward compute compute layers.2
    mm_4: f32[4, 8] = aten.mm(threshold_backward, t_5)  # backward compute compute layers.2
    return (mm_4, mm_3)

layers_backward_2:
    input_0: f32[4, 8] = input
    input_1: f32[4, 8] = input
    input_2: f32[4, 8] = input
    input_3: f32[8, 8] = input
    detach_1: f32[4, 8] = aten.detach(input_0)  # backward compute compute layers.1
    detach_4: f32[4, 8] = aten.detach(detach_1)  # backward compute compute layers.1
    threshold_backward_1: f32[4, 8] = aten.threshold_backward(input_1, detach_4, 0)  # backward compute compute layers.1
    t_7: f32[8, 4] = aten.t(threshold_backward_1)  # backward compute compute layers.1
    mm_5: f32[8, 8] = aten.mm(t_7, input_2)  # backward compute compute layers.1
    t_16: f32[8, 8] = aten.t(input_3)  # backward compute compute layers.1
    t_9: f32[8, 8] = aten.t(t_16)  # backward compute compute layers.1
    mm_6: f32[4, 8] = aten.mm(threshold_backward_1, t_9)  # backward compute compute layers.1
    return (mm_6, mm_5)""",
    )


@pytest.mark.parametrize("depth", [3, 12])
def test_depth_adds_calls_and_no_pieces(depth: int) -> None:
    """What a graph of any depth is made of."""
    graph = outlined(of(_TOWERS[depth], 4, 8))
    assert len(called(graph.graph.nodes)) == len(called(outlined(of(_TOWERS[6], 4, 8)).graph.nodes))
    blocks = [n for n in graph.nodes() if is_call(n) and n.name.startswith("blocks")]
    assert len(blocks) == 2 * depth


_TOWERS: dict[int, Callable[[], nn.Module]] = {
    depth: (lambda depth=depth: Tower(depth)) for depth in (3, 6, 12)
}


@pytest.mark.parametrize(("name", "zero"), in_two_tiers([*product(MODELS, [0, 2, 3])]))
def test_pieces_return_what_owns_its_memory(name: str, zero: int) -> None:
    """So that nobody outside has to look into a piece to know whose memory a value is."""
    graph = outlined(MODELS[name], zero=zero)
    assert called(graph.graph.nodes)
    for piece in called(graph.graph.nodes):
        for output in piece.outputs:
            assert output.op == "call_function"
            assert not is_view(output)


@pytest.mark.parametrize("name", MODELS)
def test_backward_reads_no_parameter_from_forward(name: str) -> None:
    """At stage 3, whatever forward makes of a parameter: not a view, not a cast. Nor without
    cheap repetitions."""
    graph = outlined(MODELS[name], Recompute(max_nodes=0), last="shard_params")
    full = {tuple(spec.shape) for spec in graph.specs.values()}
    full |= {shape[::-1] for shape in full}
    for node in graph.nodes(phase=Phase.FORWARD):
        value = node.meta.get("val")
        crosses = any(
            u.op == "call_function" and u.meta["fxzero"].phase is Phase.BACKWARD for u in node.users
        )
        if crosses and isinstance(value, Tensor):
            assert tuple(value.shape) not in full, f"{node.name} is a parameter's"


def tasks(build: Build, passes: Any, cap_bytes: int, zero: int) -> list[tuple[Any, ...]]:
    """The tasks of a step, with their times and with what they hold."""
    graph = trace(build, zero=zero)
    run(graph, up_to("bucket", Bucket(cap_bytes=cap_bytes, min_bytes=0), passes=passes))
    move_parts_together(graph)
    split_at_buckets(graph)
    costs = AnalyticCosts(load_cluster("laptop"))
    problem = problem_of(Inventory(graph, costs, cut=True, fuses=True))
    return [
        (task.name, pytest.approx(task.us), task.after, sorted(task.holds, key=str))
        for task in problem.graph.tasks
    ]


@pytest.mark.parametrize("name", ["chain", "tower"])
@pytest.mark.parametrize("cap_bytes", [64, 300, 1 << 20])
@pytest.mark.parametrize("zero", [1, 3])
def test_the_tasks_are_those_of_operators(name: str, cap_bytes: int, zero: int) -> None:
    """What is scheduled does not know whether it was outlined: order, times, bytes to the last.

    With the smallest cap every parameter travels alone, and a layer waits where it reads each.
    Where the last layer's forward goes on into its backward, as a chain's does, operators are taken
    for one run, which would hold its gradient from its beginning on.
    """
    expected = tasks(MODELS[name], JOINT, cap_bytes, zero)
    found = tasks(MODELS[name], OUTLINED, cap_bytes, zero)
    if name == "chain":
        assert [task[:3] for task in found] == [task[:3] for task in expected]
    else:
        assert found == expected
    assert len(expected) > 20 if cap_bytes == 64 else expected


def test_a_call_is_split_where_a_later_bucket_is_read() -> None:
    """Once for all equal calls."""
    graph = outlined(
        MODELS["tower"], Bucket(cap_bytes=64, min_bytes=0), Prefetch(1), last="prefetch"
    )
    forward = [n for n in graph.nodes(phase=Phase.FORWARD) if is_call(n)]
    of_blocks = [piece_of(n) for n in forward if n.meta["fxzero"].layer.startswith("blocks")]
    parts = len(of_blocks) // 3
    assert parts > 1
    assert of_blocks[:parts] == of_blocks[parts : 2 * parts] == of_blocks[2 * parts :]


def regions(graph: StepGraph) -> list[list[str]]:
    """The operators of each region that a graph would be lowered to, views aside."""
    move_parts_together(graph)
    found = []
    for nodes in runs(graph.graph.nodes):
        piece = cut_out(graph.pieces, nodes, "region").piece
        own = [str(n.target) for n in piece.nodes if not is_view(n) and not _is_part(n)]
        found.append(sorted(own))  # a cast may stand anywhere before its reader
    return found


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


@pytest.mark.parametrize(
    ("name", "zero", "param_dtype"),
    in_two_tiers([*product(MODELS, [0, 3], [None, torch.bfloat16])]),
)
def test_the_regions_are_those_of_operators(
    name: str, zero: int, param_dtype: torch.dtype | None
) -> None:
    """A call and what passes put beside it (casts, sums) are lowered as if there were no call."""
    both = []
    for passes in (JOINT, OUTLINED):
        graph = trace(MODELS[name], zero=zero, param_dtype=param_dtype)
        run(graph, up_to("prefetch", passes=passes))
        both.append(regions(graph))
    assert both[1] == both[0]


def test_what_is_called_counts_in_a_digest() -> None:
    """A plan is for one graph: a number inside of a layer tells two apart."""

    def scaled(factor: float) -> Build:
        def forward(x: Tensor) -> Tensor:
            return ((x.sin() * factor).cos() + 1).tanh().sum()

        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return forward(self.layer(x))

        return of(Scaled, 2, 4)

    graphs = [outlined(scaled(factor)) for factor in (2.0, 3.0, 2.0)]
    assert all(any(map(is_call, graph.graph.nodes)) for graph in graphs)
    two, three, again = (graph_digest(graph) for graph in graphs)
    assert two != three
    assert two == again


def test_a_piece_is_called_like_a_function() -> None:
    """Before anything is lowered, a graph of calls computes what one of operators does."""
    graph = outlined(MODELS["tower"], zero=0)
    piece = next(p for p in called(graph.graph.nodes) if p.__name__ == "blocks_forward")
    inputs = [torch.randn(n.meta["val"].shape) for n in piece.inputs]
    env = dict(zip(piece.inputs, inputs, strict=True))
    for node in piece.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    for ours, theirs in zip(piece(*inputs), (env[n] for n in piece.outputs), strict=True):
        assert torch.equal(ours, theirs)


def test_copies_of_a_graph_call_the_same_pieces() -> None:
    """AOTAutograd copies the module of a backward: its pieces are not lowered twice for that."""
    graph = outlined(MODELS["tower"])
    copied = copy.deepcopy(graph.module)
    assert called(copied.graph.nodes) == called(graph.graph.nodes)


def test_nothing_is_lost() -> None:
    """With what is called in place of the calls there is every operator of before."""
    before = trace(MODELS["tower"])
    run(before, up_to("recompute"))
    after = outlined(MODELS["tower"])

    def operators(nodes: Any) -> list[str]:
        return sorted(str(n.target) for n in nodes if n.op == "call_function" and not is_view(n))

    parts = [n for n in before.nodes() if _is_part(n)]
    assert operators(n for n in spelled_out(after.nodes()) if not _is_part(n)) == operators(
        n for n in before.nodes() if n not in parts
    )
    assert not list(after.nodes(role=Role.REGION))


class Convolved(nn.Module):
    """Convolutions and norms, whose gradients are cast on their way out."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.groups = nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, width, H, W)."""
        x = torch.relu(self.norm(self.first(x)))
        return nn.functional.silu(self.groups(self.second(x)))


class Skipping(nn.Module):
    """A network in the shape of a U: a block reads what another one made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.inner = Convolved(3, width), Convolved(width, width)
        self.up = Convolved(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) to a loss."""
        kept = self.down(x)
        y = self.inner(nn.functional.max_pool2d(kept, 2))
        y = nn.functional.interpolate(y, scale_factor=2)
        return self.up(torch.cat([y, kept], 1)).square().mean()


def test_a_cast_comes_between_no_parts_of_a_call_that_is_split() -> None:
    """bf16 gradients that are reduced in fp32: a call that a later bucket takes apart has its
    parts behind it, so that it is one region, and nobody reads the call itself."""
    options = {"cost": {"cluster": "laptop"}, "bucket": {"cap_bytes": 3000, "min_bytes": 0}}
    captured = capture(
        lambda: (Skipping(8), (torch.randn(2, 3, 16, 16),)),
        zero=3,
        world_size=2,
        step=True,
        param_dtype=torch.bfloat16,
        options=options,
    )
    (compilation,) = captured.compilations
    assert compilation.joint is not None
