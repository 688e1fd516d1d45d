"""What `update` calls in the place of torch's fused Adam, where `adamw_` is the faster one.

    adamw([p], [g], [[exp_avg], [exp_avg_sq], [step]], group, scale, skip)      torch's kernel
→   adamw_([p], [g], [exp_avg], [exp_avg_sq], step[0], …)                       one launch

torch counts the steps of each parameter, our kernel takes one number for a bucket. That a bucket's
counts are alike is read once; from then on tensors' versions tell whether somebody else has written
to them. Where they are not alike (a parameter that was frozen for a while) torch's kernel goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxzero._compat import foreach_add_
from fxzero.kernels.optimizers import adamw_
from fxzero.runtime import updates

Lists = list[list[Tensor]]


class BucketAdam:
    """Adam, or AdamW, over a bucket of shards: `fxzero.runtime.updates.adam` by our own kernel.

    Args:
        decoupled: AdamW's weight decay; false is Adam's.
    """

    __module__ = "fxzero.kernels.bucket_update"

    def __init__(self, *, decoupled: bool) -> None:
        self.decoupled = decoupled
        self.torchs = updates.adamw if decoupled else updates.adam
        self.__name__ = self.__qualname__ = f"bucket_{self.torchs.__name__}"
        self._alike: list[tuple[Tensor, int]] = []
        """The counts that were alike, with the versions that they had then."""

    def __call__(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: Lists,
        group: dict[str, Any],
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """See `fxzero.runtime.updates`; state is exp_avg, exp_avg_sq, step."""
        exp_avgs, exp_avg_sqs, steps = state
        if group["maximize"] or group["amsgrad"] or not self._are_alike(steps):
            self.torchs(params, grads, state, group, scale, skip)
            return
        foreach_add_(steps, 1)
        adamw_(
            params,
            updates.laid_out(grads, params),
            exp_avgs,
            exp_avg_sqs,
            steps[0],
            lr=_there(group["lr"], params[0].device),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            clip_coefficient=scale,
            skip=skip,
            decoupled=self.decoupled,
        )
        updates.take_back(steps, skip)
        self._alike = [(step, step._version) for step in steps]

    def _are_alike(self, steps: list[Tensor]) -> bool:
        """Whether a bucket's parameters have taken equally many steps; waits for the device if
        that is not known."""
        known = self._alike
        if len(known) == len(steps) and all(
            step is mine and step._version == version
            for step, (mine, version) in zip(steps, known, strict=True)
        ):
            return True
        counts = torch.stack(steps)
        return bool((counts == counts[0]).all())

    def __repr__(self) -> str:
        return self.__name__


def _there(rate: float | Tensor, device: torch.device) -> float | Tensor:
    """A learning rate as the kernel takes it: a tensor on its device is not waited for."""
    return rate if isinstance(rate, Tensor) and rate.device == device else float(rate)
