"""Forwards that Dynamo would break make one graph under `lenient_tracing`, and eager's numbers."""

from __future__ import annotations

import logging
import logging.handlers
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fxzero
from fxzero import _compat

transformers = pytest.importorskip("transformers")

log = logging.getLogger("tests.lenient")


class Talks(nn.Module):
    """Says a lot while it computes."""

    def __init__(self, kind: type[nn.RNNBase] | None = None) -> None:
        super().__init__()
        self.recurrent = kind(8, 8, batch_first=True) if kind is not None else None
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8) → a loss."""
        log.warning("a batch of %s", x.shape)
        log.info("info")
        print("printed")
        warnings.warn("careful", stacklevel=2)
        if self.recurrent is not None:
            x, _ = self.recurrent(x)
        return self.linear(x).square().mean()


class Labelled(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) → a loss."""
        return self.model(tokens, labels=tokens).loss  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    """Transformers' GPT-2 as it comes: it warns once of its missing loss_type."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Labelled(transformers.GPT2LMHeadModel(config))


def mixtral() -> nn.Module:
    """Transformers' Mixtral, whose experts are one grouped product."""
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return Labelled(transformers.MixtralForCausalLM(config))


def tokens() -> Tensor:
    """A batch for a language model."""
    return torch.randint(0, 32, (2, 8))


def numbers() -> Tensor:
    """A batch for the others."""
    return torch.randn(3, 5, 8)


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (Talks, numbers),
        (lambda: Talks(nn.LSTM), numbers),
        (lambda: Talks(nn.GRU), numbers),
        (lambda: Talks(nn.RNN), numbers),
        (gpt2, tokens),
        pytest.param(
            mixtral,
            tokens,
            marks=pytest.mark.skipif(
                transformers.__version__ < "5",
                reason="before transformers 5 it loops over the experts that its tokens chose",
            ),
        ),
    ],
    ids=["talks", "lstm", "gru", "rnn", "gpt2", "mixtral"],
)
@pytest.mark.filterwarnings("ignore:careful")
def test_one_graph_and_eagers_numbers(
    build: Callable[[], nn.Module], batch: Callable[[], Tensor]
) -> None:
    """Two steps of a whole-step graph, which must not break."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected, model = build(), build()
    model.load_state_dict(expected.state_dict())
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (expected, model))
    options = {"lower_regions": {"backend": "eager"}}
    step = fxzero.compile_step(model, mine, options=options)
    for _ in range(2):
        x = batch()
        theirs.zero_grad()
        loss = expected(x)
        loss.backward()
        theirs.step()
        with _compat.lenient_tracing(model.modules()):
            assert_close(step(x).loss, loss.detach(), rtol=1e-6, atol=1e-6)
    for ours, their in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours, their, rtol=1e-6, atol=1e-6)


def test_the_programs_own_settings_come_back() -> None:
    """And stay in force inside."""
    config = torch._dynamo.config

    def mine() -> None:
        """Something that a program has told Dynamo to ignore."""

    with config.patch(ignore_logging_functions={mine}, allow_rnn=False):
        with _compat.lenient_tracing():
            assert {mine, print, logging.Logger.warning} <= config.ignore_logging_functions
            assert config.allow_rnn
        assert config.ignore_logging_functions == {mine}
        assert not config.allow_rnn


def test_dynamo_has_nothing_to_complain_of() -> None:
    """It writes its settings to its metrics: torch 2.11 cannot write a set of functions."""
    complaints = logging.handlers.BufferingHandler(capacity=100)
    logger = logging.getLogger("torch._dynamo.metrics_context")
    logger.addHandler(complaints)
    torch._dynamo.reset()
    try:
        with _compat.lenient_tracing():
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        logger.removeHandler(complaints)
    assert complaints.buffer == []
