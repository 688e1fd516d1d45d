"""`examples/logs.py` in a loop of one's own, and in transformers' Trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import fxzero
from examples.failures import SettingsError
from examples.logs import StepLog, open_log
from examples.meter import Meter
from examples.trainer_log import trainer_log
from tests.examples.running import losses, metrics


def test_a_loop_logs_its_first_step_its_last_and_every_third(tmp_path: Path) -> None:
    """To both files the same, with what a step took; not a number is nothing."""
    model = fxzero.shard(nn.Linear(4, 4))
    with open_log(tmp_path, 7, {"lr": 0.1}) as log:
        steps = StepLog(log, model, every=3, samples_per_step=2, tokens_per_step=10)
        for step in range(1, 8):
            steps.after(step, torch.tensor(float(step)), lr=0.1)
    logged = [record for record in metrics(tmp_path) if "loss" in record]
    assert [(r["step"], r["loss"]) for r in logged] == [(1, 1.0), (3, 3.0), (6, 6.0), (7, 7.0)]
    for record in logged:
        assert "grad_norm" not in record
        assert record["tokens_per_s"] == pytest.approx(10 / record["step_s"])
        assert record["samples_per_s"] == pytest.approx(2 / record["step_s"])
        assert record["peak_bytes"] >= record["memory_bytes"] > 1 << 20
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(e.step, e.value) for e in events.Scalars("loss")]
    assert scalars == [(r["step"], r["loss"]) for r in logged]
    assert (tmp_path / "config.yaml").read_text() == "lr: 0.1\n"


def test_a_meter_counts_the_steps_since_its_last_reading() -> None:
    """And nothing of what was done in between."""
    meter = Meter(fxzero.shard(nn.Linear(4, 4)), samples_per_step=6, step=10)
    meter.restart(20)
    found = meter.read(24)
    assert found.samples_per_s == pytest.approx(6 / found.step_s)
    assert found.tokens_per_s is None
    assert "samples/s" in str(found)


def test_wandb_is_asked_for_and_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence before anything is written."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(SettingsError, match="pip install wandb"):
        open_log(tmp_path / "run", 1, wandb=True)
    assert not (tmp_path / "run").exists()


def test_wandb_offline(tmp_path: Path) -> None:
    """A folder that `wandb sync` takes."""
    pytest.importorskip("wandb", reason="optional: pip install wandb")
    with open_log(tmp_path, 1, {"lr": 0.1}, wandb=True) as log:
        log.record(1, loss=2.0)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Eight rows of numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        return {"x": torch.full((4,), float(index))}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))


class Model(nn.Module):
    """As Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(B, 4) → a loss."""
        return {"loss": self.linear(x).square().mean()}


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    """Its own numbers, with ours beside them."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path / "trainer"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        Model(),
        arguments,
        train_dataset=Rows(),
        callbacks=[trainer_log(tmp_path / "log", tokens_per_step=40)],
    )
    trainer.train()
    told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses(tmp_path / "log") == told
    logged = [record for record in metrics(tmp_path / "log") if "loss" in record]
    assert [record["step"] for record in logged] == [2, 4]
    for record in logged:
        assert record["samples_per_s"] == pytest.approx(4 / record["step_s"])
        assert record["tokens_per_s"] == pytest.approx(40 / record["step_s"])
        assert math.isfinite(record["grad_norm"])
    assert json.loads((tmp_path / "log/metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
