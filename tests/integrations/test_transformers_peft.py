"""Adapters of peft under FxZeroTrainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from fxzero.integrations.whole import whole_weights
from tests.integrations.trainer_runs import (
    Ran,
    Run,
    as_torchrun_says,
    assert_same,
    llama,
    make_trainer,
    ran,
    train,
)
from tests.parity.harness import Pools

SAVING = {"max_steps": 8, "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}


def _train_and_read(run: Run, folder: str) -> tuple[Ran, float]:
    """Train adapters, and how far those are off that peft reads from the folder."""
    from peft import PeftModel

    with as_torchrun_says():
        trainer = make_trainer(run, folder)
        trainer.train(resume_from_checkpoint=run.resume)
        trainer.save_model(f"{folder}/saved")
        torch.distributed.barrier()
        weights = whole_weights(trainer.model, keep=True)
        read = PeftModel.from_pretrained(llama(0.0), f"{folder}/saved").state_dict()
        off = max(
            float((read[name] - weight).abs().max())
            for name, weight in weights.items()
            if "lora_" in name
        )
        return ran(trainer, folder), off


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_adapters_train_as_under_ddp_and_go_on(ranks: Pools, tmp_path: Path, zero: int) -> None:
    run = Run("lora", args=SAVING)
    wanted = ranks(2).run(train, run, str(tmp_path / "ddp"))[0]
    folder = tmp_path / "fxzero"
    sharded = Run("lora", zero=zero, args=SAVING)
    found, off = ranks(2).run(_train_and_read, sharded, str(folder))[0]
    assert_same(found, wanted, 1e-5)
    assert off == 0.0
    assert "saved/adapter_model.safetensors" in found.files
    assert "checkpoint-4/model.safetensors" not in found.files
    shards = FileSystemReader(folder / "checkpoint-4/fxzero/step-0000000004").read_metadata()
    frozen = [n for n in shards.state_dict_metadata if "model." in n and "lora_" not in n]
    assert not frozen, "the frozen model was saved too"

    again = Run("lora", zero=zero, args=SAVING, resume=str(folder / "checkpoint-4"))
    resumed, _ = ranks(2).run(_train_and_read, again, str(folder))[0]
    assert_same(resumed, found, 1e-6, since=4)


def _merged(run: Run, folder: str) -> dict[str, torch.Tensor]:
    with as_torchrun_says():
        trainer = make_trainer(run, folder)
        trainer.train()
        merged = trainer.model.merge_and_unload()
        if run.zero is not None or trainer.is_world_process_zero():
            merged.save_pretrained(f"{folder}/merged")
        torch.distributed.barrier()
        return load_file(f"{folder}/merged/model.safetensors")


def test_merged_adapters_are_saved_whole(ranks: Pools, tmp_path: Path) -> None:
    """What is pushed when one is done: the base model with the adapters in its weights."""
    args = {"max_steps": 4, "eval_strategy": "no"}
    wanted = ranks(2).run(_merged, Run("lora", args=args), str(tmp_path / "ddp"))[0]
    found = ranks(2).run(_merged, Run("lora", zero=3, args=args), str(tmp_path / "fxzero"))[0]
    assert found.keys() == wanted.keys()
    plain = llama(0.0).state_dict()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
        assert weight.shape == plain[name].shape
