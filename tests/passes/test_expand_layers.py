"""The pass `expand_layers`: of a chain of equal layers, passes see five and the graph has all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.testing import assert_close

import fxzero
from fxzero._compat import OpOverload, is_higher_order
from fxzero.capture import fold_layers
from fxzero.compiler.compilation import Compilation
from fxzero.compiler.config import Config
from fxzero.graph import StepGraph
from fxzero.graph.modules import module_path
from fxzero.graph.node_text import describe_value
from fxzero.graph.pieces import is_call, piece_of
from fxzero.graph.stamps import stamp_of
from fxzero.inspect.capture import capture, fake_ranks
from fxzero.passes import Recompute
from fxzero.passes.repeat_values import Repetitions
from tests.tiers import exhaustive, in_two_tiers
from tests.tracing import chain, observed, run, texts, trace, up_to

DEPTH = 9
WIDTH = 16


class Block(nn.Module):
    """A layer as most are: a norm, two products, a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class PostNorm(Block):
    """As BERT's: what it returns is cheap to repeat from what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return self.norm(x + self.down(self.up(x).relu()))


class Dropped(Block):
    """Random numbers in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return x + nn.functional.dropout(self.down(self.up(self.norm(x)).tanh()), 0.2)


class Masked(Block):
    """All layers read one mask besides."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        """(B, C), (B, 1) → (B, C)."""
        return super().forward(x) * mask


class Own(Block):
    """A constant, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return super().forward(x) * self.scale + torch.tensor([0.5, 1.5]).sum()


class Elementwise(nn.Module):
    """Cheap through and through: what backward repeats may reach over several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return (x * self.weight).tanh() + 1


class Deep(nn.Module):
    """Equal layers between others."""

    def __init__(self, layer: Callable[[], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        more = (x.sum(-1, keepdim=True).sign(),) if isinstance(self.h[0], Masked) else ()
        x = self.first(x)
        for layer in self.h:
            x = layer(x, *more)
        return self.head(x).square().mean()

    def example_inputs(self, batch_size: int | None) -> tuple[Tensor, ...]:
        """As `fxzero inspect` asks for them."""
        return (torch.randn(batch_size or 2, WIDTH),)


class TwoStacks(Deep):
    """Two chains of one class of layers, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.ModuleList(Block() for _ in range(DEPTH))
        self.p = nn.ModuleList(PostNorm() for _ in range(DEPTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        for layer in (*self.h, *self.p):
            x = layer(x)
        x = self.first(x)
        for layer in self.g:
            x = layer(x)
        return self.head(x).square().mean()


class Wrapped(nn.Module):
    """Layers and parameters have other names for the compiler than for `shard`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Deep()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        return self.inner(x)

    def example_inputs(self, batch_size: int | None) -> tuple[Tensor, ...]:
        """As `fxzero inspect` asks for them."""
        return self.inner.example_inputs(batch_size)


def odd() -> Deep:
    """Rows that do not divide by the ranks."""
    return Deep(lambda: Narrow())


class Narrow(nn.Module):
    """A layer with 7 rows inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return x + self.down(self.up(x).sin())


def _name(target: Any) -> str:
    """What an object is that a graph calls, and no address."""
    return getattr(target, "__name__", type(target).__name__)


def described(graph: StepGraph) -> list[tuple[Any, ...]]:
    """A graph but for the names of its nodes: what each does, with what, and what is known."""
    number = {node: i for i, node in enumerate(graph.graph.nodes)}
    by_name = {node.name: i for node, i in number.items()}

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", number[value])
        if isinstance(value, (list, tuple)):
            return tuple(map(argument, value))
        if isinstance(value, dict):
            return tuple((key, argument(part)) for key, part in sorted(value.items()))
        return repr(label(value))

    def label(value: Any) -> Any:
        return graph.labels.get(value, value) if isinstance(value, str) else value

    found = []
    for node in graph.graph.nodes:
        stamp = stamp_of(node)
        target = node.target if node.op == "call_function" else node.op
        target = target if isinstance(target, (str, OpOverload)) else _name(target)
        found.append(
            (
                piece_of(node).digest if is_call(node) else target,
                argument(node.args),
                argument(node.kwargs),
                stamp.but(
                    params=tuple(map(label, stamp.params)),
                    again=by_name.get(stamp.again, bool(stamp.again)),
                ),
                describe_value(node.meta.get("val")),
                module_path(node),
                is_higher_order(node),
            )
        )
    return [*found, tuple((i, label(key)) for i, key in graph.gradients.items())]


def compiled(build: Callable[[], nn.Module], **arguments: Any) -> tuple[list[Any], int]:
    """The scheduled graphs of a model, described; and how many layers were left out."""
    torch._dynamo.reset()
    arguments = {"zero": 3, "world_size": 8, **arguments}
    found = capture(build, **arguments)
    graphs = []
    left_out = 0
    for compilation in found.compilations:
        assert compilation.joint is not None
        assert compilation.joint.left_out == []
        graphs.append(described(compilation.joint))
        for record in compilation.records:
            if record.name == "expand_layers":
                left_out += record.notes.get("layers", 0)  # type: ignore[operator]  # a number
    return graphs, left_out


@pytest.mark.parametrize(
    ("build", "arguments", "layers"),
    [
        (Deep, {"zero": 2, "step": True, "micro_batches": 3}, 4),
        (lambda: Deep(Masked), {"zero": 2}, 4),
        (odd, {"zero": 1, "rank": 7}, 4),
        (Wrapped, {}, 4),
        (lambda: Deep(depth=6), {}, 0),
        *exhaustive(
            (Deep, {}, 4),
            (lambda: Deep(Dropped), {"step": True}, 4),
            (lambda: Deep(depth=7), {}, 2),
            (Deep, {"zero": 0}, 4),
            (Deep, {"zero": 1, "step": True, "micro_batches": 3}, 4),
            (Deep, {"zero": 3, "step": True, "micro_batches": 7, "batch_size": 14}, 4),
            (Deep, {"training": False}, 4),
            (Deep, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, 4),
            (Deep, {"options": {"lower_regions": {"backend": "eager"}}}, 4),
            (Deep, {"options": {"recompute": {"max_nodes": 0}}, "step": True}, 4),
            (lambda: Deep(PostNorm), {}, 4),
            (lambda: Deep(PostNorm), {"zero": 1}, 4),
            (lambda: Deep(Own), {}, 4),
            (lambda: Deep(Elementwise, 14), {}, 9),
            (odd, {}, 4),
            (TwoStacks, {"step": True}, 3 + 4 + 5),
        ),
    ],
)
def test_the_graph_is_that_of_every_layer(
    build: Callable[[], nn.Module],
    arguments: dict[str, Any],
    layers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node by node: operators, arguments, stamps, values, decisions, order."""
    found, left_out = compiled(build, **arguments)
    assert left_out == layers
    monkeypatch.setattr(fold_layers, "LEAST_LEFT_OUT", 1000)
    expected, none = compiled(build, **arguments)
    assert none == 0
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one == other


@texts
def test_before_and_after() -> None:
    """Each layer's products stand where its turn is, and read their neighbours'."""
    graph = trace(chain(7, 8, 4, False), zero=0, leave_out=True)
    record = run(graph, up_to("expand_layers"))[-1]
    assert record.notes["layers"] == 2
    assert_expected_inline(
        products(record.before),
        """\
mm = aten.mm(primals_1, t)  # forward layers.0
mm_1 = aten.mm(mm, t_1)  # forward layers.1
mm_2 = aten.mm(mm_1, t_2)  # forward layers.2
mm_3 = aten.mm(mm_2, t_3)  # forward layers.5
mm_4 = aten.mm(mm_3, t_4)  # forward layers.6
mm_5: f32[8, 8] = aten.mm(t_5, mm_3)  # backward layers.6
mm_6 = aten.mm(clone, t_7)  # backward layers.6
mm_7: f32[8, 8] = aten.mm(t_9, mm_2)  # backward layers.5
mm_8 = aten.mm(mm_6, t_11)  # backward layers.5
mm_9: f32[8, 8] = aten.mm(t_13, mm_1)  # backward layers.2
mm_10 = aten.mm(mm_8, t_15)  # backward layers.2
mm_11: f32[8, 8] = aten.mm(t_17, mm)  # backward layers.1
mm_12 = aten.mm(mm_10, t_19)  # backward layers.1
mm_13: f32[8, 8] = aten.mm(t_21, primals_1)  # backward layers.0
mm_14 = aten.mm(mm_12, t_23)  # backward layers.0
return (sum_1, mm_14, getitem, getitem_1, getitem_2, None, None, getitem_3, getitem_4)""",
    )
    assert_expected_inline(
        products(record.after),
        """\
mm = aten.mm(primals_1, t)  # forward layers.0
mm_1 = aten.mm(mm, t_1)  # forward layers.1
mm_2 = aten.mm(mm_1, t_2)  # forward layers.2
mm_15 = aten.mm(mm_2, t_30)  # forward layers.3
mm_16 = aten.mm(mm_15, t_31)  # forward layers.4
mm_3 = aten.mm(mm_16, t_3)  # forward layers.5
mm_4 = aten.mm(mm_3, t_4)  # forward layers.6
mm_5: f32[8, 8] = aten.mm(t_5, mm_3)  # backward layers.6
mm_6 = aten.mm(clone, t_7)  # backward layers.6
mm_7: f32[8, 8] = aten.mm(t_9, mm_16)  # backward layers.5
mm_8 = aten.mm(mm_6, t_11)  # backward layers.5
mm_17: f32[8, 8] = aten.mm(t_32, mm_15)  # backward layers.4
mm_18 = aten.mm(mm_8, t_35)  # backward layers.4
mm_19: f32[8, 8] = aten.mm(t_37, mm_2)  # backward layers.3
mm_20 = aten.mm(mm_18, t_40)  # backward layers.3
mm_9: f32[8, 8] = aten.mm(t_13, mm_1)  # backward layers.2
mm_10 = aten.mm(mm_20, t_15)  # backward layers.2
mm_11: f32[8, 8] = aten.mm(t_17, mm)  # backward layers.1
mm_12 = aten.mm(mm_10, t_19)  # backward layers.1
mm_13: f32[8, 8] = aten.mm(t_21, primals_1)  # backward layers.0
mm_14 = aten.mm(mm_12, t_23)  # backward layers.0
return (sum_1, mm_14, getitem, getitem_1, getitem_2, getitem_6, getitem_5, getitem_3, getitem_4)""",
    )


def products(text: str) -> str:
    """The products in a graph's text, and what it returns."""
    lines = [line for line in text.splitlines() if "aten.mm(" in line or "return" in line]
    return "\n".join(line.replace(": f32[4, 8]", "").replace(" compute", "") for line in lines)


def without_the_examples(decide: Any) -> Any:
    """Recompute's decision, but for what the example's backward would repeat."""

    def deciding(self: Recompute, graph: StepGraph, ctx: Any) -> Repetitions:
        named = {node.name: node for node in graph.graph.nodes}
        values = decide(self, graph, ctx).values
        return Repetitions(
            tuple(v for v in values if stamp_of(named[v.value]).layer != "h.2"),
        )

    return deciding


def test_layers_that_a_pass_tells_apart_go_through_the_passes_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was done to the example alone is done to it alone."""
    monkeypatch.setattr(Recompute, "decide", without_the_examples(Recompute.decide))
    found, left_out = compiled(Deep)
    assert left_out == 0
    monkeypatch.setattr(fold_layers, "LEAST_LEFT_OUT", 1000)
    assert found == compiled(Deep)[0]


def test_a_plan_that_tells_layers_apart_is_refused(tmp_path: Path) -> None:
    """Its author sees which nodes, and what to do."""
    path = tmp_path / "plan.json"
    capture(Deep, zero=3, world_size=8).plan(Config()).write(path)
    data = json.loads(path.read_text())
    (decisions,) = data["graphs"].values()
    values = decisions["recompute"]["values"]
    saved = [value for value in values if value["saved_bytes"]]
    assert len(saved) == 2 * 5
    values.remove(saved[4])
    path.write_text(json.dumps(data))
    with pytest.raises(Exception, match="treats layers that are equal differently") as raised:
        capture(Deep, zero=3, world_size=8, options={"plan": str(path)})
    assert "or drop lower_kernels, recompute from the plan" in str(raised.value)


def test_a_plan_of_layers_that_were_told_apart_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of a graph of every layer, which another compilation first has to come to."""
    path = tmp_path / "plan.json"
    with monkeypatch.context() as patch:
        patch.setattr(Recompute, "decide", without_the_examples(Recompute.decide))
        written = capture(Deep, zero=3, world_size=8)
    written.plan(Config()).write(path)
    replayed = capture(Deep, zero=3, world_size=8, options={"plan": str(path)})
    for mine, theirs in zip(replayed.compilations, written.compilations, strict=True):
        assert mine.joint is not None
        assert theirs.joint is not None
        assert described(mine.joint) == described(theirs.joint)
        assert mine.context.decisions.replayed == set(mine.context.decisions.made)


def test_layers_that_are_sharded_differently_are_not_left_out() -> None:
    """They trace alike, and their transfers differ."""
    torch._dynamo.reset()
    found: list[Compilation] = []
    with fake_ranks(8), observed(found.append):
        model = Deep()
        for i, layer in enumerate(model.h):
            fxzero.shard(layer, 1 if i == 4 else 3)
        options = {"lower_regions": {"backend": "eager"}}
        compiled_model = torch.compile(model, backend="fxzero", options=options)
        compiled_model(torch.randn(2, WIDTH)).backward()
    (compilation,) = found
    notes = [record.notes for record in compilation.records if record.name == "expand_layers"]
    assert [dict(note) for note in notes] == [{}]


class Collected(Deep):
    """What each layer returns is read at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        found = [self.first(x)]
        for layer in self.h:
            found.append(layer(found[-1]))
        return self.head(torch.stack(found).sum(0)).square().mean()


class Scaled(Block):
    """One trainable number scales all layers."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        """(B, C), () → (B, C)."""
        return super().forward(x) * scale


class SharedScale(Deep):
    """Its gradient is a sum over all layers."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        x = self.first(x)
        for layer in self.h:
            x = layer(x, self.scale)
        return self.head(x).square().mean()


class Tied(Deep):
    """Two layers of the middle share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.h[5].up.weight = self.h[3].up.weight


class Again(Deep):
    """Each layer runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        x = self.first(x)
        for layer in (*self.h, *self.h):
            x = layer(x)
        return self.head(x).square().mean()


class Frozen(Deep):
    """One layer of the middle does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.h[4].requires_grad_(False)


class Penalised(Deep):
    """A weight of the middle is read outside of its layer."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        return super().forward(x) + self.h[4].up.weight.square().sum()


class Between(Deep):
    """Something stands between two layers."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        x = self.first(x)
        for i, layer in enumerate(self.h):
            x = layer(x)
            if i == 4:
                x = x.view(-1, 2, WIDTH // 2).flatten(1)
        return self.head(x).square().mean()


class Unequal(Deep):
    """Some layers compute something else, with the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        for i in (2, 6):
            self.h[i].__class__ = PostNorm


class Phased(nn.Module):
    """A layer without parameters that does one thing or another."""

    def forward(self, x: Tensor, again: bool) -> Tensor:
        """(B, C) → (B, C)."""
        return x.sin() + 0.9 * x if again else (1.3 * x).tanh() + x


class TwoPhases(Deep):
    """The same layers stand in two chains."""

    def __init__(self) -> None:
        super().__init__(Phased)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → a scalar."""
        for again in (False, True):
            x = self.first(x)
            for layer in self.h:
                x = layer(x, again)
        return self.head(x).square().mean()


def test_layers_of_two_chains_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a layer's name its nodes are found. Nobody tries, and begins again."""

    def begins_again(*_: Any) -> None:
        raise AssertionError("a chain was left out")

    monkeypatch.setattr(Compilation, "start_again", begins_again)
    _, left_out = compiled(TwoPhases)
    assert left_out == 0


BUILDS: list[Callable[[], nn.Module]] = [
    Deep,
    TwoStacks,
    Collected,
    TwoPhases,
    SharedScale,
    Tied,
    Again,
    Frozen,
    Penalised,
    Between,
    Unequal,
    lambda: Deep(PostNorm),
    lambda: Deep(Masked),
    lambda: Deep(Own),
    lambda: Deep(Elementwise, 14),
]


@pytest.mark.parametrize(
    ("door", "build"),
    in_two_tiers([*product(("loop", "step"), BUILDS)], always=zip(cycle(("loop", "step")), BUILDS)),
)
def test_gradients_are_those_of_eager(door: str, build: Callable[[], nn.Module]) -> None:
    """Of every parameter, after a step of several micro-batches too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build().double()
    eager = copy.deepcopy(model)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    options = {"lower_regions": {"backend": "eager"}}
    if door == "loop":
        eager(x).backward()
        torch.compile(fxzero.shard(model, 3), backend="fxzero", options=options)(x).backward()
    else:
        torch.stack([eager(part) for part in x.chunk(3)]).mean().backward()
        torch.optim.SGD(eager.parameters(), lr=0.1).step()
        optimizer = torch.optim.SGD(fxzero.shard(model, 3).parameters(), lr=0.1)
        fxzero.compile_step(model, optimizer, micro_batches=3, options=options)(x)
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        pairs = [(mine.grad, theirs.grad)] if door == "loop" else [(mine, theirs)]
        for found, expected in pairs:
            if expected is None:
                assert found is None, name
                continue
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            largest = expected.detach().abs().max().item()
            assert_close(found.detach(), expected.detach(), rtol=0, atol=1e-12 * largest)


def test_an_optimizer_that_lacks_some_of_the_layers() -> None:
    """Their gradients are not computed, and the others are right."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep().double()
    eager = copy.deepcopy(model)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    kept = [n for n, _ in model.named_parameters() if not n.startswith("h.4")]
    eager(x).backward()
    torch.optim.SGD([dict(eager.named_parameters())[n] for n in kept], lr=0.1).step()
    optimizer = torch.optim.SGD([dict(model.named_parameters())[n] for n in kept], lr=0.1)
    options = {"lower_regions": {"backend": "eager"}}
    fxzero.compile_step(model, optimizer, options=options)(x)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-13)
