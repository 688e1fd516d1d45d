"""Kernels in the place of what they do: found as people write it, and only where they win."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxzero
from fxzero import _compat, backend
from fxzero.compiler.compilation import Compilation
from fxzero.compiler.run import PassRecord
from fxzero.errors import ConfigError
from fxzero.kernels import chunked_cross_entropy
from fxzero.passes import find_idioms
from fxzero.schedule.simulate import simulate_memory
from fxzero.schedule.storage import Kind
from tests.pairwise import pairwise
from tests.schedule.test_memory import allocated_peak_bytes
from tests.tiers import exhaustive
from tests.tracing import observed

EAGER = {"lower_regions": {"backend": "eager"}}


@dataclass(frozen=True)
class Outcome:
    """What a compiled step computed, and what the pass said."""

    notes: dict[str, object]
    loss: Tensor
    grads: dict[str, Tensor]
    record: PassRecord
    compilation: Compilation


def compiled_step(model: nn.Module, *inputs: Tensor, **settings: Any) -> Outcome:
    """Forward and backward through the backend, regions run as they are."""
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    torch._dynamo.reset()
    model.zero_grad()
    options = {"lower_kernels": settings, "keep_text": True, **EAGER}
    with observed(keep):
        loss = torch.compile(model, backend="fxzero", options=options)(*inputs)
        if loss.requires_grad:
            loss.backward()
    (compilation,) = found
    (record,) = (r for r in compilation.records if r.name == "lower_kernels")
    return Outcome(dict(record.notes), loss.detach(), gradients(model), record, compilation)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a model's parameters."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def eager_step(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same without a compiler."""
    model.zero_grad()
    loss = model(*inputs)
    loss.backward()
    return loss.detach(), gradients(model)


def check_equal(found: Outcome, loss: Tensor, grads: dict[str, Tensor], limit: float) -> None:
    """See that losses and gradients agree, relative to the largest element."""
    assert abs(float(found.loss - loss)) <= limit * abs(float(loss))
    assert found.grads.keys() == grads.keys()
    for name, grad in grads.items():
        error = float((found.grads[name] - grad).abs().max())
        assert error <= limit * float(grad.abs().max()), name


@pytest.fixture(params=[*exhaustive(False), True], ids=["whole", "decomposed"])
def decomposed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Graphs as regions of torch's own operators have them, and as Inductor's have them."""
    if request.param:
        table = _compat.inductor_decompositions()
        monkeypatch.setattr(backend, "decompositions_of", lambda _: table)
    return bool(request.param)


class Written(nn.Module):
    """A block with a residual around what a function makes of its input and some parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(8, 8)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s)) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """``(2, 3, 8) → scalar``."""
        h = self.first(x)
        weights = [self.weights[i] for i in range(len(self.weights))]  # torch 2.11 unpacks no list
        return (h + self.function(h, *weights)).square().sum()


def rms_llama(x: Tensor, w: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-6))


def rms_swapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.rsqrt(1e-5 + torch.mean(x**2, dim=-1, keepdim=True)) * x * w


def rms_root(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def rms_product(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def gelu_new(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


IDIOMS: dict[str, tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm, Llama": ("rms_norm", rms_llama, ((8,),)),
    "rms_norm, factors swapped": ("rms_norm", rms_swapped, ((8,),)),
    "rms_norm, division": ("rms_norm", rms_root, ((8,),)),
    "rms_norm, x * x": ("rms_norm", rms_product, ((8,),)),
    "rms_norm, torch": ("rms_norm", lambda x, w: F.rms_norm(x, (8,), w, 1e-6), ((8,),)),
    "layer_norm": ("layer_norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), ((8,), (8,))),
    "layer_norm, no bias": ("layer_norm", lambda x, w: F.layer_norm(x, (8,), w), ((8,),)),
    "gelu": ("gelu", F.gelu, ()),
    "gelu, tanh": ("gelu", lambda x: F.gelu(x, approximate="tanh"), ()),
    "gelu, written out": ("gelu", gelu_new, ()),
    "swiglu": ("swiglu", lambda x, w: F.silu(x) * (x @ w), ((8, 8),)),
    "geglu": ("geglu", lambda x, w: (x @ w) * F.gelu(x), ((8, 8),)),
    "geglu, written out": ("geglu", lambda x, w: gelu_new(x @ w) * x, ((8, 8),)),
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_idiom_becomes_its_kernel(idiom: str, decomposed: bool) -> None:
    """Beside a residual, whose gradient stands between those of the idiom's own uses."""
    kernel, function, shapes = IDIOMS[idiom]
    torch.manual_seed(0)
    model, x = Written(function, *shapes).double(), torch.randn(2, 3, 8).double()
    loss, grads = eager_step(model, x)
    found = compiled_step(model, x, force=kernel)
    assert found.notes == {kernel: 1}
    check_equal(found, loss, grads, 1e-12)


def test_an_idiom_of_one_size_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all graphs; for each size, and in other surroundings, anew."""
    traced: list[object] = []

    def trace(function: Any, values: list[Tensor], *rest: Any) -> Any:
        traced.append(function)
        return find_idioms_trace(function, values, *rest)

    find_idioms_trace = find_idioms.trace
    monkeypatch.setattr(find_idioms, "trace", trace)
    monkeypatch.setattr(find_idioms, "_exact_patterns", {})
    model = Written(rms_llama, (8,)).double()
    rows: dict[int, list[int]] = {}
    for count in (3, 3, 5):
        traced.clear()
        x = torch.randn(2, count, 8).double()
        loss, grads = eager_step(model, x)
        check_equal(compiled_step(model, x, force="rms_norm"), loss, grads, 1e-12)
        rows.setdefault(count, []).append(len(traced))
    assert rows[3][1] < rows[3][0]
    assert rows[5] == [rows[3][1] + 1]
    traced.clear()
    torch.use_deterministic_algorithms(True)
    try:
        compiled_step(model, torch.randn(2, 5, 8).double(), force="rms_norm")
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(traced) == rows[5][0]
    most = len(find_idioms._exact_patterns)
    monkeypatch.setattr(find_idioms, "_MOST_KNOWN", most)
    compiled_step(model, torch.randn(2, 6, 8).double(), force="rms_norm")
    assert len(find_idioms._exact_patterns) == most


class Head(nn.Module):
    """Hidden states, a linear layer and its loss."""

    def __init__(self, width: int, classes: int, bias: bool = False, **settings: Any) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, classes, bias=bias)
        self.settings = settings

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``(2, T, width), (2, T) → scalar``."""
        logits = self.head(self.hidden(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), **self.settings)


class HeadOfRows(Head):
    """The same over rows: nothing is reshaped."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``(2, T, width), (2, T) → scalar``."""
        rows = self.hidden(x).flatten(0, 1)
        return F.cross_entropy(self.head(rows), target.flatten(), **self.settings)


def head_inputs(length: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Hidden states in float64, and targets of which some are ignored."""
    target = torch.randint(classes, (2, length))
    target[0, :2] = -100
    return torch.randn(2, length, width).double(), target


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, with bias": {"label_smoothing": 1 / 3, "bias": True},
    "with bias": {"bias": True},
}


@pytest.mark.parametrize(
    ("head", "name", "kernel", "decomposed"),
    pairwise(
        (Head, HeadOfRows),
        tuple(SETTINGS),
        ("linear_cross_entropy", "softmax_cross_entropy"),
        (False, True),
    ),
    indirect=["decomposed"],
)
def test_losses(head: type[Head], name: str, kernel: str, decomposed: bool) -> None:
    torch.manual_seed(0)
    settings = SETTINGS[name]
    model = head(8, 13, **settings).double()
    x, target = head_inputs(5, 8, 13)
    target = target.clamp(min=0) if "ignore_index" in settings else target
    loss, grads = eager_step(model, x, target)
    found = compiled_step(model, x, target, force=kernel)
    assert found.notes == {kernel: 1}
    check_equal(found, loss, grads, 1e-12)


class Shifted(Head):
    """Every position but the last says the next token."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``(2, T, width), (2, T) → scalar``."""
        logits = self.head(self.hidden(x))[:, :-1].reshape(-1, self.head.out_features)
        return F.cross_entropy(logits, target[:, 1:].reshape(-1), **self.settings)


class Summed(Head):
    """Divided by a number of tokens that the caller knows."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``(2, T, width), (2, T) → scalar``."""
        logits = self.head(self.hidden(x)).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(), reduction="sum") / 7


class Autocast(Head):
    """nanoGPT's loop: products in bfloat16, the loss in float32."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``(2, T, width), (2, T) → scalar``."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, target)


@pytest.mark.parametrize("head", [Shifted, Summed])
def test_other_ways_to_write_a_head(head: type[Head], decomposed: bool) -> None:
    torch.manual_seed(0)
    model, (x, target) = head(8, 13).double(), head_inputs(5, 8, 13)
    loss, grads = eager_step(model, x, target)
    found = compiled_step(model, x, target, force="linear_cross_entropy")
    assert found.notes == {"linear_cross_entropy": 1}
    check_equal(found, loss, grads, 1e-12)


def test_a_head_under_autocast(decomposed: bool) -> None:
    torch.manual_seed(0)
    model, (x, target) = Autocast(8, 13), head_inputs(5, 8, 13)
    loss, grads = eager_step(model, x.float(), target)
    found = compiled_step(model, x.float(), target, force="linear_cross_entropy")
    assert found.notes == {"linear_cross_entropy": 1}
    check_equal(found, loss, grads, 4 * 2.0**-8)


@pytest.mark.parametrize("frozen", ["head.weight", "head.bias", "hidden"])
def test_heads_with_frozen_parts(frozen: str) -> None:
    torch.manual_seed(0)
    model, (x, target) = Head(8, 13, bias=True).double(), head_inputs(5, 8, 13)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    loss, grads = eager_step(model, x, target)
    found = compiled_step(model, x, target, force="linear_cross_entropy")
    assert found.notes == {"linear_cross_entropy": 1}
    check_equal(found, loss, grads, 1e-12)


@pytest.mark.parametrize("kernel", ["linear_cross_entropy", "softmax_cross_entropy"])
def test_a_batch_without_a_target(kernel: str) -> None:
    """The mean of nothing is NaN, as in torch; its gradient is 0 and changes no weight."""
    torch.manual_seed(0)
    model, (x, target) = Head(8, 13).double(), head_inputs(5, 8, 13)
    found = compiled_step(model, x, torch.full_like(target, -100), force=kernel)
    assert found.notes == {kernel: 1}
    assert bool(found.loss.isnan())
    assert all(bool((grad == 0).all()) for grad in found.grads.values())


class Broadcasts(nn.Module):
    """What looks like an idiom but for the shape of a factor."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(32, 32)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s)) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """``(2, 4, 32) → scalar``, through ``(2, 4, 4, 8)``."""
        h = self.first(x).view(2, 4, 4, 8)
        weights = [self.weights[i] for i in range(len(self.weights))]
        return self.function(h, *weights).pow(3).sum()


def rotary_llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
    return x * cos.detach() + turned * sin.detach()


NEARLY: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm, one weight for all": (rms_llama, ((1,),)),
    "rms_norm, no weight's shape": (rms_llama, ((),)),
    "rms_norm, a weight a row": (rms_llama, ((2, 1, 1, 8),)),
    "layer_norm over two dims": (lambda x, w: F.layer_norm(x, (4, 8), w), ((4, 8),)),
    "swiglu, one gate for all": (lambda x, w: F.silu(w) * x, ((8,),)),
    "swiglu, one factor for all": (lambda x, w: F.silu(x) * w, ((8,),)),
    "rotary, tables before heads": (rotary_llama, ((4, 1, 8), (4, 1, 8))),
    "rotary, tables of heads": (rotary_llama, ((4, 4, 8), (4, 4, 8))),
    "rotary, another place": (rotary_llama, ((1, 4, 1, 8), (1, 4, 1, 8))),
    "rotary, two shapes": (rotary_llama, ((2, 1, 4, 8), (1, 1, 4, 8))),
    "rotary, numbers": (rotary_llama, ((1,), (1,))),
}


@pytest.mark.parametrize("name", [*[*NEARLY][::2], *exhaustive(*[*NEARLY][1::2])])
def test_what_broadcasts_is_left_alone_or_right(name: str) -> None:
    """Dims that happen to be equal lead to no other meaning, and no kernel's refusal gets out."""
    function, shapes = NEARLY[name]
    torch.manual_seed(0)
    model, x = Broadcasts(function, *shapes).double(), torch.randn(2, 4, 32).double()
    loss, grads = eager_step(model, x)
    check_equal(compiled_step(model, x, force="all"), loss, grads, 1e-12)


@pytest.mark.parametrize("shape", [(1, 13), *exhaustive(((13,),), ((10, 13),))], ids=str)
def test_a_bias_that_is_none(shape: tuple[int, ...], decomposed: bool) -> None:
    """addmm takes biases that a linear layer does not."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(13, 8))
            self.bias = nn.Parameter(torch.randn(shape))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            return F.cross_entropy(torch.addmm(self.bias, rows, self.weight.t()), target.flatten())

    torch.manual_seed(0)
    model, (x, target) = Adds().double(), head_inputs(5, 8, 13)
    loss, grads = eager_step(model, x, target)
    for kernel in ("linear_cross_entropy", "softmax_cross_entropy"):
        check_equal(compiled_step(model, x, target, force=kernel), loss, grads, 1e-12)


def test_one_idiom_inside_another() -> None:
    """A gate beside a norm: which product is forward's and which backward's is told apart."""

    class Gated(Written):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return (F.silu(h @ self.weights[1]) * rms_llama(h, self.weights[0])).square().sum()

    torch.manual_seed(0)
    model, x = Gated(rms_llama, (8,), (8, 8)).double(), torch.randn(2, 3, 8).double()
    loss, grads = eager_step(model, x)
    found = compiled_step(model, x, force="all")
    assert found.notes == {"rms_norm": 1, "swiglu": 1}
    check_equal(found, loss, grads, 1e-12)


def test_a_number_that_a_trace_rounds() -> None:
    """nn.RMSNorm's eps is in the graph as float32 has it."""
    torch.manual_seed(0)
    model = Written(lambda x, w: F.rms_norm(x, (8,), w, 1e-6), (8,))
    x = torch.randn(2, 3, 8)
    loss, grads = eager_step(model, x)
    found = compiled_step(model, x, force="rms_norm")
    assert found.notes == {"rms_norm": 1}
    check_equal(found, loss, grads, 1e-5)


class Attention(nn.Module):
    """Causal attention with its own scale, over rotated queries."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.settings = settings

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``(2, 6, 16), (1, 6, 8), (1, 6, 8) → scalar``."""
        q, k, v = self.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        q = q * cos.unsqueeze(1) + torch.cat((-q[..., 4:], q[..., :4]), -1) * sin.unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, **self.settings).square().sum()


@pytest.mark.parametrize(
    "settings", [{"is_causal": True}, *exhaustive({}, {"scale": 0.3})], ids=str
)
def test_attention_and_rotary(settings: dict[str, Any], decomposed: bool) -> None:
    torch.manual_seed(0)
    model = Attention(**settings).double()
    angles = torch.randn(1, 6, 8).double()
    inputs = (torch.randn(2, 6, 16).double(), angles.cos(), angles.sin())
    loss, grads = eager_step(model, *inputs)
    found = compiled_step(model, *inputs, force="rotary,flash_attention")
    assert found.notes == {"rotary": 1, "flash_attention": 1}
    check_equal(found, loss, grads, 1e-12)


def test_what_the_graph_says_afterwards() -> None:
    """One node where there were many, stamped with the layer and by the pass."""
    torch.manual_seed(0)
    model = Written(rms_llama, (8,))
    found = compiled_step(model, torch.randn(2, 3, 8), force="rms_norm")
    assert "aten.rsqrt" in found.record.before
    assert "aten.rsqrt" not in found.record.after
    graph = found.compilation.joint
    assert graph is not None
    made = [n for n in graph.nodes() if n.meta["fxzero"].made_by == "lower_kernels"]
    calls = [str(n.target) for n in made if "norm" in str(n.target)]
    assert calls == ["fxzero.norm.default", "fxzero.norm_backward.default"]
    assert [n.meta["fxzero"].phase.value for n in made if "norm" in str(n.target)] == [
        "forward", "backward",
    ]  # fmt: skip
    assert all("stack_trace" in n.meta for n in made)


def test_an_inside_that_others_read_is_left_alone() -> None:
    class Reads(Written):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            return (h * r * self.weights[0]).sum() + r.sum()

    torch.manual_seed(0)
    model, x = Reads(rms_llama, (8,)).double(), torch.randn(2, 3, 8).double()
    loss, grads = eager_step(model, x)
    found = compiled_step(model, x, force="rms_norm")
    assert "rms_norm" not in found.notes
    assert "skipped" in found.notes
    check_equal(found, loss, grads, 1e-12)


def test_a_frozen_weight_and_an_input_without_gradient() -> None:
    torch.manual_seed(0)
    model, x = Written(rms_llama, (8,)).double(), torch.randn(2, 3, 8).double()
    model.weights[0].requires_grad_(False)
    loss, grads = eager_step(model, x)
    found = compiled_step(model, x, force="rms_norm")
    assert found.notes == {"rms_norm": 1}
    check_equal(found, loss, grads, 1e-12)
    model.first.requires_grad_(False)
    model.weights[0].requires_grad_(True)
    loss, grads = eager_step(model, x)
    found = compiled_step(model, x, force="rms_norm")
    assert found.notes == {"rms_norm": 1}
    check_equal(found, loss, grads, 1e-12)


def test_inference() -> None:
    torch.manual_seed(0)
    model, x = Written(rms_llama, (8,)).double(), torch.randn(2, 3, 8).double()
    with torch.no_grad():
        expected = model(x)
        found = compiled_step(model, x, force="all")
    assert found.notes == {"rms_norm": 1}
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=0)


def test_bfloat16_with_casts() -> None:
    """Norms that go through float32, as Llama's do, are found in 16 bits too."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return w * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)

    torch.manual_seed(0)
    model, x = Written(norm, (8,)).bfloat16(), torch.randn(2, 3, 8).bfloat16()
    loss, grads = eager_step(model, x)
    found = compiled_step(model, x, force="rms_norm")
    assert found.notes == {"rms_norm": 1}
    check_equal(found, loss, grads, 4 * 2.0**-8)  # a rounding more or less on the way


def test_whole_steps_of_micro_batches() -> None:
    torch.manual_seed(0)
    model = Head(8, 13).double()
    x, target = head_inputs(6, 8, 13)
    target = target.clamp(min=0)
    loss, grads = eager_step(model, x, target)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"lower_kernels": {"force": "all"}, **EAGER}
    step = fxzero.compile_step(model, optimizer, micro_batches=2, options=options)
    found: list[Compilation] = []
    with observed(found.append):
        out = step(x, target)
    (record,) = (r for c in found for r in c.records if r.name == "lower_kernels")
    assert dict(record.notes) == {"linear_cross_entropy": 1}
    assert abs(float(out.loss - loss)) <= 1e-12 * float(loss)
    for name, parameter in model.named_parameters():
        error = float((before[name] - parameter.detach() - grads[name]).abs().max())
        assert error <= 1e-12 * float(grads[name].abs().max().clamp(min=1))


def test_on_cpu_only_large_logits_are_lowered() -> None:
    torch.manual_seed(0)
    model, (x, target) = Head(8, 13).double(), head_inputs(5, 8, 13)
    assert compiled_step(model, x, target).notes == {}
    large = compiled_step(model, x, target, min_logits_bytes=10 * 13 * 8)
    assert large.notes == {"linear_cross_entropy": 1}
    assert compiled_step(model, x, target, min_logits_bytes=1, enabled=False).notes == {}


def test_the_peak_falls_by_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of the logits and more, measured; the simulator knows of the chunk."""
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_BYTES", 1 << 20)
    torch.manual_seed(0)
    model, classes = Head(32, 4096), 4096
    x, target = torch.randn(2, 512, 32), torch.randint(classes, (2, 512))
    loss, grads = eager_step(model, x, target)
    peaks, simulated = [], []
    for enabled in (False, True):
        found = compiled_step(model, x, target, enabled=enabled, min_logits_bytes=1 << 20)
        check_equal(found, loss, grads, 1e-5)
        graph = found.compilation.joint
        assert graph is not None
        memory = simulate_memory(graph, fuses=False)
        simulated.append(memory.peak_bytes)
        compiled = torch.compile(
            model, backend="fxzero", options={
                "lower_kernels": {"enabled": enabled, "min_logits_bytes": 1 << 20}, **EAGER
            },
        )  # fmt: skip

        def step(compiled: Any = compiled) -> None:
            model.zero_grad()
            compiled(x, target).backward()

        step()
        peaks.append(allocated_peak_bytes(step))
    logits = 1024 * classes * 4
    assert peaks[0] - peaks[1] > 1.5 * logits
    assert simulated[0] - simulated[1] > 1.5 * logits
    chunk = 64 * classes * 4
    held = {(item.name, item.kind): item.num_bytes for item in memory.alive}
    assert held["linear_cross_entropy", Kind.WORKSPACE] == chunk


def test_open_sizes_are_left_alone_and_said() -> None:
    torch.manual_seed(0)
    model, (x, target) = Head(8, 13).double(), head_inputs(5, 8, 13)
    _, grads = eager_step(model, x, target)
    model.zero_grad()
    options = {"lower_kernels": {"force": "all"}, **EAGER}
    torch._dynamo.reset()
    found: list[Compilation] = []
    with observed(found.append):
        compiled = torch.compile(model, backend="fxzero", dynamic=True, options=options)
        compiled(x, target).backward()
    (record,) = (r for c in found for r in c.records if r.name == "lower_kernels")
    assert "symbolic sizes" in str(record.notes["skipped"])
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-12, atol=1e-14)


def write_table(path: Path, kernel: str, kernel_us: float) -> str:
    """A table in which one kernel was measured on one size."""
    row = {"kernel": kernel, "dtype": "float32", "num_bytes": 1000, "kernel_us": kernel_us,
           "compiler_us": 10.0}  # fmt: skip
    path.write_text(json.dumps({"device": "a device", "rows": [row]}))
    return str(path)


def test_a_table_decides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Written(rms_llama, (8,)), torch.randn(2, 3, 8)
    faster = write_table(tmp_path / "faster.json", "rms_norm", 5.0)
    assert compiled_step(model, x, table=faster).notes == {"rms_norm": 1}
    slower = write_table(tmp_path / "slower.json", "rms_norm", 20.0)
    notes = compiled_step(model, x, table=slower).notes
    assert notes == {"skipped": {"rms_norm: no faster": 1}}
    other = write_table(tmp_path / "other.json", "swiglu", 5.0)
    assert compiled_step(model, x, table=other).notes == {}


@pytest.mark.parametrize("text", ["", "[]", '{"device": "x", "rows": [{"kernel": "gelu"}]}'])
def test_a_table_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"lower_kernels\.table=.*cannot be read"):
        compiled_step(Head(8, 13), *head_inputs(5, 8, 13), table=str(path))
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        compiled_step(Head(8, 13), *head_inputs(5, 8, 13), table=str(tmp_path / "nothing"))


def test_an_unknown_kernel() -> None:
    with pytest.raises(ConfigError, match=r"force='rms_nrom'.*did you mean 'rms_norm'"):
        compiled_step(Head(8, 13), *head_inputs(5, 8, 13), force="rms_nrom")
