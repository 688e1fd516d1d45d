"""Equal layers are traced once, and nobody can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxzero
from examples.models import GPT, GPTConfig
from fxzero.capture import fold_layers
from fxzero.capture.fold_layers import Folds, Layer
from fxzero.capture.unfold_layers import unfold
from fxzero.compiler.compilation import Compilation
from fxzero.compiler.run import run_passes
from fxzero.graph import StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import StampNodes
from fxzero.passes.base import Context
from tests.tiers import exhaustive
from tests.tracing import observed

WIDTH = 8
EAGER = {"lower_regions": {"backend": "eager"}}


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    """Forget the shapes that other tests called the same modules with."""
    torch._dynamo.reset()


@contextmanager
def traced_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Layer | None]]:
    """What each tracing of a layer on its own came to."""
    found: list[Layer | None] = []
    trace = fold_layers.trace_layer

    def noting(*arguments: Any) -> Layer | None:
        found.append(trace(*arguments))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(fold_layers, "trace_layer", noting)
        yield found


class Residual(nn.Module):
    """A layer as most are: it reads its input twice and returns one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return x + self.linear(self.norm(x)).tanh()


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, layer: Callable[[], nn.Module] = Residual, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        for layer in self.layers:
            x = layer(x)
        return x


class TwoKinds(Stack):
    """Two interleaved kinds of layer."""

    def __init__(self) -> None:
        super().__init__()
        for i in (1, 3):
            self.layers[i] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


class Skips(Stack):
    """The values between layers are read again, further on."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        first = self.layers[0](x)
        second = self.layers[1](first)
        third = self.layers[2](second) + first
        return self.layers[3](third) * second + first


class Tied(Stack):
    """All layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.linear.weight = self.layers[0].linear.weight


class Repeated(Stack):
    """Each layer runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return super().forward(super().forward(x).sin())


class PartlyFrozen(Stack):
    """Layers whose norms do not train, behind two that do not train at all."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.layers[:2].requires_grad_(False)
        for layer in self.layers:
            layer.norm.requires_grad_(False)


class Autocast(Stack):
    """Layers mean something else inside of autocast than outside."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            x = self.layers[0](x)
        return super().forward(x)


class WritesInput(Residual):
    """Changes what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        y = self.linear(x * 1)  # which saves nothing of x
        x.mul_(0.5)
        return y


class ReturnsView(Residual):
    """Hands out its input under another shape."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (C, B)."""
        return x.view(x.shape)


class Counts(Residual):
    """Keeps a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        self.calls += 1
        return super().forward(x)


class TwoOutputs(nn.Module):
    """A layer that passes two tensors on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Residual()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Two of (B, C) → two of (B, C)."""
        x, y = pair
        return self.layer(x), (y * x).sin()


class Pairs(Stack):
    """Layers with two outputs."""

    def __init__(self) -> None:
        super().__init__(TwoOutputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        pair = (x, x.cos())
        for layer in self.layers:
            pair = layer(pair)
        return pair[0] + pair[1]


def gradients(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Any]:
    """Output, gradients of input and parameters, and buffers, of one step."""
    x = x.clone().requires_grad_()
    y = call(x * 1)
    y.pow(2).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def equals_eager(build: Callable[[], nn.Module], lowering: str = "eager") -> None:
    """Compare a step with the same model's, uncompiled, in float64."""
    torch.manual_seed(0)
    expected_model = build().double()
    model = build().double()
    model.load_state_dict(expected_model.state_dict())
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    expected = gradients(expected_model, x, expected_model)
    compiled = torch.compile(
        fxzero.shard(model, zero=3),
        backend="fxzero",
        options={"lower_regions": {"backend": lowering}},
    )
    assert_close(gradients(model, x, compiled), expected, rtol=0, atol=1e-12)


KINDS = [(Stack, 1), (TwoKinds, 2), (Skips, 1), (Tied, 1), (Repeated, 1), (PartlyFrozen, 2)]


@pytest.mark.parametrize(
    ("build", "kinds", "lowering"),
    # What was folded is a graph like others to Inductor: it sees two of these.
    [
        *((*each, "eager") for each in KINDS),
        *exhaustive((Tied, 1, "inductor"), (TwoKinds, 2, "inductor")),
    ],
)
def test_equal_layers_are_traced_once(
    build: Callable[[], nn.Module], kinds: int, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracing for each kind of layer, and the same gradients."""
    with traced_layers(monkeypatch) as traced:
        equals_eager(build, lowering)
    assert len(traced) == kinds
    assert None not in traced


@pytest.mark.parametrize("layer", [WritesInput, ReturnsView, Counts])
def test_layers_with_other_effects_are_traced_as_they_stand(
    layer: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd tells of layers that write their input or return it."""
    with traced_layers(monkeypatch) as traced:
        equals_eager(lambda: Stack(layer))
    assert set(traced) <= {None}


def test_one_layer_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be traced as often."""
    with traced_layers(monkeypatch) as traced:
        equals_eager(lambda: Stack(depth=1))
    assert traced == []


class EndsInView(Residual):
    """A layer whose last operation moves nothing, as those of OPT."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return super().forward(x.reshape(-1, 2, WIDTH // 2).reshape(-1, WIDTH)).view(x.shape)


class LogsUsage(Residual):
    """A layer in whose middle torch counts who calls it, as in attention masks of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        y = self.norm(x)
        torch._C._log_api_usage_once("fxzero.test")
        return x + self.linear(y).tanh()


class ShiftsLabels(Stack):
    """Writes to a tensor by its index in front of the layers, as T5 does."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        shifted = x.new_zeros(x.shape)
        shifted[1:] = x[:-1].clone()
        return super().forward(shifted)


@pytest.mark.parametrize(
    "build", [lambda: Stack(EndsInView), lambda: Stack(LogsUsage), ShiftsLabels, Pairs]
)
def test_what_transformers_write_is_folded(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these kept every layer of an architecture from being folded."""
    with traced_layers(monkeypatch) as traced:
        equals_eager(build)
    assert len(traced) == 1
    assert traced[0] is not None


class Slides(nn.Module):
    """A layer that hands out the end of what it keeps, and a number of its own, as Mistral's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Residual()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Two of (B, C) → two of (B, C)."""
        x, y = pair
        y = torch.cat([x, y])
        count = torch.tensor(2, dtype=torch.int64).to(x.device)
        return self.layer(x) * count, y.sin()[x.shape[0] :, :]


@pytest.mark.parametrize("trains", [False, True])
def test_a_view_that_is_handed_out_stays_outside(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what needs no gradient may be of any dtype."""

    def build() -> nn.Module:
        model = Pairs()
        model.layers = nn.ModuleList(Slides() for _ in range(4))
        return model.requires_grad_(trains)

    with traced_layers(monkeypatch) as traced:
        equals_eager(build)
    assert len(traced) == 1
    assert traced[0] is not None


class WrittenBetween(Pairs):
    """A layer's outputs are changed in place, by index too, before the next one reads them."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        pair = (x, x.cos())
        for layer in self.layers:
            pair = layer(pair)
            pair[0].mul_(2)
            pair[1][0] = 0.5
        return pair[0] + pair[1]


def test_outputs_that_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layer handed out is not what the next one reads."""
    with traced_layers(monkeypatch) as traced:
        equals_eager(WrittenBetween)
    assert len(traced) == 1
    assert traced[0] is not None


class OneDetached(Pairs):
    """Of each layer's outputs the second one ends in nothing that trains, but for the last's."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        pair = (x, x.cos())
        for layer in self.layers:
            first, second = layer(pair)
            pair = first, second.detach().cos()
        return pair[0] + pair[1]


class Cached(Stack):
    """Layers that also hand out what they keep, as transformers' caches of keys do."""

    def __init__(self) -> None:
        super().__init__(TwoOutputs)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(B, C) → (B, C), and one more a layer."""
        kept = []
        for layer in self.layers:
            x, keys = layer((x, x.cos()))
            kept.append(keys)
        return x, kept


def test_a_gradient_that_does_not_exist_is_not_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros times an infinite derivative would be NaN: such layers are traced as they stand."""
    with traced_layers(monkeypatch) as traced:
        equals_eager(OneDetached)
    assert len(traced) == 1
    assert traced[0] is not None


@pytest.mark.parametrize("read", [False, True])
def test_layers_that_hand_out_a_cache(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are those of eager mode, whether the loss reads it or not."""
    torch.manual_seed(0)
    model = Cached().double()
    x = torch.randn(3, WIDTH, dtype=torch.float64)

    def loss(call: Callable[[Tensor], Any]) -> Tensor:
        y, kept = call(x)
        total: Tensor = y.square().sum()
        return total + sum(k.sin().sum() for k in kept) if read else total

    loss(model).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    options = {"lower_regions": {"backend": "eager"}}
    with traced_layers(monkeypatch) as traced:
        loss(torch.compile(model, backend="fxzero", options=options)).backward()
    assert len(traced) == 1
    assert traced[0] is not None
    assert_close([p.grad for p in model.parameters()], expected, rtol=1e-12, atol=1e-12)


def test_layers_of_different_widths_are_different() -> None:
    """Equal code on other shapes traces to something else."""

    class Widths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH - i, WIDTH - i - 1) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    equals_eager(Widths)


def test_dynamic_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symbolic shapes are left to AOTAutograd; the gradients are right all the same."""
    torch.manual_seed(0)
    model = Stack().double()
    reference = Stack().double()
    reference.load_state_dict(model.state_dict())
    compiled = torch.compile(
        fxzero.shard(model, zero=3), backend="fxzero", dynamic=True, options=EAGER
    )
    with traced_layers(monkeypatch) as traced:
        for rows in (3, 7):
            x = torch.randn(rows, WIDTH, dtype=torch.float64)
            reference.zero_grad()
            model.zero_grad()
            expected = gradients(reference, x, reference)
            assert_close(gradients(model, x, compiled), expected, rtol=0, atol=1e-12)
    assert traced == []


def test_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients only the forward is traced."""
    model = Stack()
    x = torch.randn(5, WIDTH)
    expected = model(x)
    compiled = torch.compile(fxzero.shard(model, zero=3), backend="fxzero", options=EAGER)
    with traced_layers(monkeypatch) as traced, torch.no_grad():
        assert_close(compiled(x), expected)
    (layer,) = traced
    assert layer is not None
    assert layer.gradients == []


def stamped_nodes(*, fold: bool, zero: int, monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """What the joint graph of a GPT with dropout consists of, but for names."""
    graphs: list[StepGraph] = []

    def take(compilation: Compilation) -> None:
        def schedule(graph: StepGraph) -> None:
            whole = graph.clone()
            unfold(whole, compilation.folds, leave_out=False)
            run_passes([StampNodes()], whole, Context())
            graphs.append(whole)
            Compilation.schedule(compilation, graph)

        compilation.schedule = schedule  # type: ignore[method-assign]

    torch._dynamo.reset()  # called twice in a test
    with monkeypatch.context() as patch, fake_ranks(8), observed(take):
        if not fold:
            patch.setattr(fold_layers, "fold_layers", lambda *_: Folds())
        model = GPT(GPTConfig(num_layers=3, dropout=0.1))
        if zero:
            model = fxzero.shard(model, zero=zero)
        options = {"lower_regions": {"backend": "eager"}}
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        torch.compile(model, backend="fxzero", options=options)(tokens, tokens)
    (graph,) = graphs

    def key_of(argument: Any) -> str:
        return argument.split("/", 1)[1] if isinstance(argument, str) and "/" in argument else ""

    return Counter(
        (
            node.target if node.op == "call_function" else node.op,
            stamp_of(node).phase,
            # A sum of gradients is autograd's own: it is in the layer that was current.
            stamp_of(node).layer if node.target is not torch.ops.aten.add.Tensor else "",
            tuple(map(key_of, node.args)),
            str(node.meta.get("val")),
            len(node.users),
        )
        for node in graph.graph.nodes
    )


@pytest.mark.parametrize("zero", [3, *exhaustive(0)])
def test_the_graph_is_the_same(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node is there with its phase, layer, parameter and value, and no other."""
    with traced_layers(monkeypatch) as traced:
        folded = stamped_nodes(fold=True, zero=zero, monkeypatch=monkeypatch)
    assert len(traced) == 1
    assert folded == stamped_nodes(fold=False, zero=zero, monkeypatch=monkeypatch)


def test_a_numbers_registry_is_left_empty() -> None:
    """Also when tracing fails."""

    class Fails(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 3)

    with pytest.raises(Exception, match=r"view|shape"):
        equals_eager(Fails)
    equals_eager(Stack)
    assert fold_layers._calls == {}


class SumInPlace(Stack):
    """The caller writes what a layer has read."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        x = x.clone()
        for layer in self.layers:
            x += layer(x)
        return x


class Detached(nn.Module):
    """A layer that does not look back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return self.linear(x.detach()).tanh()


def relu_and_linear() -> nn.Module:
    """A layer that does not save its input for backward, so that its caller may change it."""
    return nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class StraightThrough(torch.autograd.Function):
    """A gradient for a value that nobody reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class ReadByGradientsOnly(Stack):
    """The forward of the layers is dead, their backward is not."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        return StraightThrough.apply(super().forward(x)) * 3  # type: ignore[no-any-return]


class AfterNoGrad(Stack):
    """Another context comes before the layers."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) → (B, C)."""
        with torch.no_grad():
            x = x * 2
        return super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SumInPlace(relu_and_linear),
        lambda: Stack(Detached),
        lambda: ReadByGradientsOnly(lambda: nn.Linear(WIDTH, WIDTH)),
        AfterNoGrad,
        Autocast,
    ],
    ids=["iadd", "detach", "dead forward", "no_grad", "autocast"],
)
def test_between_layers(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to a value outside of its layer; a gradient that is None stays None."""
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with traced_layers(monkeypatch) as found:
        options = {"lower_regions": {"backend": "eager"}}
        torch.compile(model, backend="fxzero", options=options)(x).square().sum().backward()
    assert len(found) == 1
    assert found[0] is not None
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
