"""`fxzero.compile_step` in one process: what it computes bit by bit, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import fxzero
from fxzero.regions import region as regions
from fxzero.runtime import updates
from tests.tiers import in_two_tiers
from tests.work import calls

EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}}


class Net(nn.Module):
    """Tied weights, equal layers, dropout, and a buffer that the forward changes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B,) to (B, 11)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden))
        return self.norm(hidden) @ self.embedding.weight.t()


def batches(steps: int = 5, rows: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield tuple(torch.randint(11, (2, rows), generator=generator))  # type: ignore[misc]


def make(width: int = 8) -> Net:
    """The same model every time."""
    torch.manual_seed(0)
    return Net(width)


def fused_adamw(parameters: Any) -> Optimizer:
    """What the graph runs as well."""
    return AdamW(parameters, lr=1e-2, fused=True)


def eager_steps(
    model: nn.Module, optimizer: Optimizer, micro_batches: int, clip: float | None = None
) -> list[Tensor]:
    """The ordinary loop; returns its losses."""
    losses = []
    for tokens, targets in batches():
        parts = zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        of_parts = []
        for part, wanted in parts:
            loss = F.cross_entropy(model(part), wanted)
            (loss / micro_batches).backward()
            of_parts.append(loss.detach())
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(of_parts).mean())
    return losses


def tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All that training changes, by name."""
    found = dict(model.state_dict())
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{i} {name}": value for name, value in state.items()}
    return {name: value.clone() for name, value in found.items()}


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """The warnings that fxzero logs meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxzero").addHandler(handler)
    yield found
    logging.getLogger("fxzero").removeHandler(handler)


@pytest.mark.parametrize(
    ("clip", "micro_batches"),
    in_two_tiers([*product([None, 0.5, math.inf], [1, 4])], always=[(0.5, 1), (None, 4)]),
)
def test_bitwise(clip: float | None, micro_batches: int) -> None:
    """Dropout, running statistics, tied weights, accumulation and clipping, as in the loop."""
    mine, theirs = make(), make()
    optimizer, other = fused_adamw(mine.parameters()), fused_adamw(theirs.parameters())
    step = fxzero.compile_step(
        mine,
        optimizer,
        F.cross_entropy,
        micro_batches=micro_batches,
        clip_grad_norm=clip,
        options=EAGER,
    )
    torch.manual_seed(5)
    losses = [step(*batch).loss for batch in batches()]
    torch.manual_seed(5)
    expected = eager_steps(theirs, other, micro_batches, clip)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert_bitwise(tensors(mine, optimizer), tensors(theirs, other))


@pytest.mark.parametrize("several_graphs", [False, True])
def test_a_norm_is_taken_though_nothing_is_clipped(several_graphs: bool) -> None:
    """An infinite limit, as of torch's clip_grad_norm_; a gradient that is none stops nobody."""
    mine = nn.Linear(3, 2)
    optimizer = SGD(mine.parameters(), lr=0.1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if several_graphs:
            torch._dynamo.graph_break()
        return (output * target).sum()

    step = fxzero.compile_step(mine, optimizer, loss, clip_grad_norm=math.inf, options=EAGER)
    before = mine.weight.detach().clone()
    told = pytest.warns(fxzero.FxZeroWarning) if several_graphs else contextlib.nullcontext()
    with told:
        output = step(torch.ones(4, 3), torch.ones(4, 2))
    gradients = torch.full((2, 3 + 1), 4.0)
    torch.testing.assert_close(output.grad_norm, torch.linalg.vector_norm(gradients))
    torch.testing.assert_close(before - mine.weight, torch.full((2, 3), 0.4))
    assert step(torch.ones(4, 3), torch.full((4, 2), math.nan)).grad_norm.isnan()
    assert mine.weight.isnan().all()


class Shifted(nn.Module):
    """A loss that flattens its targets, as language models' do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(B, T) and (B, T) to a scalar."""
        logits = F.linear(self.embedding(tokens), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_batch_need_not_be_contiguous() -> None:
    """Tokens and targets are usually two views of one text, a column apart."""
    torch.manual_seed(0)
    mine = Shifted()
    theirs = copy.deepcopy(mine)
    optimizer, other = (SGD(m.parameters(), lr=0.1) for m in (mine, theirs))
    step = fxzero.compile_step(mine, optimizer, micro_batches=4, options=EAGER)
    for seed in range(3):
        text = torch.randint(11, (8, 10), generator=torch.Generator().manual_seed(seed))
        tokens, targets = text[:, :-1], text[:, 1:]
        loss = step(tokens, targets).loss
        parts = zip(tokens.chunk(4), targets.chunk(4), strict=True)
        expected = torch.stack([theirs(*part) for part in parts]).mean()
        expected.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(
            mine.embedding.weight, theirs.embedding.weight, rtol=1e-6, atol=1e-7
        )


@pytest.mark.exhaustive
def test_inductor_draws_the_numbers_of_an_eager_run() -> None:
    """Dropout under compiled regions."""
    mine, theirs = make(), make()
    # Not AdamW: biases before a batch norm have gradients of nothing but rounding.
    optimizer, other = (SGD(m.parameters(), lr=0.1) for m in (mine, theirs))
    step = fxzero.compile_step(mine, optimizer, F.cross_entropy, micro_batches=2)
    torch.manual_seed(5)
    losses = [step(*batch).loss for batch in batches()]
    after = torch.rand(1)
    torch.manual_seed(5)
    expected = eager_steps(theirs, other, micro_batches=2)
    assert torch.equal(after, torch.rand(1))
    for a, b in zip(losses, expected, strict=True):
        assert (a - b).abs() <= 1e-5 * b.abs()


def test_stopping_and_coming_back() -> None:
    """Compiled steps, then eager ones, then compiled ones, next to eager ones all along."""
    mine, theirs = make(), make()
    optimizer, other = fused_adamw(mine.parameters()), fused_adamw(theirs.parameters())
    step = fxzero.compile_step(mine, optimizer, F.cross_entropy, options=EAGER)
    torch.manual_seed(5)
    for batch in batches():
        step(*batch)
    eager_steps(mine, optimizer, micro_batches=1)
    for batch in batches():
        step(*batch)
    torch.manual_seed(5)
    for _ in range(3):
        eager_steps(theirs, other, micro_batches=1)
    assert_bitwise(tensors(mine, optimizer), tensors(theirs, other))


def test_a_loaded_optimizer_state_takes_effect() -> None:
    """``load_state_dict`` replaces the tensors that the graph was compiled with."""
    model = make()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, F.cross_entropy, options=EAGER)
    (batch, *_) = batches()
    torch.manual_seed(5)
    step(*batch)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(*batch)
    expected = tensors(model, optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    torch.manual_seed(5)
    model.embedding(batch[0])
    for _ in range(3):
        model.dropout(torch.empty(8, 8))  # what the first step drew
    step(*batch)
    assert_bitwise(tensors(model, optimizer), expected)


def test_cleared_optimizer_state_begins_afresh() -> None:
    """As the optimizer itself would."""
    model = make()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, F.cross_entropy, options=EAGER)
    for batch in batches(steps=2):
        step(*batch)
    optimizer.state.clear()
    step(*batch)
    assert {s["step"].item() for s in optimizer.state.values()} == {1.0}


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: LambdaLR(o, lambda i: 1 / (i + 1)),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
    ],
)
def test_schedules_do_not_recompile(
    make_scheduler: Callable[[Optimizer], Any], notes: list[str]
) -> None:
    """Not even one that changes betas from step to step."""
    mine, theirs = make(), make()
    optimizer, other = fused_adamw(mine.parameters()), fused_adamw(theirs.parameters())
    scheduler, other_scheduler = make_scheduler(optimizer), make_scheduler(other)
    step = fxzero.compile_step(mine, optimizer, F.cross_entropy, scheduler=scheduler, options=EAGER)
    torch.manual_seed(5)
    rates = [step(*batch).learning_rate for batch in batches()]
    assert not notes
    assert len(set(rates)) == 5
    torch.manual_seed(5)
    for i, (tokens, targets) in enumerate(batches()):
        assert rates[i] == other.param_groups[0]["lr"]
        F.cross_entropy(theirs(tokens), targets).backward()
        other.step()
        other.zero_grad()
        other_scheduler.step()
    assert_bitwise(tensors(mine, optimizer), tensors(theirs, other))


class Scaled(nn.Module):
    """Reads a number that somebody may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a loss."""
        return self.layer(x).square().mean() * self.scale


def test_equal_shapes_are_not_blamed(notes: list[str]) -> None:
    model = Scaled()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, options=EAGER)
    step(torch.ones(2, 4))
    model.scale = 2.0
    step(torch.ones(2, 4))
    assert "something else that forward reads has changed" in notes.pop()


def test_what_recompiles_says_so(notes: list[str]) -> None:
    """A new shape, and a parameter that is frozen: both take effect, with a note."""
    model = make()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, F.cross_entropy, options=EAGER)
    step(*next(batches(rows=8)))
    step(*next(batches(rows=6)))
    assert "compiles again: inputs [6]" in notes.pop()
    model.layers[0][0].weight.requires_grad_(False)
    before = model.layers[0][0].weight.clone()
    step(*next(batches(rows=6)))
    assert "requires_grad of layers.0.0.weight has changed" in notes.pop()
    assert torch.equal(model.layers[0][0].weight, before)


def test_a_note_on_eval_mode() -> None:
    """Dynamo guards on the mode: no dropout and no new statistics under ``eval()``."""
    model = make()
    step = fxzero.compile_step(
        model, SGD(model.parameters(), lr=0.0), F.cross_entropy, options=EAGER
    )
    batch = next(batches())
    step(*batch)
    model.eval()
    statistics = model.norm.running_mean.clone()
    assert torch.equal(step(*batch).loss, step(*batch).loss)
    assert torch.equal(model.norm.running_mean, statistics)


class Strange(nn.Module):
    """A linear layer that returns something else than its result."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        """(B, 4) to what it was told."""
        y = self.layer(x)
        match self.what:
            case "vector":
                return y
            case "two":
                return y.sum(), y.mean()
            case "number":
                return 3.0
            case "detached":
                return y.detach().sum()
            case "dictionary":
                return {"loss": y.sum(), "logits": y}
            case "break":
                torch._dynamo.graph_break()
        return y.sum()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("vector", r"must be a scalar tensor, found one of shape \[2, 4\]"),
        ("two", "computes 2 tensors"),
        ("number", "no tensor"),
        ("detached", "depends on no parameter"),
        ("break", "one graph"),
    ],
)
def test_no_loss(what: str, message: str) -> None:
    """What cannot be one graph of one scalar is refused, and nothing changes."""
    model = Strange(what)
    optimizer = fused_adamw(model.parameters())
    before = tensors(model, optimizer)
    step = fxzero.compile_step(model, optimizer, options={**EAGER, "strict": True})
    with pytest.raises(fxzero.CaptureError, match=message):
        step(torch.randn(2, 4))
    assert_bitwise(tensors(model, optimizer), before)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long)),
            "do not divide by 4",
        ),
        ((torch.zeros(8, dtype=torch.long), torch.zeros(4, dtype=torch.long)), "differ in dim 0"),
        ((torch.zeros(8, dtype=torch.long),), r"step\(\*inputs, target\)"),
    ],
)
def test_bad_batches(batch: tuple[Tensor, ...], message: str) -> None:
    """Refused before anything runs."""
    model = make()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, F.cross_entropy, micro_batches=4, options=EAGER)
    before = tensors(model, optimizer)
    with pytest.raises(fxzero.BatchError, match=message):
        step(*batch)
    assert_bitwise(tensors(model, optimizer), before)


def test_a_batch_that_wants_a_gradient() -> None:
    """It would get none."""
    model = Root()
    step = fxzero.compile_step(model, fused_adamw(model.parameters()), options=EAGER)
    with pytest.raises(fxzero.BatchError, match=r"\[8, 4\] in the batch requires a gradient"):
        step(torch.randn(8, 4, requires_grad=True))


def test_an_optimizer_over_other_parameters() -> None:
    """Made for another model."""
    with pytest.raises(fxzero.ConfigError, match="15 parameters that are not the model's"):
        fxzero.compile_step(make(), fused_adamw(make().parameters()), F.cross_entropy)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batches": True}, "micro_batches=True"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"options": {"prefech": {}}}, "did you mean 'prefetch'"),
        (
            {"precision": fxzero.Precision(torch.bfloat16, hysteresis=1)},
            "hysteresis=1 has no effect",
        ),
        (
            {"precision": fxzero.Precision(torch.bfloat16, fp32_modules=("BatchNorm2d",))},
            "BatchNorm1d",
        ),
    ],
)
def test_bad_settings(setting: dict[str, Any], message: str) -> None:
    """Refused when the step is made."""
    model = make()
    with pytest.raises(fxzero.ConfigError, match=message):
        fxzero.compile_step(model, fused_adamw(model.parameters()), F.cross_entropy, **setting)


def test_bad_schedulers() -> None:
    """One that wants a metric, and one of another optimizer."""
    model = make()
    optimizer, other = fused_adamw(model.parameters()), fused_adamw(model.parameters())
    for scheduler, message in (
        (ReduceLROnPlateau(optimizer), "needs a metric"),
        (LambdaLR(other, lambda i: 1.0), "another optimizer"),
    ):
        with pytest.raises(fxzero.ConfigError, match=message):
            fxzero.compile_step(model, optimizer, F.cross_entropy, scheduler=scheduler)


def test_an_optimizer_that_evaluates_the_loss_itself() -> None:
    """L-BFGS is no single step."""
    model = make()
    with pytest.raises(fxzero.CaptureError, match="LBFGS wants to evaluate the loss"):
        fxzero.compile_step(model, torch.optim.LBFGS(model.parameters()), F.cross_entropy)


def test_gradients_left_by_a_loop() -> None:
    """Neither used nor dropped in silence."""
    model = make()
    step = fxzero.compile_step(model, fused_adamw(model.parameters()), F.cross_entropy)
    tokens, targets = next(batches())
    F.cross_entropy(model(tokens), targets).backward()
    with pytest.raises(fxzero.ConfigError, match=r"embedding.weight has a .grad"):
        step(tokens, targets)


class Root(nn.Module):
    """A model with one parameter whose gradient becomes infinite when it is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.root = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        return self.norm(self.layer(x)).square().mean() + self.root.sqrt()


def test_stopping_at_a_gradient_that_is_not_finite() -> None:
    """By name, with nothing changed; running statistics included."""
    model = Root()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, options={**EAGER, "stop_unless_finite": True})
    step(torch.randn(8, 4))
    with torch.no_grad():
        model.root.zero_()
    before = tensors(model, optimizer)
    with pytest.raises(fxzero.NonFiniteGradientError, match=r"gradient of root is infinite"):
        step(torch.randn(8, 4))
    assert_bitwise(tensors(model, optimizer), before)


def test_hooks_on_gradients_are_refused() -> None:
    """The graph would not run them."""
    model = Root()
    step = fxzero.compile_step(model, fused_adamw(model.parameters()), options=EAGER)
    model.layer.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(fxzero.ConfigError, match=r"layer.weight has a gradient hook"):
        step(torch.randn(8, 4))


@pytest.mark.parametrize("name", ["stop_unless_finite", "cuda_graph"])
def test_settings_of_whole_steps_mean_nothing_under_torch_compile(name: str) -> None:
    """Said, and an error under ``strict``."""
    options = {**EAGER, name: True, "strict": True}
    model = torch.compile(nn.Linear(2, 2), backend="fxzero", options=options)
    with pytest.raises(fxzero.ConfigError, match=f"{name} has no effect"):
        model(torch.randn(1, 2))


def test_stopping_means_nothing_in_fp16() -> None:
    """Such steps are skipped; said once, when the step is compiled."""
    model = nn.Linear(4, 1)
    step = fxzero.compile_step(
        model,
        fused_adamw(model.parameters()),
        F.mse_loss,
        precision="fp16",
        options={**EAGER, "stop_unless_finite": True},
    )
    with pytest.warns(fxzero.FxZeroWarning, match="stop_unless_finite has no effect in fp16"):
        step(torch.randn(2, 4), torch.randn(2, 1))


def test_cuda_graphs_on_cpu() -> None:
    """Said, and training goes on."""
    model = Root()
    step = fxzero.compile_step(
        model, fused_adamw(model.parameters()), options={**EAGER, "cuda_graph": True}
    )
    with pytest.warns(fxzero.FxZeroWarning, match="cuda_graph has no effect: the step has .* cpu"):
        step(torch.randn(8, 4))


class Strided(nn.Module):
    """Parameters whose gradients come in another layout than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(3, 4, 5))
        self.offset = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 5) to a scalar."""
        return torch.einsum("bi,hki->bhk", x, self.mixing).square().mean() + self.offset.sum()


@pytest.mark.parametrize(
    ("kind", "clip", "micro_batches"),
    in_two_tiers([*product([AdamW, SGD, torch.optim.RMSprop], [None, 0.1], [1, 2])]),
)
def test_layouts_of_gradients(
    kind: Callable[..., Optimizer], clip: float | None, micro_batches: int
) -> None:
    """Transposed and expanded: fused kernels walk through memory."""
    torch.manual_seed(0)
    mine = Strided().double()
    theirs = copy.deepcopy(mine)
    optimizer, other = (kind(m.parameters(), lr=0.01) for m in (mine, theirs))
    step = fxzero.compile_step(
        mine, optimizer, micro_batches=micro_batches, clip_grad_norm=clip, options=EAGER
    )
    for _ in range(3):
        x = torch.randn(8, 5, dtype=torch.float64)
        step(x)
        for part in x.chunk(micro_batches):
            (theirs(part) / micro_batches).backward()
        if clip is not None:
            clip_grad_norm_(theirs.parameters(), clip)
        other.step()
        other.zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


class ReadsAhead(nn.Module):
    """Its first layer reads the value of the second one's weight, in backward as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a scalar."""
        hidden = self.first(x) @ self.second.weight.detach()
        return self.second(hidden.tanh()).square().sum()


def test_a_parameter_that_backward_reads_after_its_gradient() -> None:
    """Its update waits for the last reader, be it of another layer."""
    torch.manual_seed(0)
    mine = ReadsAhead().double()
    theirs = copy.deepcopy(mine)
    optimizer, other = (SGD(m.parameters(), lr=0.1) for m in (mine, theirs))
    step = fxzero.compile_step(mine, optimizer, options=EAGER)
    for _ in range(3):
        x = torch.randn(4, 4, dtype=torch.float64)
        step(x)
        theirs(x).backward()
        other.step()
        other.zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_it_ends_with_its_last_reference() -> None:
    """Model, optimizer and graphs are free to go."""
    model = Root()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, options=EAGER)
    step(torch.randn(8, 4))
    alive = [weakref.ref(each) for each in (model, optimizer, step, model.layer.weight)]
    del model, optimizer, step
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def test_too_many_shapes() -> None:
    """Said with what to do."""
    model = Root()
    step = fxzero.compile_step(model, fused_adamw(model.parameters()), options=EAGER)
    for rows in range(2, 10):
        step(torch.randn(rows, 4))
    with pytest.raises(fxzero.CaptureError, match="Pad batches to a few shapes"):
        step(torch.randn(10, 4))


def test_what_cannot_be_split() -> None:
    """Every micro-batch would see all of it."""
    model = make()
    step = fxzero.compile_step(
        model, fused_adamw(model.parameters()), F.cross_entropy, micro_batches=2, options=EAGER
    )
    tokens, targets = next(batches())
    with pytest.raises(fxzero.BatchError, match=r"cannot split .*, a ndarray"):
        step(tokens, targets, extra=targets.numpy())


def test_sparse_gradients() -> None:
    """Named."""
    model = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 11))
    step = fxzero.compile_step(model, SGD(model.parameters()), F.cross_entropy, options=EAGER)
    with pytest.raises(fxzero.CaptureError, match=r"gradient of 0\.weight is sparse"):
        step(*next(batches()))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_embedding_that_renormalises_is_refused(micro_batches: int) -> None:
    """It writes to its weight in the forward; the message says where, and what to do."""
    model = nn.Sequential(nn.Embedding(11, 4, max_norm=1.0), nn.Linear(4, 4))
    step = fxzero.compile_step(
        model,
        fused_adamw(model.parameters()),
        lambda output, _: output.square().mean(),
        options=EAGER,
        micro_batches=micro_batches,
    )
    tokens = torch.arange(8)
    message = r"changes the parameter 0\.weight in place.*max_norm.*ordinary loop.*renorm_\("
    with pytest.raises(fxzero.CaptureError, match=message):
        step(tokens, tokens)


def test_hooks_that_come_later(notes: list[str]) -> None:
    """Of modules and of the optimizer: from the next step on they run."""
    model = Root()
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer, options=EAGER)
    x = torch.randn(8, 4)
    step(x)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("optimizer"))
    model.layer.register_forward_hook(lambda module, inputs, output: output * 0)
    root = model.root.detach().sqrt()
    bias = model.norm.bias.detach().square().mean()
    assert torch.allclose(step(x).loss, root + bias)
    assert calls == ["optimizer"]
    assert any("hooks were added" in note for note in notes)


def test_a_parameter_group_that_comes_later(notes: list[str]) -> None:
    """From the next step on it is trained."""
    model = Root()
    optimizer = fused_adamw(model.layer.parameters())
    step = fxzero.compile_step(model, optimizer, options=EAGER)
    step(torch.randn(8, 4))
    assert "no gradient of norm.weight, norm.bias, root: not in the optimizer" in notes.pop(0)
    assert model.root.item() == 1.0
    optimizer.add_param_group({"params": [model.root], "lr": 0.1})
    step(torch.randn(8, 4))
    assert "parameter groups have changed" in notes[0]
    assert model.root.item() < 1.0


def test_a_replaced_parameter() -> None:
    """The optimizer would update the old one."""
    model = Root()
    step = fxzero.compile_step(model, fused_adamw(model.parameters()), options=EAGER)
    step(torch.randn(8, 4))
    model.root = nn.Parameter(torch.ones(()))
    with pytest.raises(fxzero.ConfigError, match="parameter root is another object"):
        step(torch.randn(8, 4))


def test_hooks_of_the_optimizer_run() -> None:
    """Somebody who hooks into ``step()`` gets it."""
    model = make()
    optimizer = fused_adamw(model.parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    step = fxzero.compile_step(model, optimizer, F.cross_entropy, options=EAGER)
    for batch in batches(steps=3):
        step(*batch)
    assert len(calls) == 3


LOSS_SCALES: list[tuple[str, bool, list[int]]] = [
    ("000000000000", False, [16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64]),
    ("100000000000", False, [16, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64]),
    ("110000000000", False, [16, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32]),
    ("000001000011", False, [16, 16, 16, 16, 32, 32, 32, 32, 32, 32, 16, 8]),
    ("101000011010", False, [16, 16, 8, 8, 8, 8, 8, 4, 2, 2, 1, 1]),
    ("000001000011", True, [16, 16, 16, 16, 32, 32, 32, 32, 32, 32, 32, 16]),
    ("101000011010", True, [16, 16, 16, 16, 16, 16, 16, 16, 8, 8, 8, 8]),
]
"""Overflows, consecutive_hysteresis, and the scale behind each step by DeepSpeed 0.19.8's
``DynamicLossScaler(init_scale=16, scale_window=4, min_scale=1, delayed_shift=2)``."""


class TestLossScale:
    """The meaning of DeepSpeed's fields."""

    def scale(self, **fields: Any) -> Any:
        """A loss scale by its rule."""
        from fxzero.sharding.precision import LossScale

        return LossScale(fxzero.Precision(torch.float16, **fields))

    def test_halving_after_hysteresis(self) -> None:
        """The first overflow only skips."""
        scale = self.scale(hysteresis=2)
        values = []
        for overflow in (True, True, True, False):
            scale.update(overflow)
            values.append(scale.value)
        assert values == [2.0**16, 2.0**15, 2.0**14, 2.0**14]

    def test_doubling_after_a_window(self) -> None:
        """Of steps without overflow, counted from the last one."""
        scale = self.scale(loss_scale_window=3, hysteresis=1, initial_scale_power=4)
        values = []
        for overflow in (False, False, True, False, False, False, False, False):
            scale.update(overflow)
            values.append(scale.value)
        assert values == [16, 16, 8, 8, 8, 8, 16, 16]

    @pytest.mark.parametrize(("overflows", "consecutive", "expected"), LOSS_SCALES)
    def test_the_sequences_of_deepspeed(
        self, overflows: str, consecutive: bool, expected: list[int]
    ) -> None:
        """Of its scale and its hysteresis, step by step."""
        scale = self.scale(
            loss_scale_window=4,
            hysteresis=2,
            consecutive_hysteresis=consecutive,
            initial_scale_power=4,
        )
        values = []
        for overflow in overflows:
            scale.update(overflow == "1")
            values.append(scale.value)
        assert values == expected

    def test_the_minimum_is_an_error(self) -> None:
        """A run that overflows at the smallest scale is broken."""
        scale = self.scale(min_loss_scale=4.0, initial_scale_power=3, hysteresis=1)
        scale.update(True)
        assert scale.value == 4.0
        with pytest.raises(fxzero.NonFiniteGradientError, match="its minimum"):
            scale.update(True)

    def test_a_fixed_scale(self) -> None:
        """Never moves."""
        scale = self.scale(loss_scale=128.0)
        for overflow in (True, True, False):
            scale.update(overflow)
        assert scale.value == 128.0

    def test_saving(self) -> None:
        """A loaded scale goes on like the saved one."""
        first, second = self.scale(hysteresis=2), self.scale(hysteresis=2)
        first.update(True)
        second.load_state_dict(first.state_dict())
        first.update(True)
        second.update(True)
        assert first.state_dict() == second.state_dict()
        with pytest.raises(fxzero.ConfigError, match="loss scale's state"):
            second.load_state_dict({"scale": 1})


def test_modules_that_stay_in_fp32() -> None:
    """By name of their class; what they are fed and what they give is cast."""
    seen: dict[str, torch.dtype] = {}

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            seen["input"], seen["weight"] = x.dtype, self.weight.dtype
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Norm(4), nn.Linear(4, 4))
    precision = fxzero.Precision(torch.bfloat16, fp32_modules=("Norm",))
    step = fxzero.compile_step(
        model,
        fused_adamw(model.parameters()),
        lambda output, target: seen.update(loss=output.dtype) or F.mse_loss(output, target),
        precision=precision,
        options=EAGER,
    )
    step(torch.randn(2, 4), torch.randn(2, 4))
    assert seen == {"input": torch.float32, "weight": torch.float32, "loss": torch.float32}
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.exhaustive
def test_python_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compute taken out: what a step calls beside its kernels."""
    few, many = (calls_of_a_step(layers, monkeypatch) for layers in (2, 6))
    # 291 a layer and 507 a step with torch 2.13: a millisecond of a GPT of twelve layers.
    assert many - few <= 4 * 400
    assert few <= 1500


def calls_of_a_step(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many functions a step of a GPT calls, when its regions and updates compute nothing."""
    from examples.models import gpt_bench

    torch._dynamo.reset()
    model = gpt_bench(
        num_layers=num_layers, num_heads=2, hidden=8, vocab_size=16, block_size=4, dropout=0.0
    )
    optimizer = fused_adamw(model.parameters())
    step = fxzero.compile_step(model, optimizer)
    tokens = torch.randint(16, (1, 4))
    with regions.regions_to_look_at():  # what they compute is replayed below
        for _ in range(3):
            step(tokens, tokens)
    outputs: dict[int, Any] = {}

    def replay(self: regions.Region, *inputs: Tensor) -> Any:
        if id(self) not in outputs:
            outputs[id(self)] = self.structure(list(inputs))
        return outputs[id(self)]

    with monkeypatch.context() as patch:
        patch.setattr(regions.Region, "__call__", replay)
        for name in ("_foreach_add_", "_fused_adamw_"):
            patch.setattr(updates.torch, name, lambda *_, **__: None)
        step(tokens, tokens)
        return calls(lambda: step(tokens, tokens))


@pytest.mark.parametrize("said_to", ["shard", "step"])
def test_a_low_precision_model_is_evaluated_in_one_process(said_to: str) -> None:
    """Its inputs were cast, and its weights were not: eager code read the masters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if said_to == "shard":
        fxzero.shard(model, param_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"lower_regions": {"backend": "eager"}}
    step = fxzero.compile_step(model, optimizer, F.mse_loss, precision="bf16", options=options)
    step(torch.ones(4, 4), torch.ones(4, 1))
    output = model(torch.ones(4, 4))
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
