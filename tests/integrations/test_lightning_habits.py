"""What people do under Lightning besides a plain fit, with FxZeroStrategy against DDPStrategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as callbacks
import pytest
from lightning.pytorch.plugins import MixedPrecision

from tests.integrations import lightning_habits as habits
from tests.integrations.lightning_runs import Module, fit
from tests.integrations.test_lightning import assert_same
from tests.parity.harness import Pools
from tests.tiers import exhaustive


@dataclass(frozen=True)
class Habit:
    """A way to train."""

    make: Any = Module
    zero: dict[str, Any] = field(default_factory=lambda: {"zero": 3})
    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    ddp: str = "ddp"


UNUSED = "ddp_find_unused_parameters_true"
"""What DDP must be told where a backward does not reach all parameters."""
HABITS = {
    "its child is called": Habit(habits.CallsItsChild),
    "parts are touched": Habit(habits.TouchesParts),
    "buffers change": Habit(habits.Sums),
    "buffers of a child change": Habit(habits.ChildSums),
    "metrics": Habit(habits.Measures),
    "two optimizers by hand": Habit(habits.Adversaries, ddp=UNUSED),
    "two optimizers by hand, zero 1": Habit(habits.Adversaries, {"zero": 1}, ddp=UNUSED),
    "an optimizer from before": Habit(habits.ListedEarly),
    "clipped by value": Habit(
        settings={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    ),
    "not compiled": Habit(zero={"zero": 3, "compile": False}),
    "bf16-mixed": Habit(settings={"precision": "bf16-mixed"}, tolerance=5e-2),
    "16-mixed": Habit(
        settings={"plugins": MixedPrecision("16-mixed", "cpu"), "gradient_clip_val": 0.1},
        tolerance=2e-3,
    ),
    "64-true": Habit(settings={"precision": "64-true"}, tolerance=1e-12),
    "bf16-true": Habit(settings={"precision": "bf16-true"}, tolerance=5e-2),
    "micro-batches by epoch": Habit(
        zero={"zero": 1},
        settings={"callbacks": [callbacks.GradientAccumulationScheduler({0: 1, 1: 3})]},
    ),
    "a layer that the last micro-batch skips": Habit(
        habits.SkipsALayer, {"zero": 1}, {"accumulate_grad_batches": 2}, ddp=UNUSED
    ),
    "a line search": Habit(  # whose state is no parameter's, so that no checkpoint has it
        habits.LineSearched,
        settings={"callbacks": [callbacks.ModelCheckpoint(save_weights_only=True)]},
    ),
    "averaged at the end": Habit(
        settings={"callbacks": [callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)]}
    ),
    "stopped early": Habit(
        settings={
            "callbacks": [callbacks.EarlyStopping("val", patience=1, min_delta=9.0)],
            "max_epochs": 4,
        }
    ),
    "a last batch that is smaller": Habit(settings={"batch": 3}),
    "anomalies are looked for": Habit(settings={"detect_anomaly": True}),
}


ALWAYS = ("buffers of a child change", "two optimizers by hand, zero 1")
"""The others are tried before a release: each compiles a model, to train it and to validate it."""


@pytest.mark.parametrize(
    "name", [*ALWAYS, *exhaustive(*(name for name in HABITS if name not in ALWAYS))]
)
def test_a_habit_trains_as_under_ddp(ranks: Pools, tmp_path: Path, name: str) -> None:
    habit = HABITS[name]
    ddp = ranks(2).run(fit, habit.ddp, str(tmp_path / "ddp"), make=habit.make, **habit.settings)
    ours = ranks(2).run(fit, habit.zero, str(tmp_path), make=habit.make, **habit.settings)
    assert_same(ours, ddp, habit.tolerance)
    assert ours[0].extra == ddp[0].extra or ours[0].extra == pytest.approx(ddp[0].extra, abs=1e-5)
    assert not [said for said in ours[0].said if "fxzero" in said]
