"""Lightning's Trainer with FxZeroStrategy, against the same script under its own DDPStrategy."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.lightning_runs import Fitted, fit, run_example
from tests.integrations.peaks import held_bytes
from tests.parity.harness import Pools
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[2]
USUAL = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 4}
"""Twenty steps of two micro-batches on two ranks."""


def assert_same(here: list[Fitted], there: list[Fitted], tolerance: float = 1e-5) -> None:
    """Each rank's losses, whole weights, metrics and steps are those of another run."""
    for mine, other in zip(here, there, strict=True):
        assert mine.global_step == other.global_step
        assert mine.losses == pytest.approx(other.losses, abs=tolerance)
        assert mine.metrics == pytest.approx(other.metrics, abs=tolerance)
        assert mine.weights.keys() == other.weights.keys()
        for name, value in mine.weights.items():
            torch.testing.assert_close(value, other.weights[name], rtol=0, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def under_ddp(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> list[Fitted]:
    """The usual run, under Lightning's own strategy."""
    return ranks(2).run(fit, None, str(tmp_path_factory.mktemp("ddp")), **USUAL)


@pytest.mark.parametrize("zero", [1, *exhaustive(0, 2, 3)])
def test_it_trains_as_ddp_does(
    ranks: Pools, under_ddp: list[Fitted], tmp_path: Path, zero: int
) -> None:
    fitted = ranks(2).run(fit, {"zero": zero}, str(tmp_path), **USUAL)
    assert fitted[0].global_step == 20
    assert fitted[0].losses != fitted[1].losses, "the ranks have seen the same data"
    assert_same(fitted, under_ddp)
    reduces = 20 if zero < 2 else 40  # stages 0 and 1: once for all micro-batches of a step
    assert fitted[0].reduced_bytes == reduces * sum(v.nbytes for v in under_ddp[0].weights.values())


@pytest.mark.parametrize("folder", [True, *exhaustive(False)])
def test_a_run_that_stops_half_way_goes_on_as_if_it_had_not(
    ranks: Pools, under_ddp: list[Fitted], tmp_path: Path, folder: bool
) -> None:
    settings: dict[str, Any] = {"zero": 3, "save_distributed_checkpoint": folder}
    first = ranks(2).run(fit, settings, str(tmp_path), **{**USUAL, "max_epochs": 2})
    last = tmp_path / "last.ckpt"
    assert last.is_dir() == folder
    second = ranks(2).run(fit, settings, str(tmp_path), ckpt_path=str(last), **USUAL)
    for whole, half, other in zip(under_ddp, first, second, strict=True):
        other.losses = half.losses + other.losses
        assert other.global_step == whole.global_step == 20
    assert_same(second, under_ddp)


@pytest.mark.exhaustive
def test_zero_3_holds_at_most_six_tenths_of_what_ddp_does() -> None:
    """Where states are nearly all there is; resident memory above that of the imports."""
    ddp, ours = (
        held_bytes("tests.integrations.lightning_peak", name) for name in ("ddp", "fxzero")
    )
    print(f"DDP {ddp / 1e6:.0f} MB, ZeRO-3 {ours / 1e6:.0f} MB: {ours / ddp:.2f}")
    assert ours <= 0.6 * ddp


@pytest.mark.exhaustive
def test_lightning_starts_the_other_rank_by_itself(tmp_path: Path) -> None:
    """A plain script, without torchrun."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "lightning_lm.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "ZeRO-3 over 2 ranks" in run.stderr + run.stdout
    assert (tmp_path / "outputs" / "lightning_lm" / "last.ckpt").is_file()


def lines_of(name: str) -> list[str]:
    """An example, without what its docstring says of it."""
    text = (ROOT / "examples" / f"{name}.py").read_text()
    return text.partition("from __future__")[2].splitlines()


def test_the_two_examples_differ_by_four_lines() -> None:
    """The page shows them."""
    ddp, ours = lines_of("lightning_lm_ddp"), lines_of("lightning_lm")
    changed = [
        line
        for line in difflib.unified_diff(ddp, ours, n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]
    assert 0 < len([line for line in changed if line[0] == "+"]) <= 4
    page = (ROOT / "docs" / "pages" / "integrations" / "lightning.md").read_text()
    assert [line for line in changed if f"\n{line}\n" not in page] == []


@pytest.mark.exhaustive
def test_the_two_examples_train_alike(ranks: Pools, tmp_path: Path) -> None:
    """By the default settings."""
    there = ranks(2).run(run_example, "lightning_lm_ddp", str(tmp_path / "ddp"))
    here = ranks(2).run(run_example, "lightning_lm", str(tmp_path / "ours"))
    assert here[0].global_step == 20
    assert_same(here, there, 1e-9)
