"""Forwards that compilers stumble over: both doors give eager's numbers, or say what to change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fxzero
from fxzero.compiler.compilation import Compilation
from tests.parity.harness import Pools
from tests.tiers import in_two_tiers
from tests.tracing import observed

EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}}
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → a loss."""
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Reentrant(Checkpointed):
    """The older kind of checkpoint."""

    reentrant = True


class Teacher(nn.Module):
    """A moving average of the parameters, updated by name where they lie, after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.ModuleDict({"l": nn.Linear(8, 8)})
        self.teacher = nn.ModuleDict({"l": nn.Linear(8, 8)}).requires_grad_(False)

    def update(self) -> None:
        """Move the average."""
        teacher = dict(self.teacher.named_parameters())
        with torch.no_grad():
            for name, parameter in self.student.named_parameters():
                teacher[name].mul_(0.9).add_(parameter, alpha=0.1)

    def loss(self, x: Tensor) -> Tensor:
        """How far the student is from the teacher."""
        return (self.student["l"](x) - self.teacher["l"](x)).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → a loss."""
        loss = self.loss(x)
        self.update()
        return loss


class TeacherReadAfter(Teacher):
    """Read with its old value and with its new one."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → a loss."""
        before = self.teacher["l"](x).mean()
        self.update()
        return self.loss(x) + before * self.student["l"](x).mean()


class AverageInBuffer(nn.Module):
    """A moving average that lives in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → a loss."""
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.linear.weight, alpha=0.1)
        return F.linear(self.linear(x), self.average).square().mean()


class Convolutions(nn.Module):
    """Parameters whose elements do not lie in the order of their dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.head = nn.Parameter(torch.randn(6, 4).t())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4, 5, 5) → a loss."""
        for layer in self.layers:
            x = layer(x).tanh()
        return (x.mean((2, 3)) @ self.head).square().mean()


class Masked(nn.Module):
    """How many elements a mask leaves is known when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → a loss."""
        return self.linear(x)[x > 0].square().mean()


def rows() -> Tensor:
    """A batch: the same on all ranks, so that one process trains alike."""
    return torch.randn(4, 8, dtype=torch.float64)


def images() -> Tensor:
    """A batch of images in channels_last."""
    x = torch.randn(4, 4, 5, 5, dtype=torch.float64)
    return x.to(memory_format=torch.channels_last)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "checkpoint": (Checkpointed, rows),
    "reentrant": (Reentrant, rows),
    "teacher": (Teacher, rows),
    "teacher read after": (TeacherReadAfter, rows),
    "average": (AverageInBuffer, rows),
    "convolutions": (Convolutions, images),
    "mask": (Masked, rows),
}


def train(name: str, zero: int, door: str, anomaly: bool, settings: dict[str, Any]) -> None:
    """Job: three steps of AdamW, compared with eager's on one process."""
    make, batch = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected, model = make().double(), make().double()
    model.load_state_dict(expected.state_dict())
    fxzero.shard(model, zero=zero)
    theirs, mine = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (expected, model))
    compiled: Any
    if door == "loop":
        compiled = torch.compile(model, backend="fxzero", options=EAGER)
    else:
        compiled = fxzero.compile_step(model, mine, options=EAGER, **settings)
    for _ in range(3):
        x = batch()
        theirs.zero_grad()
        loss = expected(x)
        loss.backward()
        theirs.step()
        with torch.autograd.set_detect_anomaly(anomaly):
            if door == "loop":
                mine.zero_grad()
                found = compiled(x)
                found.backward()
                mine.step()
            else:
                found = compiled(x).loss
        assert_close(found.detach(), loss.detach(), **TIGHT)
    state = expected.state_dict()
    for key, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert_close(full, state[key], **TIGHT)


both_doors = pytest.mark.parametrize("door", ["loop", "step"])


NAMES = ["checkpoint", "reentrant", "teacher", "average", "convolutions", "mask"]


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("name", "door", "zero"),
    in_two_tiers([*itertools.product(NAMES, ("loop", "step"), (0, 3))]),
)
def test_eagers_numbers(ranks: Pools, world: int, name: str, zero: int, door: str) -> None:
    """Losses, parameters and buffers of three steps."""
    ranks(world).run(train, name, zero, door, False, {})


@pytest.mark.parametrize("world", [2])
def test_gradients_whose_strides_a_graph_does_not_know(ranks: Pools, world: int) -> None:
    """A convolution's backward on a micro-batch chooses other strides than its fake kernel."""
    settings = {"micro_batches": 2, "clip_grad_norm": 1e9}
    ranks(world).run(train, "convolutions", 3, "step", False, settings)


@pytest.mark.parametrize("world", [2])
@both_doors
def test_anomaly_mode(ranks: Pools, world: int, door: str) -> None:
    """Autograd looks for NaNs in DTensors, too."""
    ranks(world).run(train, "checkpoint", 3, door, True, {})


@pytest.mark.parametrize("world", [2])
@both_doors
def test_a_parameter_read_before_and_after_its_change(ranks: Pools, world: int, door: str) -> None:
    """Stage 0 reads it with both values."""
    ranks(world).run(train, "teacher read after", 0, door, False, {})


def refused(zero: int, door: str) -> str:
    """Job: the message."""
    with pytest.raises(fxzero.CaptureError) as caught:
        train("teacher read after", zero, door, False, {})
    return str(caught.value)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("zero", [1, 3])
@both_doors
def test_a_shard_read_after_its_change_is_refused(
    ranks: Pools, world: int, zero: int, door: str
) -> None:
    """On all ranks, with the parameter and the line."""
    for message in ranks(world).run(refused, zero, door):
        assert "changes the parameter teacher.l." in message
        assert "add_(parameter, alpha=0.1)" in message


def sparse(zero: int, door: str) -> str:
    """Job: the message."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8))
    fxzero.shard(model, zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 10, (4, 3))

    def loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    def train() -> None:
        if door == "loop":
            compiled = torch.compile(model, backend="fxzero", options=EAGER)
            loss(compiled(tokens), tokens).backward()
        else:
            fxzero.compile_step(model, optimizer, loss, options=EAGER)(tokens, tokens)

    with pytest.raises(fxzero.CaptureError) as caught:
        train()
    return str(caught.value)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("zero", [0, 3])
@both_doors
def test_sparse_gradients_are_refused_by_name(
    ranks: Pools, world: int, zero: int, door: str
) -> None:
    """Ranks exchange dense gradients."""
    for message in ranks(world).run(sparse, zero, door):
        assert "the gradient of 0.weight is sparse" in message
        assert "sparse=False" in message


class Mixer(nn.Module):
    """A layer over two dims that change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8) → (B, T, 8)."""
        attended = F.scaled_dot_product_attention(x, x, x)
        return x + self.down(F.gelu(self.up(self.norm(x + attended))))


def count_graphs(zero: int, which: str) -> int:
    """Job: train on ten batches of different sizes, compare, and count compilations."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected, model = (nn.Sequential(*(Mixer() for _ in range(2))).double() for _ in range(2))
    model.load_state_dict(expected.state_dict())
    fxzero.shard(model, zero=zero)
    compiled = torch.compile(model, backend="fxzero", dynamic=True, options=EAGER)
    found: list[Compilation] = []
    with observed(found.append):
        for i in range(10):
            shape = (2 + i, 5) if which == "batch" else (2, 5 + 3 * i)
            x = torch.randn(*shape, 8, dtype=torch.float64)
            for each, call in ((expected, expected), (model, compiled)):
                each.zero_grad()
                call(x).square().mean().backward()
            for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
                assert_close(grad, theirs.grad, **TIGHT)
    return len(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world", "zero", "which"),
    [(1, 0, "sequence"), (1, 0, "batch"), (1, 3, "sequence"), (2, 0, "sequence"), (2, 3, "batch")],
)
def test_ten_sizes_are_two_graphs_at_most(ranks: Pools, world: int, zero: int, which: str) -> None:
    """Costs are computed with the sizes at hand, and nobody asks what a symbol is."""
    for graphs in ranks(world).run(count_graphs, zero, which):
        assert 1 <= graphs <= 2
