"""Language models: decoders, encoders, both, experts, state spaces."""

from __future__ import annotations

from typing import Any

import torch

from tests.architectures.architecture import (
    HIDDEN,
    VOCABULARY,
    Architecture,
    language,
    masked_language,
    translation,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED: dict[str, Any] = {**SIZES, **TOKENS, "num_key_value_heads": 2}
ROUTED: dict[str, Any] = {
    **GROUPED,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    # transformers' default on this torch, grouped_mm, has no kernel for float64.
    "experts_implementation": "batched_mm",
}
EIGHT = {"head_dim": 8}


def decoder(name: str, prefix: str, note: str = "", **settings: Any) -> Architecture:
    return Architecture(
        name, "decoder", f"{prefix}ForCausalLM", language, f"{prefix}Config", settings, note
    )


def encoder(name: str, prefix: str, note: str = "", **settings: Any) -> Architecture:
    return Architecture(
        name, "encoder", f"{prefix}ForMaskedLM", masked_language, f"{prefix}Config", settings, note
    )


def experts(
    name: str,
    prefix: str,
    note: str = "",
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Architecture:
    return Architecture(
        name, "experts", f"{prefix}ForCausalLM", language, f"{prefix}Config", settings, note, dtype
    )


def state_space(name: str, prefix: str, note: str = "", **settings: Any) -> Architecture:
    return Architecture(
        name, "state space", f"{prefix}ForCausalLM", language, f"{prefix}Config", settings, note
    )


def both(
    name: str,
    prefix: str,
    note: str = "",
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Architecture:
    return Architecture(
        name,
        "encoder-decoder",
        f"{prefix}ForConditionalGeneration",
        translation,
        f"{prefix}Config",
        settings,
        note,
        dtype,
    )


BART: dict[str, Any] = {
    **TOKENS,
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}

DECODERS = [
    Architecture(
        "gpt2",
        "decoder",
        "GPT2LMHeadModel",
        language,
        "GPT2Config",
        {
            **TOKENS,
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "n_embd": HIDDEN,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "tied weights, a warning in its loss",
    ),
    decoder("llama", "Llama", "grouped queries", **GROUPED),
    decoder("mistral", "Mistral", "a sliding window", **GROUPED, sliding_window=4),
    decoder("qwen3", "Qwen3", "norms of queries and keys", **GROUPED, **EIGHT),
    decoder("gemma2", "Gemma2", "soft caps, windows by turns", **GROUPED, **EIGHT),
    Architecture(
        "gemma3",
        "decoder",
        "Gemma3ForCausalLM",
        language,
        "Gemma3TextConfig",
        {**GROUPED, **EIGHT},
        "two rotary bases",
    ),
    decoder("phi3", "Phi3", "fused projections", **GROUPED),
    decoder("falcon", "Falcon", "one key, parallel blocks", **SIZES, **TOKENS),
    decoder(
        "bloom",
        "Bloom",
        "ALiBi",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    decoder(
        "opt",
        "OPT",
        "",
        **TOKENS,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
        word_embed_proj_dim=16,
    ),
    decoder("gpt_neox", "GPTNeoX", "partly rotary", **SIZES, **TOKENS),
    decoder("cohere", "Cohere", "scaled logits", **GROUPED),
]

ENCODERS = [
    encoder("bert", "Bert", "", **SIZES, **NO_DROPOUT),
    encoder(
        "albert",
        "Albert",
        "one layer, used twice",
        **SIZES,
        **NO_DROPOUT,
        embedding_size=16,
        inner_group_num=1,
    ),
    encoder(
        "deberta_v2",
        "DebertaV2",
        "relative positions, constants in forward",
        **SIZES,
        **NO_DROPOUT,
        relative_attention=True,
        position_buckets=8,
        max_relative_positions=16,
        pos_att_type=["c2p", "p2c"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    encoder(
        "modernbert",
        "ModernBert",
        "local attention by turns",
        **SIZES,
        **TOKENS,
        local_attention=4,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    encoder(
        "longformer",
        "Longformer",
        "windows made of strides",
        **SIZES,
        **NO_DROPOUT,
        attention_window=[4, 4],
        pad_token_id=0,
    ),
    encoder(
        "fnet",
        "FNet",
        "Fourier transforms",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        max_position_embeddings=32,
    ),
]

BOTH = [
    both("t5", "T5", "a bias shared by layers", **T5, feed_forward_proj="gated-gelu"),
    both("bart", "Bart", "shared embeddings", **BART),
    both("pegasus", "Pegasus", "sinusoids", **BART),
    Architecture(
        "prophetnet",
        "encoder-decoder",
        "ProphetNetForConditionalGeneration",
        translation,
        "ProphetNetConfig",
        {
            **TOKENS,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 0,
        },
        "two streams",
    ),
]

EXPERTS = [
    experts("mixtral", "Mixtral", "", **ROUTED),
    experts(
        "qwen3_moe",
        "Qwen3Moe",
        "transformers' default: a grouped matrix product of the experts",
        dtype=torch.float32,
        **{**ROUTED, "experts_implementation": "grouped_mm"},
        moe_intermediate_size=16,
    ),
    experts(
        "qwen2_moe",
        "Qwen2Moe",
        "a shared expert",
        **ROUTED,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    experts(
        "deepseek_v3",
        "DeepseekV3",
        "latent attention, groups of experts",
        **{**SIZES, **TOKENS},
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        experts_implementation="batched_mm",
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    experts("gpt_oss", "GptOss", "attention sinks", **ROUTED, **EIGHT, sliding_window=4),
    both(
        "switch_transformers",
        "SwitchTransformers",
        "a capacity per expert",
        **T5,
        num_experts=4,
        expert_capacity=16,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        router_jitter_noise=0.0,
        dtype=torch.float32,  # its router casts its own parameters to that in forward
    ),
]

STATE_SPACES = [
    state_space(
        "mamba",
        "Mamba",
        "a scan",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        state_size=8,
        num_hidden_layers=2,
        time_step_rank=4,
    ),
    state_space(
        "mamba2",
        "Mamba2",
        "a scan by chunks",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    state_space(
        "rwkv",
        "Rwkv",
        "a custom autograd function or a loop",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        context_length=32,
        attention_hidden_size=HIDDEN,
        intermediate_size=48,
    ),
    state_space(
        "recurrent_gemma",
        "RecurrentGemma",
        "gated recurrences",
        **{**GROUPED, "num_hidden_layers": 3},
        lru_width=HIDDEN,
        attention_window_size=4,
    ),
]

TEXT = [*DECODERS, *ENCODERS, *BOTH, *EXPERTS, *STATE_SPACES]
