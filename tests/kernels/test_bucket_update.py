"""The update of a bucket by our own kernel, called as `update` calls torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fxzero.kernels import bucket_update
from fxzero.kernels.bucket_update import BucketAdam
from fxzero.runtime import updates

SHAPES = ((67,), (16, 3), (1,))
STEPS = 4
GROUP: dict[str, Any] = {
    "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1,
    "amsgrad": False, "maximize": False,
}  # fmt: skip


class Bucket:
    """Parameters in float64 with the state of a fresh Adam."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
        self.averages = [torch.zeros_like(p) for p in self.params]
        self.squares = [torch.zeros_like(p) for p in self.params]
        self.steps = [torch.zeros((), dtype=torch.float32) for _ in SHAPES]

    def update(
        self,
        by: Callable[..., None],
        number: int,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
        **settings: Any,
    ) -> None:
        """One step with gradients of its own."""
        generator = torch.Generator().manual_seed(number)
        grads = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
        state = [self.averages, self.squares, self.steps]
        by(self.params, grads, state, {**GROUP, **settings}, scale, skip)

    def tensors(self) -> list[Tensor]:
        """Everything that an update changes."""
        return [*self.params, *self.averages, *self.squares, *self.steps]


def assert_alike(mine: Bucket, theirs: Bucket) -> None:
    """Equal within float64's rounding of the largest element."""
    for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("scaled", [False, True])
def test_it_updates_as_torchs_kernel_does(decoupled: bool, scaled: bool) -> None:
    """Parameters, averages and counts, with clipping and with a step that is skipped."""
    mine, theirs = Bucket(), Bucket()
    own = BucketAdam(decoupled=decoupled)
    scale = torch.tensor(0.3, dtype=torch.float64) if scaled else None
    with mock.patch.object(bucket_update, "adamw_", wraps=bucket_update.adamw_) as kernel:
        for number in range(STEPS):
            skip = torch.tensor(float(number == 2)) if scaled else None
            mine.update(own, number, scale, skip)
            theirs.update(updates.adamw if decoupled else updates.adam, number, scale, skip)
    assert kernel.call_count == STEPS
    assert_alike(mine, theirs)
    assert int(mine.steps[0]) == STEPS - (1 if scaled else 0)


def test_a_learning_rate_may_be_a_tensor() -> None:
    """As a step that shall be captured needs it; it changes from step to step."""
    mine, theirs = Bucket(), Bucket()
    own = BucketAdam(decoupled=True)
    for number in range(STEPS):
        mine.update(own, number, lr=torch.tensor(0.1 / (number + 1)))
        theirs.update(updates.adamw, number, lr=float(torch.tensor(0.1 / (number + 1))))
    assert_alike(mine, theirs)


def test_parameters_that_count_apart_are_torchs() -> None:
    """One was frozen for a while: its corrections are others."""
    mine, theirs = Bucket(), Bucket()
    own = BucketAdam(decoupled=True)
    for bucket in (mine, theirs):
        bucket.steps[1] += 5
    with mock.patch.object(bucket_update, "adamw_") as kernel:
        for number in range(STEPS):
            mine.update(own, number)
            theirs.update(updates.adamw, number)
    assert not kernel.called
    assert_alike(mine, theirs)


def write(steps: list[Tensor]) -> None:
    """Count one of them on, in place, as a loaded state may."""
    steps[1].fill_(9)


def replace(steps: list[Tensor]) -> None:
    """Put another tensor in its place, as `load_state_dict` does."""
    steps[1] = torch.full((), 9.0)


@pytest.mark.parametrize("change", [write, replace])
def test_counts_that_part_later_are_seen(change: Callable[[list[Tensor]], None]) -> None:
    """What was alike is looked at again once somebody else has written to it."""
    mine, theirs = Bucket(), Bucket()
    own = BucketAdam(decoupled=True)
    for number in range(STEPS):
        if number == 2:
            change(mine.steps)
            change(theirs.steps)
        mine.update(own, number)
        theirs.update(updates.adamw, number)
    assert_alike(mine, theirs)


def test_counts_are_read_once() -> None:
    """Reading them waits for the device: not in every step."""
    bucket, own = Bucket(), BucketAdam(decoupled=True)
    with mock.patch.object(torch, "stack", wraps=torch.stack) as stacked:
        for number in range(STEPS):
            bucket.update(own, number)
    assert stacked.call_count == 1


@pytest.mark.parametrize("setting", ["maximize"])
def test_a_group_that_changes_is_torchs(setting: str) -> None:
    """Settings may change from step to step: what our kernel lacks is left to torch."""
    mine, theirs = Bucket(), Bucket()
    own = BucketAdam(decoupled=True)
    for number in range(STEPS):
        settings = {setting: number >= 2}
        mine.update(own, number, **settings)
        theirs.update(updates.adamw, number, **settings)
    assert_alike(mine, theirs)
