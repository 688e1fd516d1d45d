"""Loops of accelerate, the same ones under DistributedDataParallel and under fxzero.

Ranks of the pool are in a process group already; what torchrun would have told accelerate of it is
told here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import fxzero
from fxzero.integrations.accelerate import FxZeroAccelerator, FxZeroPlugin
from fxzero.sharding.params import GradSync
from fxzero.sharding.shard import model_state

CHEAP = {"lower_regions": {"backend": "eager"}}
"""Inductor is tested by the scripts."""


@dataclass(frozen=True)
class Loop:
    """A training, as it can be sent to a rank."""

    zero: int | None = None
    """None: accelerate as it is."""
    model: str = "bert"
    steps: int = 20
    accumulate: int = 2
    clip: str = "norm"
    sharded_before: bool = False
    save_at: int | None = None
    resume: bool = False
    folder: str = ""
    average: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """What became of it; whole tensors, on rank 0."""

    losses: list[float]
    norms: list[float]
    predictions: Tensor
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    average: dict[str, Tensor]


def bert() -> nn.Module:
    """A classifier of pairs of sentences, as in accelerate's nlp_example."""
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=48,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class ConvNet(nn.Module):
    """A classifier of images, as in accelerate's cv_example."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits, of numbers that stand for pixels."""
        pixels = torch.stack([input_ids.float() / 48] * 3, 1).unflatten(-1, (3, 4))
        logits = self.head(self.features(pixels).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


MODELS = {"bert": bert, "conv": ConvNet}


@contextmanager
def as_launched() -> Iterator[None]:
    """The environment that a launcher makes, and accelerate without a memory of other jobs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """accelerate's state is one for a process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()  # `_reset_state` would end the pool's process group


def make(loop: Loop) -> Accelerator:
    """The Accelerator of a loop."""
    settings: dict[str, Any] = {
        "cpu": True,
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True),
        "gradient_accumulation_steps": loop.accumulate,
        "project_config": ProjectConfiguration(
            project_dir=loop.folder or None,
            automatic_checkpoint_naming=bool(loop.folder),
            total_limit=2,
        ),
        **loop.args,
    }
    if loop.zero is None:
        return Accelerator(**settings)
    plugin = FxZeroPlugin(zero=loop.zero, options=CHEAP, **loop.plugin)
    return FxZeroAccelerator(fxzero=plugin, **settings)


def data(rows: int, seed: int) -> TensorDataset:
    """Sentences of 12 words, and whether there is more of the first half of the words."""
    words = torch.randint(0, 48, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words < 24).sum(1).gt(6).long())


def run(loop: Loop) -> Ran:
    """Train, save or resume, evaluate."""
    with as_launched():
        return _run(loop, make(loop))


def _run(loop: Loop, accelerator: Accelerator) -> Ran:
    set_seed(3)
    model = MODELS[loop.model]()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if loop.average else None
    if average is not None and loop.zero is not None:
        fxzero.shard(average.module, loop.zero)
    if loop.sharded_before:
        assert loop.zero is not None
        fxzero.shard(model, loop.zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 60)
    loader = DataLoader(data(90, 0), 4, shuffle=True)
    # In an order that is nobody's habit: an optimizer is handed over whenever it comes.
    scheduler, loader, optimizer, model, test = accelerator.prepare(
        scheduler, loader, optimizer, model, DataLoader(data(22, 1), 4)
    )
    if average is not None:
        accelerator.register_for_checkpointing(average)
    micro_step, losses, norms = 0, list[float](), list[float]()
    if loop.resume:
        accelerator.load_state()
        assert loop.save_at is not None
        micro_step = loop.save_at
    while micro_step < loop.steps * loop.accumulate:
        first, start = divmod(micro_step, len(loader))
        source = accelerator.skip_first_batches(loader, start) if start else loader
        source.set_epoch(first)
        for words, labels in source:
            with accelerator.accumulate(model):
                loss = model(input_ids=words, labels=labels)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients and loop.clip == "norm":
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    norms.append(float(norm))
                elif accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            micro_step += 1
            if average is not None and accelerator.sync_gradients:
                average.update_parameters(accelerator.unwrap_model(model))
            if micro_step == loop.save_at:
                accelerator.save_state()
            if micro_step == loop.steps * loop.accumulate:
                break
    model.eval()
    with torch.no_grad():
        found = [
            accelerator.gather_for_metrics(model(input_ids=words, labels=labels)["logits"])
            for words, labels in test
        ]
    inner = accelerator.unwrap_model(model)
    names = {id(p): name for name, p in inner.named_parameters()}
    moments = {
        names[id(p)]: _whole(state["exp_avg"]) for p, state in optimizer.optimizer.state.items()
    }
    averages = {} if average is None else average.module.state_dict()
    return Ran(
        losses,
        norms,
        torch.cat(found),
        dict(accelerator.get_state_dict(model)),
        moments,
        {name: _whole(value) for name, value in averages.items()},
    )


def _whole(value: Tensor) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


def reduces(loop: Loop) -> list[bool]:
    """Whether each forward of four micro-batches reduces, under `accumulate`."""
    with as_launched():
        accelerator = make(loop)
        model, loader = accelerator.prepare(bert(), DataLoader(data(32, 0), 4))
        state, seen = model_state(model), list[bool]()
        assert state is not None
        for _ in loader:
            with accelerator.accumulate(model):
                seen.append(state.sync != GradSync.ACCUMULATE.value)
        return seen


def saves(loop: Loop) -> dict[str, Any]:
    """What hooks, whole weights and folders are."""
    with as_launched():
        accelerator = make(loop)
        model = bert()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        called: list[tuple[str, int]] = []
        accelerator.register_save_state_pre_hook(
            lambda models, weights, _: called.append(("save", len(weights)))
        )
        accelerator.register_load_state_pre_hook(
            lambda models, _: called.append(("load", len(models)))
        )
        for _ in range(3):
            accelerator.save_state()
        accelerator.load_state()
        whole = Path(loop.folder, "whole")
        accelerator.save_model(model, whole, max_shard_size="8KB")
        accelerator.unwrap_model(model).save_pretrained(
            Path(loop.folder, "pretrained"),
            state_dict=accelerator.get_state_dict(model),
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
        )
        weights = accelerator.get_state_dict(model)
        accelerator.wait_for_everyone()
        accelerator.free_memory(model, optimizer)
        return {
            "called": called,
            "folders": sorted(p.name for p in Path(loop.folder, "checkpoints").iterdir()),
            "whole": sorted(p.name for p in whole.iterdir()),
            "weights": weights,
            "hooks": len(accelerator._save_model_state_pre_hook),
        }
