"""transformers' Trainer over fxzero: what plain Trainer computes under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

from fxzero.errors import ConfigError
from fxzero.integrations.transformers import FxZeroCallback, FxZeroPlugin
from fxzero.integrations.whole import whole_weights
from tests.integrations.trainer_runs import (
    CHEAP,
    Ran,
    Run,
    as_torchrun_says,
    assert_same,
    make_trainer,
    train,
    train_as_ddp,
    train_on_two,
)
from tests.parity.harness import Pools

SAVING = {"max_steps": 6, "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param(0, marks=pytest.mark.exhaustive),
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(2, marks=pytest.mark.exhaustive),
        3,
    ],
)
def test_a_causal_language_model_trains_as_under_ddp(
    ranks: Pools, tmp_path: Path, zero: int
) -> None:
    """Twenty steps of two micro-batches with other numbers of labels, clipped, evaluated."""
    found = train_as_ddp(ranks, tmp_path, Run("llama"), zero, 1e-5)
    norms = [line["grad_norm"] for line in found.logs if "grad_norm" in line]
    assert max(norms) > 0.3, "nothing was clipped"


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 3])
def test_in_float64_only_the_order_of_sums_differs(ranks: Pools, tmp_path: Path, zero: int) -> None:
    run = Run("llama", dtype=torch.float64, own_loss=True, args={"max_steps": 5, "eval_steps": 5})
    train_as_ddp(ranks, tmp_path, run, zero, 1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["gpt2", "t5", "vit", "resnet"])
@pytest.mark.parametrize("zero", [1, 3])
def test_other_models_train_as_under_ddp(
    ranks: Pools, tmp_path: Path, model: str, zero: int
) -> None:
    # Under DDP each rank evaluates with the statistics of its own last batch, as nobody sends
    # buffers there; here all have those of rank 0, which are saved.
    args = {"eval_strategy": "no"} if model == "resnet" else {}
    train_as_ddp(ranks, tmp_path, Run(model, args={**args, "adam_epsilon": 1e-3}), zero, 1e-5)


@pytest.mark.exhaustive
def test_whole_gradients_are_reduced_once_a_step(ranks: Pools, tmp_path: Path) -> None:
    """At ZeRO 1 whole gradients are kept over the micro-batches, as by DDP's no_sync."""
    args = {"max_steps": 3, "eval_strategy": "no"}
    counts = {
        micro: train_on_two(
            ranks,
            tmp_path / str(micro),
            Run("llama", zero=1, args={**args, "gradient_accumulation_steps": micro}),
        ).reduces
        for micro in (1, 4)
    }
    assert counts[1] == counts[4] > 0


@pytest.mark.parametrize(
    ("zero", "model"), [(3, "llama"), pytest.param(1, "gpt2", marks=pytest.mark.exhaustive)]
)
def test_going_on_half_way_is_as_if_nothing_had_happened(
    ranks: Pools, tmp_path: Path, zero: int, model: str
) -> None:
    """With dropout: generators, the schedule, the moments and the place in the data go on."""
    run = Run(model, zero=zero, dropout=0.2, args=SAVING)
    whole = train_on_two(ranks, tmp_path, run)
    assert any(line["step"] > 3 for line in whole.logs)
    again = Run(**{**vars(run), "resume": str(tmp_path / "checkpoint-3")})
    resumed = train_on_two(ranks, tmp_path, again)
    assert_same(resumed, whole, 1e-6, since=3)


@pytest.mark.exhaustive
def test_ranks_generate_together(ranks: Pools, tmp_path: Path) -> None:
    """A rank whose rows have ended goes on while others do not: each holds what others need."""
    args = {
        "max_steps": 4,
        "eval_steps": 4,
        "predict_with_generate": True,
        "generation_max_length": 8,
    }
    found = train_as_ddp(ranks, tmp_path, Run("t5", args=args), 3, 1e-4)
    assert any("eval_tokens" in line for line in found.logs)


def test_bf16_counts_tokens_in_whole_numbers(ranks: Pools, tmp_path: Path) -> None:
    """More than 256 labels, which bfloat16 would round: as under DDP, but for bfloat16 itself."""
    args = {"bf16": True, "max_steps": 3, "eval_strategy": "no", "gradient_accumulation_steps": 12}
    wanted = train_on_two(ranks, tmp_path / "ddp", Run("llama", args=args))
    found = train_on_two(ranks, tmp_path / "fxzero", Run("llama", zero=2, args=args))
    for line, other in zip(found.logs, wanted.logs, strict=True):
        if "loss" in line:
            assert line["loss"] == pytest.approx(other["loss"], rel=2e-4)
            assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=5e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["adafactor", "adagrad", "adamw_torch_fused", "rmsprop", "sgd"])
def test_optimizers_that_trainer_makes_are_right_on_shards(
    ranks: Pools, tmp_path: Path, name: str
) -> None:
    # RMSprop's first step is lr / sqrt(1 - 0.99) wherever there is a gradient, however small: what
    # another order of sums moves of it is ten times as much as under Adam.
    rate = {"learning_rate": 5e-6} if name == "rmsprop" else {}
    args = {"optim": name, "max_steps": 6, **rate}
    train_as_ddp(ranks, tmp_path, Run("llama", args=args), 3, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama", "t5"])
def test_activations_are_checkpointed(ranks: Pools, tmp_path: Path, model: str) -> None:
    run = Run(model, args={"gradient_checkpointing": True, "max_steps": 4})
    train_as_ddp(ranks, tmp_path, run, 3, 1e-5)


class _Writes(TrainerCallback):
    """Lets the model write, as people do to see how far it is."""

    def on_train_end(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        """Ranks write texts of other lengths."""
        model.eval()
        rank = args.process_index
        prompt = torch.arange(1, 6)[None]
        self.text = model.generate(
            prompt, max_new_tokens=3 + 4 * rank, do_sample=False, pad_token_id=0
        )


def _written(run: Run, folder: str) -> list[int]:
    writer = _Writes()
    train(run, folder, callbacks=[writer])
    written: list[int] = writer.text[0].tolist()
    return written


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_callback_may_generate_on_all_ranks(ranks: Pools, tmp_path: Path, zero: int) -> None:
    args = {"max_steps": 3, "eval_strategy": "no"}
    wanted = ranks(2).run(_written, Run("llama", args=args), str(tmp_path / "ddp"))
    found = ranks(2).run(_written, Run("llama", zero=zero, args=args), str(tmp_path / "fxzero"))
    assert [len(text) for text in found] == [8, 12]
    assert found == wanted


class _Gated(nn.Module):
    """A layer that some micro-batches use, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gated = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Rows (B, 4), twice."""
        y = self.body(x)
        if self.calls % 4 < 2:
            y = y + self.gated(x)
        self.calls += 1
        return {"loss": (y - labels).square().mean()}


def _gated(run: Run, folder: str) -> Ran:
    numbers = torch.Generator().manual_seed(1)
    rows = [{k: torch.randn(4, generator=numbers) for k in ("x", "labels")} for _ in range(64)]
    torch.manual_seed(0)
    return train(run, folder, model=_Gated(), train_dataset=rows)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_layer_may_be_used_by_micro_batches_before_the_last_alone(
    ranks: Pools, tmp_path: Path, zero: int
) -> None:
    """Of three micro-batches another one, or two, in each step."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 10}
    args = {**settings, "eval_strategy": "no", "ddp_find_unused_parameters": True}
    wanted = ranks(2).run(_gated, Run("llama", args=args), str(tmp_path / "ddp"))[0]
    plugin = {"compile": False, "options": None}
    sharded = Run("llama", zero=zero, args=args, plugin=plugin)
    found = ranks(2).run(_gated, sharded, str(tmp_path / "fxzero"))[0]
    assert_same(found, wanted, 1e-5)


def _with_callback(run: Run, folder: str) -> Ran:
    callback = FxZeroCallback(FxZeroPlugin(zero=3, options=CHEAP))
    return train(run, folder, callbacks=[callback])


def test_a_callback_trains_as_ddp_does(ranks: Pools, tmp_path: Path) -> None:
    run = Run("llama", args={"max_steps": 5, "eval_steps": 5})
    wanted = train_on_two(ranks, tmp_path / "ddp", run)
    found = ranks(2).run(_with_callback, run, str(tmp_path / "callback"))[0]
    assert found.reduces > 0
    assert_same(found, wanted, 1e-5)


@pytest.mark.exhaustive
def test_a_callback_generates_in_evaluation(ranks: Pools, tmp_path: Path) -> None:
    args = {
        "max_steps": 4,
        "eval_steps": 4,
        "predict_with_generate": True,
        "generation_max_length": 8,
    }
    run = Run("t5", args=args)
    wanted = train_on_two(ranks, tmp_path / "ddp", run)
    found = ranks(2).run(_with_callback, run, str(tmp_path / "callback"))[0]
    assert_same(found, wanted, 1e-4)


def _saved_by_callback(run: Run, folder: str) -> str:
    """Weights by the model's own call; and what the Trainer's says."""
    with as_torchrun_says():
        callback = FxZeroCallback(FxZeroPlugin(zero=3, options=CHEAP))
        trainer = make_trainer(run, folder, callbacks=[callback])
        trainer.train()
        trainer.model.save_pretrained(f"{folder}/saved")
        weights = whole_weights(trainer.model, keep=True)
        if trainer.args.process_index:
            trainer.save_model()  # nothing, as under DDP
            return ""
        read = load_file(f"{folder}/saved/model.safetensors")
        assert all(torch.equal(read[name], weights[name]) for name in read)
        with pytest.raises(ConfigError) as refused:
            trainer.save_model()
        return str(refused.value)


def test_a_callback_says_how_weights_are_saved(ranks: Pools, tmp_path: Path) -> None:
    """Trainer's own call is made on rank 0 alone, which would wait for ever for the others."""
    run = Run("llama", args={"max_steps": 1, "eval_strategy": "no"})
    said, _ = ranks(2).run(_saved_by_callback, run, str(tmp_path))
    assert "trainer.model.save_pretrained(folder) on all ranks" in said
