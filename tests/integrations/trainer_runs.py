"""Trainings by transformers' Trainer, the same ones under DistributedDataParallel and under fxzero.

A run is a `Run`: what the model is, how it is trained, by which ZeRO stage or by none. Ranks of the
pool are in a process group already; what torchrun would have told accelerate of it is told here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

import fxzero
from fxzero.integrations.transformers import (
    FxZeroPlugin,
    FxZeroSeq2SeqTrainer,
    FxZeroTrainer,
)
from fxzero.integrations.whole import whole_weights
from fxzero.step.train_step import TrainStep
from tests.parity.harness import Pools

CHEAP = {"lower_regions": {"backend": "eager"}}
"""Inductor is tested elsewhere."""
CALL = TrainStep.__call__
LOGGED = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_tokens", "step")


@dataclass(frozen=True)
class Run:
    """A training, as it can be sent to a rank."""

    model: str = "llama"
    zero: int | None = None
    """None: Trainer as it is."""
    dtype: torch.dtype = torch.float32
    args: Mapping[str, Any] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    resume: str | bool | None = None
    stop_at: int | None = None
    """Stop after so many steps, as somebody who kills the job."""
    own_loss: bool = False
    """Not the model's own, which language models of transformers take in fp32 whatever they are."""
    rows: int = 112


@dataclass(frozen=True)
class Ran:
    """What became of it, on rank 0; whole tensors."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    files: list[str]
    reduces: int
    """How many times gradients were reduced, if fxzero counts."""
    whole_steps: int
    """How many updates were one graph with their forward."""


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 20,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "save_strategy": "no",
    "max_grad_norm": 0.3,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    # Adam divides a gradient by its own size: one that is rounding alone must not become a step.
    "adam_epsilon": 1e-4,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "ddp_backend": "gloo",
    "seed": 3,
}


def llama(dropout: float) -> nn.Module:
    """A causal LM, without dropout of its own but in attention."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=dropout,
        )
    )


def gpt2(dropout: float) -> nn.Module:
    """A causal LM with tied embeddings."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def t5(dropout: float) -> nn.Module:
    """An encoder and a decoder, whose embeddings are tied."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=dropout,
            decoder_start_token_id=0,
        )
    )


def resnet(_: float) -> nn.Module:
    """Convolutions, and buffers that a forward changes."""
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3
        )
    )


def vit(dropout: float) -> nn.Module:
    """Patches and attention."""
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=4,
            num_labels=3,
            hidden_dropout_prob=dropout,
        )
    )


def lora(dropout: float) -> nn.Module:
    """The causal LM with adapters, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    return get_peft_model(llama(0.0), config)


MODELS: dict[str, Callable[[float], nn.Module]] = {
    make.__name__: make for make in (llama, gpt2, t5, resnet, vit, lora)
}


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    """Examples; those of language models have different numbers of labels."""
    numbers = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        if kind in ("resnet", "vit"):
            pixels = torch.randn(3, 16, 16, generator=numbers)
            label = int(torch.randint(0, 3, (1,), generator=numbers))
            rows.append({"pixel_values": pixels, "labels": label})
            continue
        ids = torch.randint(1, 64, (12,), generator=numbers)
        labels = ids.clone()
        labels[: int(torch.randint(0, 8, (1,), generator=numbers))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def metrics(prediction: Any) -> dict[str, float]:
    """Of classes, or of tokens."""
    predicted, labels = prediction.predictions, prediction.label_ids
    predicted = predicted[0] if isinstance(predicted, tuple) else predicted
    if predicted.ndim == labels.ndim + 1:
        return {"accuracy": float((predicted.argmax(-1) == labels).mean())}
    return {"tokens": float(predicted.sum())}


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Of the next token, over all that are counted, in the dtype of the model."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


class Stop(transformers.TrainerCallback):
    """Ends a training early."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step >= self.after:
            control.should_training_stop = True
        return control


@contextmanager
def as_torchrun_says() -> Iterator[None]:
    """What accelerate asks the environment for, of ranks that somebody else has started."""
    told = {}
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        told = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
    before = torch.get_default_dtype()
    with mock.patch.dict(os.environ, told):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def make_trainer(run: Run, folder: str, **more: Any) -> Trainer:
    """The trainer of a run."""
    torch.set_default_dtype(run.dtype)
    transformers.set_seed(0)
    model = MODELS[run.model](run.dropout)
    settings = {**SETTINGS, **run.args}
    seq2seq = run.model == "t5"
    args = (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(folder, **settings)
    plain, sharded = (Seq2SeqTrainer, FxZeroSeq2SeqTrainer) if seq2seq else (Trainer, FxZeroTrainer)
    data = rows_of(run.model, run.rows + 16)
    given: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": data[: run.rows],
        "eval_dataset": data[run.rows :],
        "callbacks": [Stop(run.stop_at)] if run.stop_at else None,
    }
    if run.model in ("resnet", "vit") or settings.get("predict_with_generate"):
        given["compute_metrics"] = metrics
    if run.own_loss:
        given["compute_loss_func"] = token_loss
    given.update(more)
    if run.zero is None:
        return plain(**given)
    plugin = {"options": CHEAP, **run.plugin}
    return sharded(**given, fxzero=FxZeroPlugin(zero=run.zero, **plugin))


def train(run: Run, folder: str, **more: Any) -> Ran:
    """Train, and say what came of it."""
    with as_torchrun_says():
        trainer = make_trainer(run, folder, **more)
        with mock.patch.object(TrainStep, "__call__", autospec=True, side_effect=CALL) as whole:
            trainer.train(resume_from_checkpoint=run.resume)
        return ran(trainer, folder, whole.call_count)


def train_on_two(ranks: Pools, folder: Path, run: Run) -> Ran:
    """Train on two ranks: what rank 0 has of it."""
    return ranks(2).run(train, run, str(folder))[0]


def train_as_ddp(
    ranks: Pools, folder: Path, run: Run, zero: int, within: float, **plugin: Any
) -> Ran:
    """Train by DDP and by fxzero, and compare."""
    wanted = train_on_two(ranks, folder / "ddp", run)
    sharded = Run(**{**vars(run), "zero": zero, "plugin": plugin})
    found = train_on_two(ranks, folder / "fxzero", sharded)
    assert_same(found, wanted, within)
    return found


def ran(trainer: Trainer, folder: str, whole_steps: int = 0) -> Ran:
    """What a trainer has logged, and the weights that it has made."""
    logs = [{k: v for k, v in line.items() if k in LOGGED} for line in trainer.state.log_history]
    model = trainer.model
    state = fxzero.sharding.shard.model_state(model)
    reduces = 0 if state is None else fxzero.report(model).num_reduces
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    return Ran(
        json.loads(json.dumps(logs)), whole_weights(model, keep=True), files, reduces, whole_steps
    )


def assert_same(found: Ran, wanted: Ran, within: float, since: int = 0) -> None:
    """Compare logs line by line and weights element by element, by the largest of each tensor.

    What has no gradient but rounding (biases before a softmax) is as large as rounding itself.
    """
    lines = [line for line in found.logs if line["step"] > since and len(line) > 1]
    expected = [line for line in wanted.logs if line["step"] > since and len(line) > 1]
    assert len(lines) == len(expected) > 0, (lines, expected)
    for line, other in zip(lines, expected, strict=True):
        assert line.keys() == other.keys()
        for key, value in line.items():
            assert abs(value - other[key]) <= within * max(1.0, abs(other[key])), (line, other)
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        difference = (found.weights[name] - weight).abs().max()
        assert difference <= within * max(float(weight.abs().max()), 1e-3), (name, difference)
