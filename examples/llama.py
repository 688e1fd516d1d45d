"""transformers' Llama as the benchmarks call their models: tokens and targets in, their loss out.

python examples/benchmarks/estimated_steps.py --json FILE model=llama_bench
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.models import GPTConfig


class Llama(nn.Module):
    """A Llama of a GPT's shape: gates of 8/3 of its width (Touvron et al. 2023), and a head of keys
    and values for four of queries, where they can be shared so (Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads
        self.model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=config.num_layers,
                num_attention_heads=heads,
                num_key_value_heads=heads if heads % 4 else heads // 4,
                hidden_size=config.hidden,
                intermediate_size=-(-8 * config.hidden // 3 // 64) * 64,
                vocab_size=config.vocab_size,
                max_position_embeddings=config.block_size,
                attention_dropout=config.dropout,
                attention_bias=config.bias,
                use_cache=False,
            )
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Read tokens (B, T): their mean loss by targets (B, T)."""
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def llama_bench(**overrides: Any) -> Llama:
    """18 million parameters: the other model that the benchmarks time."""
    config = GPTConfig(
        num_layers=6, num_heads=8, hidden=512, vocab_size=1024, block_size=256, bias=False
    )
    return Llama(replace(config, **overrides))
