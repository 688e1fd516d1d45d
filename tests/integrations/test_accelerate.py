"""accelerate's loop under fxzero is what it is under DistributedDataParallel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.integrations.accelerate_runs import Loop, Ran, reduces, run, saves
from tests.integrations.peaks import held_bytes
from tests.parity.harness import Pools


def _close(found: Ran, wanted: Ran, bitwise: bool = False) -> None:
    rtol = atol = 0.0 if bitwise else 1e-5
    for name in ("losses", "norms"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        theirs = theirs[len(theirs) - len(ours) :]
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.predictions, wanted.predictions, rtol=rtol, atol=atol)
    for name in ("weights", "moments", "average"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            _near(key, ours[key], value, rtol)


def _near(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape, name
    most = wanted.double().abs().max() if wanted.numel() else torch.zeros(())
    difference = (found.double() - wanted.double()).abs().max()
    assert difference <= tolerance * most.clamp(min=1.0), (name, difference, most)


CASES = [
    pytest.param(Loop(zero=0), marks=pytest.mark.exhaustive),
    Loop(zero=3, average=True),
    Loop(zero=2, model="conv", accumulate=1, clip="value"),
    pytest.param(Loop(zero=1), marks=pytest.mark.exhaustive),
    pytest.param(Loop(zero=2, sharded_before=True), marks=pytest.mark.exhaustive),
    pytest.param(Loop(zero=1, model="conv", clip="value"), marks=pytest.mark.exhaustive),
    pytest.param(
        Loop(zero=3, steps=8, args={"mixed_precision": "bf16"}), marks=pytest.mark.exhaustive
    ),
]


@pytest.mark.parametrize("loop", CASES, ids=str)
def test_losses_norms_predictions_weights_and_moments_are_those_of_ddp(
    ranks: Pools, loop: Loop
) -> None:
    wanted = ranks(2).run(run, replace(loop, zero=None, sharded_before=False, plugin={}))
    found = ranks(2).run(run, loop)
    assert wanted[0].losses[0] > wanted[0].losses[-1] > 0
    if "mixed_precision" in loop.args:
        torch.testing.assert_close(found[0].losses, wanted[0].losses, rtol=2e-2, atol=2e-2)
        return
    _close(found[0], wanted[0])
    assert found[1].losses == found[0].losses
    assert not found[1].weights  # whole on the main process alone


@pytest.mark.parametrize("zero", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_run_that_resumes_half_way_ends_bitwise_as_one_that_did_not_stop(
    ranks: Pools, tmp_path: Path, zero: int
) -> None:
    loop = Loop(zero=zero, steps=4, folder=str(tmp_path), save_at=4, average=True)
    whole = ranks(2).run(run, loop)
    resumed = ranks(2).run(run, replace(loop, resume=True))
    assert len(resumed[0].losses) == 4
    _close(resumed[0], whole[0], bitwise=True)


@pytest.mark.exhaustive
def test_another_number_of_ranks_goes_on(ranks: Pools, tmp_path: Path) -> None:
    loop = Loop(zero=3, steps=4, accumulate=2, folder=str(tmp_path), save_at=8, average=True)
    saved = ranks(2).run(run, loop)
    loaded = ranks(1).run(run, replace(loop, resume=True))
    for name, value in saved[0].weights.items():
        assert torch.equal(loaded[0].weights[name], value)
    for name, value in saved[0].moments.items():
        assert torch.equal(loaded[0].moments[name], value)
    for name, value in saved[0].average.items():
        assert torch.equal(loaded[0].average[name], value)


@pytest.mark.parametrize(("zero", "wanted"), [(1, [False, True] * 2), (2, [True] * 4)])
def test_accumulation_reduces_once_where_gradients_are_kept(
    ranks: Pools, zero: int, wanted: list[bool]
) -> None:
    assert ranks(2).run(reduces, Loop(zero=zero)) == [wanted] * 2


def test_hooks_limits_and_whole_weights(ranks: Pools, tmp_path: Path) -> None:
    loop = Loop(zero=3, folder=str(tmp_path))
    found: list[dict[str, Any]] = ranks(2).run(saves, loop)
    assert found[0]["called"] == [("save", 1)] * 3 + [("load", 1)]
    assert found[0]["folders"] == ["checkpoint_1", "checkpoint_2"]
    assert "model.safetensors.index.json" in found[0]["whole"]
    assert found[0]["hooks"] == 1
    config = transformers.AutoConfig.from_pretrained(tmp_path / "pretrained")
    for folder in ("whole", "pretrained"):
        model = transformers.BertForSequenceClassification.from_pretrained(
            tmp_path / folder, config=config
        )
        for name, value in model.state_dict().items():
            assert torch.equal(value, found[0]["weights"][name])


@pytest.mark.exhaustive
def test_zero_3_holds_at_most_six_tenths_of_what_ddp_does() -> None:
    """Where states are nearly all there is; resident memory above that of the imports."""
    ddp, ours = (held_bytes("tests.integrations.accelerate_peak", name) for name in ("ddp", "3"))
    print(f"DDP {ddp / 1e6:.0f} MB, ZeRO-3 {ours / 1e6:.0f} MB: {ours / ddp:.2f}")
    assert ours <= 0.6 * ddp
