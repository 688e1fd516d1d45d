"""Models that people mean by a name: shapes of transformers' GPT-2 and Llama.

    fxzero estimate gpt-1t --world-size 1024

Trained as such models are: without dropout, in bfloat16 with masters in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A model's class and settings in transformers, and rows as long as it was trained on."""

    model: str
    config: str
    settings: dict[str, Any]
    seq_len: int


def _gpt(
    num_layers: int, width: int, num_heads: int, vocab_size: int = 51200, seq_len: int = 2048
) -> Preset:
    settings = {
        "n_layer": num_layers,
        "n_embd": width,
        "n_head": num_heads,
        "vocab_size": vocab_size,
        "n_positions": seq_len,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return Preset("GPT2LMHeadModel", "GPT2Config", settings, seq_len)


def _llama3(num_layers: int, width: int, num_heads: int, inner: int) -> Preset:
    settings = {
        "num_hidden_layers": num_layers,
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    }
    return Preset("LlamaForCausalLM", "LlamaConfig", settings, 8192)


PRESETS = {
    # GPT-3 Small (Brown et al. 2020, table 2.1), its vocabulary rounded up.
    "gpt-lite": _gpt(12, 768, 12, vocab_size=50304),
    # GPT-2's largest (Radford et al. 2019, table 2).
    "gpt2-1.5b": _gpt(48, 1600, 25, vocab_size=50257, seq_len=1024),
    "minigpt-1.7b": _gpt(15, 3072, 24, vocab_size=50304),
    "minigpt-12.8b": _gpt(16, 8192, 64, vocab_size=50304),
    "minigpt-45b": _gpt(56, 8192, 64, vocab_size=50304),
    # Narayanan et al. 2021, table 1: 7.5 billion and a trillion.
    "gpt-7.5b": _gpt(36, 4096, 32),
    "gpt-1t": _gpt(128, 25600, 160),
    # As large as one in figure 1 of the ZeRO paper, which does not say its shape.
    "gpt-128b": _gpt(158, 8192, 64),
    # Dubey et al. 2024, table 3.
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
}
"""By name."""
