"""A small GPT, written the way one writes it for a single device.

Tokens (B, T) → embeddings (B, T, C) → blocks of attention and MLP → logits (B, T, V).
Nothing here knows of fxzero. One habit makes it fit: each module that owns parameters
sets their values in `reset_parameters`, so a model built on the meta device can be
given memory module by module, and no process ever holds all of it:

    with torch.device("meta"):
        model = gpt_lite()
    model = fxzero.shard(model, zero=3)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT."""

    num_layers: int = 4
    num_heads: int = 4
    hidden: int = 128
    """Width of the residual stream, split evenly among the heads."""
    vocab_size: int = 256
    """256: the model reads bytes."""
    block_size: int = 128
    """Longest context, in tokens."""
    dropout: float = 0.0
    bias: bool = True
    """Whether linear layers and layer norms have one."""

    def __post_init__(self) -> None:
        """A shape that a GPT can have.

        Raises:
            ValueError: it cannot; the message names the field.
        """
        for name in ("num_layers", "num_heads", "hidden", "vocab_size", "block_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a whole number, 1 or more")
        if not isinstance(self.bias, bool):
            raise ValueError(f"bias={self.bias!r} must be true or false")
        if isinstance(self.dropout, (bool, str)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} must be a number from 0 to below 1")
        if self.hidden % self.num_heads:
            raise ValueError(
                f"hidden={self.hidden} cannot be split among num_heads={self.num_heads}: "
                "choose a width that is a multiple of the number of heads."
            )


class Embedding(nn.Embedding):
    """A table of vectors that starts from N(0, 0.02²)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Linear(nn.Linear):
    """A linear layer that starts from N(0, std²) and a zero bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float = INIT_STD):
        self.std = std  # before nn.Linear's own __init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def residual_std(config: GPTConfig) -> float:
    """Keeps the residual stream's variance from growing with depth.

    Two layers per block add to the stream: 1/√(2·num_layers), as in GPT-2 (section 2.3).
    """
    return INIT_STD / math.sqrt(2 * config.num_layers)


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = Linear(config.hidden, 3 * config.hidden, config.bias)
        self.out = Linear(config.hidden, config.hidden, config.bias, residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, C/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, C/H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = Linear(config.hidden, 4 * config.hidden, config.bias)
        self.down = Linear(4 * config.hidden, config.hidden, config.bias, residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then MLP; each reads a normalised stream and adds to it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer. Its head is the token embedding, transposed."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.hidden)
        self.positions = Embedding(config.block_size, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden, bias=config.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Read tokens (B, T): logits (B, T, V), or the mean loss if targets (B, T) are given."""
        length = tokens.shape[1]
        if length > self.config.block_size:
            raise ValueError(
                f"{length} tokens were given to a model with block_size={self.config.block_size}: "
                "shorten the context, or build the model with a larger block."
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_tokens: int,
        temperature: float = 0.8,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue tokens (B, T) by `num_tokens` sampled ones: (B, T + num_tokens).

        On a sharded model this is a collective call, and gathers every layer for every token:
        a whole copy on one rank is quicker where it fits, see `full_copy` in train.py.
        """
        was_training = self.training
        self.eval()
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.config.block_size :])[:, -1].float()
            probabilities = torch.softmax(logits / temperature, dim=-1)
            sampled = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, sampled], dim=1)
        self.train(was_training)
        return tokens

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, each (batch_size, block_size), on the model's device."""
        shape = (batch_size, self.config.block_size + 1)
        device = next(self.parameters()).device
        tokens = torch.randint(self.config.vocab_size, shape, device=device)
        return tokens[:, :-1], tokens[:, 1:]


def gpt_nano(**overrides: Any) -> GPT:
    """0.84 million parameters over bytes: learns to look like Python in two minutes on a laptop."""
    return GPT(replace(GPTConfig(), **overrides))


def gpt_lite(**overrides: Any) -> GPT:
    """GPT-3 Small, 125 million parameters (Brown et al. 2020, table 2.1)."""
    config = GPTConfig(
        num_layers=12, num_heads=12, hidden=768, vocab_size=50304, block_size=2048, dropout=0.1
    )
    return GPT(replace(config, **overrides))


def gpt_xl(**overrides: Any) -> GPT:
    """GPT-2's largest, 1.56 billion parameters (Radford et al. 2019, table 2)."""
    config = GPTConfig(
        num_layers=48, num_heads=25, hidden=1600, vocab_size=50257, block_size=1024, dropout=0.1
    )
    return GPT(replace(config, **overrides))


def gpt_bench(**overrides: Any) -> GPT:
    """19 million parameters without dropout: the model that the benchmarks time."""
    config = GPTConfig(num_layers=6, num_heads=8, hidden=512, vocab_size=1024, block_size=256)
    return GPT(replace(config, **overrides))


def gpt_1t(**overrides: Any) -> GPT:
    """1.01 trillion parameters, to be looked at (Narayanan et al. 2021, table 1)."""
    config = GPTConfig(
        num_layers=128, num_heads=160, hidden=25600, vocab_size=51200, block_size=2048
    )
    return GPT(replace(config, **overrides))
