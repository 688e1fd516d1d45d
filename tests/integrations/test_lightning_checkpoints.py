"""What FxZeroStrategy writes and reads: one file, as DDP does, or a folder of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as callbacks
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO

from fxzero.integrations.lightning import consolidate
from tests.integrations import lightning_habits as habits
from tests.integrations.lightning_runs import Fitted, Module, evaluate, fit, try_to_fit
from tests.integrations.test_lightning import assert_same
from tests.parity.harness import Pools
from tests.tiers import exhaustive

FOLDER = {"zero": 3, "save_distributed_checkpoint": True}


@pytest.fixture(scope="module")
def at_ddp(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Fitted], Path]:
    """A run under DDP, and its checkpoint after the first of two epochs."""
    path = tmp_path_factory.mktemp("ddp")
    ranks(2).run(fit, None, str(path), max_epochs=1)
    second = ranks(2).run(fit, None, str(path / "on"), ckpt_path=str(path / "last.ckpt"))
    return second, path / "last.ckpt"


@pytest.mark.parametrize("make", [habits.OnMeta, *exhaustive(Module)])
def test_a_run_goes_on_from_a_checkpoint_of_ddp(
    ranks: Pools, at_ddp: tuple[list[Fitted], Path], tmp_path: Path, make: Any
) -> None:
    second, path = at_ddp
    assert_same(
        ranks(2).run(fit, {"zero": 3}, str(tmp_path), make=make, ckpt_path=str(path)), second
    )


def test_ddp_goes_on_from_ours(
    ranks: Pools, at_ddp: tuple[list[Fitted], Path], tmp_path: Path
) -> None:
    second, _ = at_ddp
    ranks(2).run(fit, {"zero": 2}, str(tmp_path), max_epochs=1)
    last = str(tmp_path / "last.ckpt")
    assert_same(ranks(2).run(fit, None, str(tmp_path / "on"), ckpt_path=last), second)
    loaded = Module.load_from_checkpoint(last)
    assert loaded.hparams == {"hidden": 16, "dropout": 0.0, "lr": 1e-2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [{"zero": 3}, FOLDER], ids=["file", "folder"])
def test_dropout_goes_on_as_it_would_have(
    ranks: Pools, tmp_path: Path, zero: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"of_module": {"dropout": 0.3}}
    whole = ranks(2).run(fit, zero, str(tmp_path / "whole"), **settings)
    first = ranks(2).run(fit, zero, str(tmp_path), max_epochs=1, **settings)
    last = str(tmp_path / "last.ckpt")
    second = ranks(2).run(fit, zero, str(tmp_path / "on"), ckpt_path=last, **settings)
    for run, half in zip(second, first, strict=True):
        run.losses = half.losses + run.losses
    assert_same(second, whole, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [{"zero": 3}, FOLDER], ids=["file", "folder"])
def test_another_number_of_ranks_reads_it(
    ranks: Pools, tmp_path: Path, zero: dict[str, Any]
) -> None:
    """Trains on as a single process that reads the same, and evaluates alike."""
    ranks(2).run(fit, zero, str(tmp_path), max_epochs=1)
    last = tmp_path / "last.ckpt"
    values, predicted = ranks(2).run(evaluate, zero, str(tmp_path), str(last))[0]
    if last.is_dir():
        consolidate(last, tmp_path / "whole.ckpt")
        loaded = Module.load_from_checkpoint(tmp_path / "whole.ckpt")
        assert loaded.hparams == {"hidden": 16, "dropout": 0.0, "lr": 1e-2}
    (alone,) = ranks(1).run(fit, {"zero": 1}, str(tmp_path / "a"), ckpt_path=str(last))
    assert len(alone.losses) == 20
    here, answers = ranks(1).run(evaluate, {"zero": 3}, str(tmp_path), str(last))[0]
    assert here == pytest.approx(values, abs=1e-6)
    assert torch.equal(answers[::2][: len(predicted)], predicted) or torch.equal(
        answers[: len(predicted)], predicted
    )
    if not last.is_dir():
        (there,) = ranks(1).run(fit, None, str(tmp_path / "b"), ckpt_path=str(last))
        assert_same([alone], [there])


@pytest.mark.exhaustive
def test_two_optimizers_are_in_a_folder(ranks: Pools, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"make": habits.Adversaries}
    whole = ranks(2).run(fit, FOLDER, str(tmp_path / "whole"), **settings)
    ranks(2).run(fit, FOLDER, str(tmp_path), max_epochs=1, **settings)
    last = str(tmp_path / "last.ckpt")
    second = ranks(2).run(fit, FOLDER, str(tmp_path / "on"), ckpt_path=last, **settings)
    for run, reference in zip(second, whole, strict=True):
        run.losses = reference.losses[: -len(run.losses)] + run.losses
    assert_same(second, whole, 0)


@pytest.mark.exhaustive
def test_what_a_folder_cannot_hold_is_refused(ranks: Pools, tmp_path: Path) -> None:
    averages = [callbacks.WeightAveraging(), callbacks.ModelCheckpoint(tmp_path / "a")]
    said = ranks(2).run(try_to_fit, FOLDER, str(tmp_path), callbacks=averages, max_epochs=1)
    assert all("save_distributed_checkpoint=False" in text for text in said), said
    said = ranks(2).run(try_to_fit, FOLDER, str(tmp_path), plugins=[AsyncCheckpointIO()])
    assert all("AsyncCheckpointIO would write a file" in text for text in said), said


@pytest.mark.exhaustive
def test_a_file_may_be_written_by_a_plugin_and_holds_averages(ranks: Pools, tmp_path: Path) -> None:
    """Averages of weights are those of DDP; a thread writes the file."""
    runs = []
    for name, zero in (("ddp", None), ("ours", {"zero": 3})):
        kept = callbacks.ModelCheckpoint(tmp_path / name, save_last=True)
        settings: dict[str, Any] = {
            "callbacks": [callbacks.WeightAveraging(), kept],
            "plugins": [AsyncCheckpointIO()],
        }
        runs.append(ranks(2).run(fit, zero, str(tmp_path), **settings))
    assert_same(runs[1], runs[0])
    first, second = (
        torch.load(tmp_path / name / "last.ckpt")["state_dict"] for name in ("ddp", "ours")
    )
    assert first.keys() == second.keys()
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
