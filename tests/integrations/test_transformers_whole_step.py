"""The whole-step door under transformers' Trainer: what plain Trainer computes under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import Trainer

from fxzero.errors import CaptureError, ConfigError
from fxzero.integrations.transformers import FxZeroCallback, FxZeroPlugin, FxZeroTrainer
from fxzero.step.train_step import TrainStep
from tests.integrations.trainer_runs import (
    CALL,
    CHEAP,
    Ran,
    Run,
    as_torchrun_says,
    assert_same,
    make_trainer,
    ran,
    rows_of,
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


@pytest.mark.parametrize("zero", [0, *exhaustive(1, 3)])
def test_an_epoch_may_end_with_fewer_micro_batches(ranks: Pools, tmp_path: Path, zero: int) -> None:
    """Of 27 rows each of 2 ranks has 5 batches an epoch: two updates of two, and one of one."""
    args = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 3}
    run = Run("llama", rows=27, args={**args, "eval_strategy": "no"})
    found = train_as_ddp(ranks, tmp_path, run, zero, 1e-5, **WHOLE)
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
    with pytest.raises(
        ConfigError, match=r"2 micro-batches .* not one graph \(they differ in shape"
    ):
        train(run, str(tmp_path))


def _padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    lengths = [len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.tensor(
            [[*r["input_ids"], *[0] * (max(lengths) - len(r["input_ids"]))] for r in rows]
        ),
        "labels": torch.tensor(
            [[*r["labels"], *[-100] * (max(lengths) - len(r["labels"]))] for r in rows]
        ),
    }


def _of_unlike_lengths(run: Run, folder: str) -> Ran:
    """In the third update, the second rank's first micro-batch is shorter than its second."""
    rows = [
        {key: torch.as_tensor(value).tolist() for key, value in row.items()}
        for row in rows_of("llama", 48)
    ]
    for row in rows[18:20]:
        row["input_ids"], row["labels"] = row["input_ids"][:9], row["labels"][:9]
    with mock.patch.object(
        transformers.Trainer,
        "_get_train_sampler",
        lambda trainer, *_: torch.utils.data.SequentialSampler(trainer.train_dataset),
    ):
        return train(run, folder, train_dataset=rows, data_collator=_padded)


@pytest.mark.parametrize("zero", [3, *exhaustive(0)])
def test_ranks_agree_on_which_updates_are_one_graph(
    ranks: Pools, tmp_path: Path, zero: int
) -> None:
    """A rank whose micro-batches are alike trains by the loop where another one's are not."""
    run = Run("llama", args={"max_steps": 6, "eval_strategy": "no"})
    wanted, *_ = ranks(2).run(_of_unlike_lengths, run, str(tmp_path / "ddp"))
    sharded = Run(**{**vars(run), "zero": zero, "plugin": WHOLE})
    found, *_ = ranks(2).run(_of_unlike_lengths, sharded, str(tmp_path / "fxzero"))
    assert found.whole_steps == 5
    assert_same(found, wanted, 1e-5)


def as_plain(folder: Path, args: dict[str, Any], whole_steps: int, **more: Any) -> Trainer:
    """Train in one process as Trainer does: what fxzero's was, afterwards.

    Args:
        more: arguments of both, each a function that makes one.
    """
    run = Run("llama", args={"ddp_backend": None, "eval_strategy": "no", **args})
    kept: list[Any] = []

    def one(zero: int | None, name: str) -> Ran:
        with as_torchrun_says():
            plugin = {} if zero is None else WHOLE
            made = {key: make() for key, make in more.items()}
            this = Run(**{**vars(run), "zero": zero, "plugin": plugin})
            trainer = make_trainer(this, str(folder / name), **made)
            kept.append(trainer)
            with mock.patch.object(TrainStep, "__call__", autospec=True, side_effect=CALL) as calls:
                trainer.train()
            return ran(trainer, str(folder / name), calls.call_count)

    wanted, found = one(None, "plain"), one(0, "fxzero")
    assert found.whole_steps == whole_steps
    assert_same(found, wanted, 1e-5)
    return kept[-1]


class _FiveBatches(torch.utils.data.IterableDataset[Any]):
    """An epoch of which ends in the middle of an update."""

    def __iter__(self) -> Any:
        return iter(rows_of("llama", 10))


def test_gradients_of_an_update_cut_short_wait_for_the_next(tmp_path: Path) -> None:
    """The fifth batch of each epoch belongs to no update of that epoch."""
    as_plain(tmp_path, {"max_steps": 7}, whole_steps=4, train_dataset=_FiveBatches)


class _EndsEpoch(transformers.TrainerCallback):
    """Ends the first epoch between two micro-batches."""

    def __init__(self) -> None:
        self.has_ended = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_epoch_stop = state.global_step == 1 and not self.has_ended
        self.has_ended |= control.should_epoch_stop
        return control


def test_an_epoch_that_a_callback_ends_between_micro_batches(tmp_path: Path) -> None:
    """The micro-batch that was waiting is trained on, and its loss is told with the next."""
    as_plain(
        tmp_path,
        {"max_steps": 6},
        whole_steps=4,
        callbacks=lambda: [_EndsEpoch()],
        train_dataset=lambda: rows_of("llama", 8),
    )


class _Counts(torch.optim.Optimizer):
    """Warms up by a counter of its own, in training mode only."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0, "mode": "eval"})

    def train(self) -> None:
        for group in self.param_groups:
            group["mode"] = "train"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            assert group["mode"] == "train"
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    share = min(1.0, group["step"] / 20)
                    parameter.add_(parameter.grad, alpha=-group["lr"] * share)


def test_an_optimizer_of_ones_own_takes_one_step_an_update(tmp_path: Path) -> None:
    trainer = as_plain(
        tmp_path,
        {"max_steps": 6},
        whole_steps=6,
        optimizer_cls_and_kwargs=lambda: (_Counts, {"lr": 0.5}),
    )
    assert trainer.optimizer.param_groups[0]["step"] == 6


class _Hooks(transformers.TrainerCallback):
    """Counts what an optimizer says of its steps."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        optimizer.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1


def test_hooks_of_an_optimizer_are_called_once_an_update(tmp_path: Path) -> None:
    hooks = [_Hooks(), _Hooks()]
    left = list(hooks)
    as_plain(tmp_path, {"max_steps": 3}, whole_steps=3, callbacks=lambda: [left.pop()])
    assert [hook.count for hook in hooks] == [3, 3]


def test_updates_that_are_delayed_are_made_before_somebody_looks(tmp_path: Path) -> None:
    """With `offload_states.delay` the last step leaves one: before each evaluation, and behind the
    training."""
    args = {"max_steps": 4, "eval_steps": 2, "ddp_backend": None}
    run = Run("llama", zero=0, args=args, plugin=WHOLE)
    with mock.patch("fxzero.integrations.transformers.whole_step.use_gradients") as uses:
        train(run, str(tmp_path))
    assert uses.call_count == 3
    (optimizer,) = {call.args[0] for call in uses.call_args_list}
    assert type(optimizer) is torch.optim.AdamW


class _Tightens(transformers.TrainerCallback):
    """Changes the limit of the norm on the way."""

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 2:
            args.max_grad_norm = 0.01


def test_a_callback_may_change_the_limit_of_the_norm(tmp_path: Path) -> None:
    as_plain(
        tmp_path,
        {"max_steps": 4, "optim": "sgd", "learning_rate": 0.5},
        whole_steps=4,
        callbacks=lambda: [_Tightens()],
    )


def _with_positions(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.stack([row["input_ids"] for row in rows]),
        "labels": torch.stack([row["labels"] for row in rows]),
        "position_ids": torch.arange(12)[None],
    }


def test_what_all_rows_share_keeps_micro_batches_apart(tmp_path: Path) -> None:
    """They cannot be told from one tensor by its rows; one micro-batch an update can."""
    collator = {"data_collator": lambda: _with_positions}
    as_plain(tmp_path / "two", {"max_steps": 2}, whole_steps=0, **collator)
    one = {"max_steps": 2, "gradient_accumulation_steps": 1}
    as_plain(tmp_path / "one", one, whole_steps=2, **collator)


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


class _OwnNorm(FxZeroTrainer):
    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return 0.0


class _Patches(transformers.TrainerCallback):
    """Puts something in the way of an update once all is prepared."""

    def __init__(self, patch: Callable[[Any, Any], None]) -> None:
        self._patch = patch
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self._patch(self.trainer, optimizer)


def _replace(owner: Any, name: str) -> None:
    before = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: before(*args, **kwargs))


_PATCHES: dict[str, Callable[[Any, Any], None]] = {
    "accelerator.backward": lambda trainer, _: _replace(trainer.accelerator, "backward"),
    "accelerator.clip_grad_norm_": lambda trainer, _: _replace(
        trainer.accelerator, "clip_grad_norm_"
    ),
    "optimizer.step": lambda _, optimizer: _replace(optimizer, "step"),
}


class _Clamps(torch.optim.Optimizer):
    """Clips each gradient before another optimizer takes it."""

    def __init__(self, params: Any, lr: float) -> None:
        self.optimizer = torch.optim.SGD(params, lr=lr)
        super().__init__(self.optimizer.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_value_(self.param_groups[0]["params"], 1e-3)
        self.optimizer.step(closure)


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
    with pytest.raises(ConfigError, match=r"_OwnNorm\._get_grad_norm would not run"):
        _OwnNorm(model=model, args=args, fxzero=plugin)
    with pytest.raises(ConfigError, match="use FxZeroMixin"):
        transformers.Trainer(model=model, args=args, callbacks=[FxZeroCallback(plugin)])
    with pytest.raises(ConfigError, match="compile=False: leave out one"):
        FxZeroPlugin(whole_step=True, compile=False)
    run = Run(
        "gpt2", zero=0, args={"max_steps": 1, "ddp_backend": None}, plugin={"whole_step": True}
    )
    with as_torchrun_says(), pytest.raises(ConfigError, match="between backward and update"):
        make_trainer(run, str(tmp_path), callbacks=[_LooksAtGradients()]).train()
    for name, patch in _PATCHES.items():
        with as_torchrun_says():
            callback = _Patches(patch)
            callback.trainer = make_trainer(run, str(tmp_path), callbacks=[callback])
            with pytest.raises(ConfigError, match=f"{name}, which somebody has"):
                callback.trainer.train()
    wrapped = {"optimizer_cls_and_kwargs": (_Clamps, {"lr": 0.1})}
    with as_torchrun_says(), pytest.raises(CaptureError, match="_Clamps wraps SGD"):
        make_trainer(run, str(tmp_path), **wrapped).train()
    half = Run(**{**vars(run), "plugin": {**WHOLE, "param_dtype": torch.float16}})
    with as_torchrun_says(), pytest.raises(ConfigError, match="steps that a loss scale skips"):
        make_trainer(half, str(tmp_path)).train()
