"""What FxZeroTrainer writes: checkpoints to go on from, and folders that others read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import TrainerCallback

from fxzero.errors import CheckpointError
from fxzero.integrations.whole import whole_weights
from tests.integrations.trainer_runs import (
    Ran,
    Run,
    as_torchrun_says,
    assert_same,
    make_trainer,
    ran,
    train,
)
from tests.parity.harness import Pools

SHORT = {"max_steps": 4, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def _read_back(run: Run, folder: str) -> tuple[Ran, dict[str, dict[str, Tensor]]]:
    """Train, write weights in each of the ways there are, and read them as others do."""
    with as_torchrun_says():
        trainer = make_trainer(run, folder)
        trainer.train()
        trainer.save_model(f"{folder}/saved")
        trainer.model.save_pretrained(f"{folder}/pretrained", max_shard_size="5KB")
        torch.distributed.barrier()
        kind = type(trainer.model)
        read = {}
        for name in ("saved", "pretrained", "checkpoint-4"):
            model = kind.from_pretrained(f"{folder}/{name}")
            read[name] = dict(model.state_dict())
        return ran(trainer, folder), read


def test_whole_weights_are_what_from_pretrained_reads(ranks: Pools, tmp_path: Path) -> None:
    """Of a model with tied weights; one file, or several with an index."""
    run = Run("gpt2", zero=3, args=SHORT, plugin={"compile": False, "options": None})
    found, read = ranks(2).run(_read_back, run, str(tmp_path))[0]
    for weights in read.values():
        assert weights.keys() == found.weights.keys()
        for name, weight in found.weights.items():
            assert torch.equal(weights[name], weight), name
    assert "pretrained/model.safetensors.index.json" in found.files
    for name in ("config.json", "trainer_state.json", "scheduler.pt", "rng_state_1.pth"):
        assert f"checkpoint-4/{name}" in found.files
    assert "checkpoint-4/fxzero/step-0000000004" in found.files
    assert not any("optimizer.pt" in name for name in found.files)


class _Worsen(TrainerCallback):
    """Makes the weights of the last steps bad, so that the best are earlier ones."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                for parameter in kwargs["model"].parameters():
                    parameter.mul_(3.0)


def _best(run: Run, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    with as_torchrun_says():
        trainer = make_trainer(run, folder, callbacks=[_Worsen()])
        trainer.train()
        kept = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-2")
        names = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        return whole_weights(trainer.model, keep=True), dict(kept.state_dict()), names


@pytest.mark.parametrize("only_model", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_best_model_is_loaded_at_the_end(
    ranks: Pools, tmp_path: Path, only_model: bool
) -> None:
    args = {
        **SHORT,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "save_only_model": only_model,
    }
    run = Run("llama", zero=2, args=args, plugin={"compile": False, "options": None})
    loaded, best, kept = ranks(2).run(_best, run, str(tmp_path))[0]
    assert kept == ["checkpoint-2"]
    for name, weight in best.items():
        assert torch.equal(loaded[name], weight), name


def _resume(run: Run, folder: str) -> Ran:
    return train(run, folder)


def test_a_checkpoint_that_was_not_finished_is_skipped(ranks: Pools, tmp_path: Path) -> None:
    eager = {"compile": False, "options": None}
    run = Run("llama", zero=1, args=SHORT, plugin=eager)
    whole = ranks(2).run(train, run, str(tmp_path))[0]
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    again = Run(**{**vars(run), "resume": True})
    resumed = ranks(2).run(train, again, str(tmp_path))[0]
    assert_same(resumed, whole, 1e-6, since=2)
    shutil.rmtree(tmp_path)
    with pytest.raises(AssertionError, match="has no checkpoint that is whole"):
        ranks(2).run(train, again, str(tmp_path))


@pytest.mark.exhaustive
def test_another_stage_goes_on(ranks: Pools, tmp_path: Path) -> None:
    """Shards of ZeRO-3 under ZeRO-1: what is saved are parameters by name."""
    eager = {"compile": False, "options": None}
    run = Run("gpt2", zero=3, args=SHORT, plugin=eager)
    whole = ranks(2).run(train, run, str(tmp_path))[0]
    again = Run(**{**vars(run), "zero": 1, "resume": str(tmp_path / "checkpoint-2")})
    assert_same(ranks(2).run(train, again, str(tmp_path))[0], whole, 1e-5, since=2)


def _refused(run: Run, folder: str) -> str:
    try:
        train(run, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_optimizer_of_whole_parameters_is_not_taken(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(train, Run("llama", args={**SHORT, "eval_strategy": "no"}), str(tmp_path))
    eager = {"compile": False, "options": None}
    run = Run("llama", zero=1, args=SHORT, plugin=eager, resume=str(tmp_path / "checkpoint-2"))
    said = ranks(2).run(_refused, run, str(tmp_path / "again"))
    assert all("Begin with its weights: from_pretrained(" in text for text in said)
