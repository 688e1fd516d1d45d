"""The whole-step door under transformers' Trainer: what plain Trainer computes under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fxzero.errors import ConfigError
from fxzero.integrations.transformers import FxZeroCallback, FxZeroPlugin, FxZeroTrainer
from tests.integrations.trainer_runs import (
    CHEAP,
    Run,
    as_torchrun_says,
    assert_same,
    make_trainer,
    train,
    train_as_ddp,
    train_on_two,
)
from tests.parity.harness import Pools
from tests.tiers import exhaustive

WHOLE: dict[str, Any] = {"whole_step": True, "options": {**CHEAP, "strict": True}}
"""strict: an error, and no loop, where a step is not one graph."""


@pytest.mark.parametrize("zero", [3, *exhaustive(0, 2)])
def test_a_causal_language_model_trains_as_under_ddp(
    ranks: Pools, tmp_path: Path, zero: int
) -> None:
    """Twenty steps of two micro-batches with other numbers of labels, clipped, evaluated."""
    found = train_as_ddp(ranks, tmp_path, Run("llama"), zero, 1e-5, **WHOLE)
    norms = [line["grad_norm"] for line in found.logs if "grad_norm" in line]
    assert max(norms) > 0.3, "nothing was clipped"
    assert found.whole_steps == 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 3])
def test_in_float64_only_the_order_of_sums_differs(ranks: Pools, tmp_path: Path, zero: int) -> None:
    """A loss of one's own, and no clipping: the norm is logged all the same."""
    args = {"max_steps": 5, "eval_steps": 5, "max_grad_norm": 0.0}
    run = Run("llama", dtype=torch.float64, own_loss=True, args=args)
    train_as_ddp(ranks, tmp_path, run, zero, 1e-12, **WHOLE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["gpt2", "t5", "vit", "resnet", "lora"])
@pytest.mark.parametrize("zero", [1, 3])
def test_other_models_train_as_under_ddp(
    ranks: Pools, tmp_path: Path, model: str, zero: int
) -> None:
    args = {"eval_strategy": "no"} if model == "resnet" else {}
    train_as_ddp(
        ranks, tmp_path, Run(model, args={**args, "adam_epsilon": 1e-3}), zero, 1e-5, **WHOLE
    )


@pytest.mark.exhaustive
def test_an_epoch_may_end_with_fewer_micro_batches(ranks: Pools, tmp_path: Path) -> None:
    """Of 27 rows each of 2 ranks has 5 batches an epoch: two updates of two, and one of one."""
    args = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 3}
    run = Run("llama", rows=27, args={**args, "eval_strategy": "no"})
    found = train_as_ddp(ranks, tmp_path, run, 3, 1e-5, **WHOLE)
    assert found.whole_steps == 6


def test_micro_batches_that_are_not_alike_are_trained_on_by_the_loop(tmp_path: Path) -> None:
    """Of 7 rows in one process the last update has two micro-batches of 2 and 1."""
    args = {"max_steps": -1, "num_train_epochs": 3, "ddp_backend": None, "eval_strategy": "no"}
    run = Run("llama", rows=7, args=args)
    wanted = train(run, str(tmp_path / "plain"))
    whole = Run(**{**vars(run), "zero": 0, "plugin": WHOLE})
    found = train(whole, str(tmp_path / "fxzero"))
    assert found.whole_steps == 3
    assert_same(found, wanted, 1e-5)


def test_what_is_offloaded_needs_micro_batches_that_are_alike(tmp_path: Path) -> None:
    args = {"num_train_epochs": 1, "max_steps": -1, "ddp_backend": None, "eval_strategy": "no"}
    plugin = {"whole_step": True, "options": {**CHEAP, "offload_states": {"share": 1.0}}}
    run = Run("llama", zero=0, rows=7, args=args, plugin=plugin)
    with pytest.raises(ConfigError, match="2 micro-batches of one update have different shapes"):
        train(run, str(tmp_path))


@pytest.mark.exhaustive
def test_going_on_half_way_is_as_if_nothing_had_happened(ranks: Pools, tmp_path: Path) -> None:
    """With dropout; and the loop goes on from what whole steps have saved."""
    saving = {"save_strategy": "steps", "save_steps": 10}
    run = Run("llama", zero=3, dropout=0.2, args=saving, plugin=WHOLE)
    whole = train_on_two(ranks, tmp_path, run)
    again = Run(**{**vars(run), "resume": str(tmp_path / "checkpoint-10")})
    assert_same(train_on_two(ranks, tmp_path / "again", again), whole, 1e-6, since=10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("label_smoothing", [0.1])
def test_labels_are_smoothed_in_the_graph(
    ranks: Pools, tmp_path: Path, label_smoothing: float
) -> None:
    args = {"label_smoothing_factor": label_smoothing, "max_steps": 4, "eval_steps": 4}
    train_as_ddp(ranks, tmp_path, Run("gpt2", args=args), 3, 1e-5, **WHOLE)


@pytest.mark.exhaustive
def test_bf16_is_as_in_the_loop(ranks: Pools, tmp_path: Path) -> None:
    args = {"bf16": True, "max_steps": 3, "eval_strategy": "no"}
    loop = train_on_two(ranks, tmp_path / "loop", Run("llama", zero=3, args=args))
    found = train_on_two(ranks, tmp_path / "whole", Run("llama", zero=3, args=args, plugin=WHOLE))
    for line, other in zip(found.logs, loop.logs, strict=True):
        if "loss" in line:
            assert line["loss"] == pytest.approx(other["loss"], rel=2e-4)
            assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=5e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["adafactor", "adagrad", "adamw_torch_fused", "rmsprop", "sgd"])
def test_optimizers_that_trainer_makes_are_right(ranks: Pools, tmp_path: Path, name: str) -> None:
    train_as_ddp(
        ranks, tmp_path, Run("llama", args={"optim": name, "max_steps": 6}), 3, 1e-5, **WHOLE
    )


class _OwnStep(FxZeroTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class _LooksAtGradients(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A hook between backward and update."""


def test_what_a_graph_would_go_round_is_refused(tmp_path: Path) -> None:
    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "max_steps": 1}
    args = transformers.TrainingArguments(str(tmp_path), **settings)
    plugin = FxZeroPlugin(zero=0, whole_step=True)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"_OwnStep\.training_step would not run"):
        _OwnStep(model=model, args=args, fxzero=plugin)
    with pytest.raises(ConfigError, match="use FxZeroMixin"):
        transformers.Trainer(model=model, args=args, callbacks=[FxZeroCallback(plugin)])
    with pytest.raises(ConfigError, match="compile=False: leave out one"):
        FxZeroPlugin(whole_step=True, compile=False)
    run = Run(
        "gpt2", zero=0, args={"max_steps": 1, "ddp_backend": None}, plugin={"whole_step": True}
    )
    with as_torchrun_says(), pytest.raises(ConfigError, match="between backward and update"):
        make_trainer(run, str(tmp_path), callbacks=[_LooksAtGradients()]).train()
    half = Run(**{**vars(run), "plugin": {**WHOLE, "param_dtype": torch.float16}})
    with as_torchrun_says(), pytest.raises(ConfigError, match="steps that a loss scale skips"):
        make_trainer(half, str(tmp_path)).train()
