"""Kernels in models of transformers, built from configurations: equal before and after."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.passes import test_lower_kernels as lowering
from tests.passes.test_lower_kernels import check_equal, compiled_step, eager_step
from tests.tiers import exhaustive

decomposed = lowering.decomposed
CLASSES = 64


class Loss(nn.Module):
    """A model that returns the loss of its own labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """``(2, 12) → scalar``."""
        found: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CLASSES,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def gpt2() -> nn.Module:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=CLASSES,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.loss_type = (
        "ForCausalLM"  # else it warns of its default, at which Dynamo breaks the graph
    )
    return model


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=CLASSES,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "Llama": (llama, {"linear_cross_entropy": 1, "rms_norm": 5, "swiglu": 2, "rotary": 4}),
    "GPT-2": (gpt2, {"linear_cross_entropy": 1, "layer_norm": 5, "gelu": 2}),
    "T5": (t5, {"linear_cross_entropy": 1, "rms_norm": 12, "geglu": 4}),
}


@pytest.mark.parametrize("name", ["Llama", *exhaustive("GPT-2", "T5")])
def test_real_models(name: str, decomposed: bool) -> None:
    build, expected = MODELS[name]
    torch.manual_seed(0)
    model = Loss(build()).train()
    tokens = torch.randint(1, CLASSES, (2, 12))
    loss, grads = eager_step(model, tokens)
    found = compiled_step(model, tokens, force="all")
    assert found.notes == expected
    check_equal(found, loss, grads, 1e-5)
