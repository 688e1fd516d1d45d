"""Tiny models, each with one thing that is easy to get wrong.

An `Example` is a model, its batches and its loss. Rows of a batch are independent (but
for the convnet's batch norm) and the loss is their mean, so the mean over ranks of the
losses of equal parts is the loss of the whole batch.

No parameter's gradient is zero but for rounding (a bias before a normalisation, the bias
of attention's keys): AdamW would turn that rounding into steps of full size, and the
comparison into one of noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]

HIDDEN = 16
VOCABULARY = 24
CONTEXT = 6


@dataclass(frozen=True)
class Example:
    """A model with batches for it and a loss."""

    name: str
    build: Callable[[], nn.Module]
    """A fresh float32 model; its values follow torch's global seed."""
    make_batch: Callable[[int, int], Batch]
    """(rows, seed) to a float64 batch; dim 0 of every tensor is the row."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """The mean over the rows."""


def regression_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of ``model(x)``, in the dtype of the targets.

    torch 2.11 cannot differentiate it where the two dtypes differ, in eager mode either.
    """
    return F.mse_loss(model(batch["x"]).to(batch["y"].dtype), batch["y"])


def masked_regression_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of a model that takes its dropout mask as an argument."""
    return F.mse_loss(model(batch["x"], batch["mask"]), batch["y"])


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of ``model(tokens)``."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def vectors(rows: int, seed: int) -> Batch:
    """Inputs of 8 features, targets of 4."""
    return _normal(rows, seed, x=(8,), y=(4,))


def sequences(rows: int, seed: int) -> Batch:
    """Inputs of `CONTEXT` steps with 8 features, targets of 4."""
    return _normal(rows, seed, x=(CONTEXT, 8), y=(4,))


def images(rows: int, seed: int) -> Batch:
    """Inputs of 3 x 8 x 8, targets of 4."""
    return _normal(rows, seed, x=(3, 8, 8), y=(4,))


def maps(rows: int, seed: int) -> Batch:
    """Inputs of 3 x 8 x 8, targets of 2 x 8 x 8."""
    return _normal(rows, seed, x=(3, 8, 8), y=(2, 8, 8))


def masked_vectors(rows: int, seed: int) -> Batch:
    """As `vectors`, with a dropout mask of 0 and 2 for each hidden feature of each row."""
    batch = _normal(rows, seed, x=(8,), y=(4,), mask=(HIDDEN,))
    return {**batch, "mask": (batch["mask"] > 0).double() * 2}


def tokens(rows: int, seed: int) -> Batch:
    """Token ids and the ids that follow them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def _normal(rows: int, seed: int, **shapes: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((rows, *shape), generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def mlp() -> nn.Sequential:
    """Three linear layers, every parameter used once."""
    return nn.Sequential(
        nn.Linear(8, 2 * HIDDEN), nn.Tanh(), nn.Linear(2 * HIDDEN, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, 4),
    )  # fmt: skip


class Block(nn.Module):
    """A transformer layer of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp_norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, time, hidden) to the same."""
        query, key, value = (
            part.unflatten(-1, (2, HIDDEN // 2)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class TiedGPT(nn.Module):
    """Two layers; one parameter is both the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Parameter(torch.randn(CONTEXT, HIDDEN) / 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.25)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """(rows, time) token ids to (rows, time, vocabulary) logits."""
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def convnet() -> nn.Sequential:
    """Batch norm: statistics of one rank's rows, buffers that a step changes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU(),
        nn.Conv2d(8, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6), nn.GELU(),
        nn.Flatten(), nn.Linear(54, 4),
    )  # fmt: skip


class Head(nn.Module):
    """A linear layer with a `forward` of its own, which Dynamo can compile by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to (rows, 4)."""
        return self.linear(torch.sin(x))


class LSTM(nn.Module):
    """torch's LSTM: Dynamo leaves its caller to eager mode, and compiles the head.

    It also keeps a list of its parameters beside its attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, HIDDEN, num_layers=2, batch_first=True)
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        """(rows, time, 8) to (rows, 4)."""
        hidden, _ = self.lstm(x)
        return self.head(hidden[:, -1])


class Cell(nn.Module):
    """A gated recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8 + HIDDEN, HIDDEN)
        self.candidate = nn.Linear(8 + HIDDEN, HIDDEN)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """One time step."""
        joined = torch.cat([x, state], dim=-1)
        gate = torch.sigmoid(self.gate(joined))
        return gate * state + (1 - gate) * torch.tanh(self.candidate(joined))


class RecurrentLoop(nn.Module):
    """A Python loop over time: the same cell's parameters are used at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, time, 8) to (rows, 4)."""
        state = x.new_zeros(x.shape[0], HIDDEN)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class OddShapes(nn.Module):
    """Rows that no world divides, fewer rows than ranks, no rows at all, no use at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 13)
        self.shared = nn.Linear(13, 13)
        self.narrow = nn.Linear(13, 1)
        self.wide = nn.Parameter(torch.randn(2, 13) / 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 8) to (rows, 4)."""
        x = torch.tanh(self.up(x))
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))) * self.scale)
        features = torch.cat([x, self.narrow(x), x @ self.wide.t()], dim=-1)
        return self.head(features)


def frozen() -> nn.Sequential:
    """A frozen layer between trainable ones, a frozen first layer, a frozen bias."""
    model = nn.Sequential(
        nn.Linear(8, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4),
    )  # fmt: skip
    for name in ("0.weight", "0.bias", "4.weight", "4.bias", "6.bias"):
        model.get_parameter(name).requires_grad_(False)
    return model


class FixedDropout(nn.Module):
    """Dropout whose masks are a buffer and an argument, so that every rank has its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)
        self.register_buffer("kept", torch.tensor([2.0, 0.0] * (HIDDEN // 2)))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(rows, 8) and (rows, hidden) to (rows, 4)."""
        x = torch.tanh(self.up(x)) * mask
        return self.head(torch.tanh(self.middle(x)) * self.kept)


class GraphBreak(nn.Module):
    """Two graphs, and a parameter that both of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, HIDDEN)
        self.both_sides = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 8) to (rows, 4)."""
        x = torch.tanh(self.both_sides(torch.tanh(self.up(x))))
        torch._dynamo.graph_break()
        return self.head(torch.tanh(self.both_sides(x)))


class UNet(nn.Module):
    """Skip connections: activations of the first layers live until the last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3, 8, 8) to (rows, 2, 8, 8)."""
        top = torch.tanh(self.enter(x))
        middle = torch.tanh(self.down(top))
        bottom = torch.tanh(self.bottom(middle))
        up = torch.tanh(self.up(torch.cat([bottom, middle], dim=1)))
        return self.leave(torch.cat([up, top], dim=1))


EXAMPLES = {
    example.name: example
    for example in (
        Example("mlp", mlp, vectors, regression_loss),
        Example("gpt", TiedGPT, tokens, next_token_loss),
        Example("convnet", convnet, images, regression_loss),
        Example("lstm", LSTM, sequences, regression_loss),
        Example("recurrent_loop", RecurrentLoop, sequences, regression_loss),
        Example("odd_shapes", OddShapes, vectors, regression_loss),
        Example("frozen", frozen, vectors, regression_loss),
        Example("fixed_dropout", FixedDropout, masked_vectors, masked_regression_loss),
        Example("graph_break", GraphBreak, vectors, regression_loss),
        Example("unet", UNet, maps, regression_loss),
    )
}
