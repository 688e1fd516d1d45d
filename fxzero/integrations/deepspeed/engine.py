"""DeepSpeed's three calls around an ordinary model: forward, ``backward(loss)``, ``step()``.

    engine = fxzero.from_deepspeed("ds_config.json").engine(model)
    for inputs, targets in loader:
        loss = F.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()

A micro-batch each turn, as there: the last of a step clips, updates and steps the schedule. With
fp16 the loss is scaled. A step whose gradients are not finite changes nothing, where DeepSpeed
would skip it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fxzero.integrations.whole import whole
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.precision import LossScale
from fxzero.sharding.shard import model_state, no_sync


class Engine:
    """A model that is sharded and compiled, with its optimizer and schedule."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        micro_batches: int,
        clip_grad_norm: float | None,
        loss_scale: LossScale | None,
        skips: bool,
    ) -> None:
        """See `FromDeepSpeed.engine`.

        Args:
            skips: whether gradients that are not finite change nothing, without a loss scale.
        """
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.loss_scale = loss_scale
        """The loss scale of an fp16 run; save and load its state_dict with a checkpoint."""
        self.global_steps = 0
        """Optimizer steps, skipped ones too."""
        self.skipped_steps = 0
        self.micro_steps = 0
        self._micro_batches = micro_batches
        self._clip_grad_norm = clip_grad_norm
        self._skips = skips or loss_scale is not None
        self._norm: Tensor | None = None
        state = model_state(module)
        assert state is not None
        self._waits = state.zero < 2  # gradients are reduced once a step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, on one micro-batch of this rank's."""
        later = (
            self._waits and self.module.training and not self.is_gradient_accumulation_boundary()
        )
        with no_sync(self.module) if later else contextlib.nullcontext():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> Tensor:
        """Add a micro-batch's gradients: those of the mean over the step's micro-batches."""
        part = loss / self._micro_batches
        (part * self.loss_scale.value if self.loss_scale is not None else part).backward()
        return part.detach()

    def step(self) -> None:
        """Behind a step's last micro-batch update the model; behind others do nothing."""
        last = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not last:
            return
        reduce_leftovers(self.module)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        _fill_in(parameters)
        if self.loss_scale is not None:
            _divide((p.grad for p in parameters), self.loss_scale.value)
        self._norm = self._clip(parameters)
        skipped = self._skips and self._norm is not None and not self._norm.isfinite()
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1
        self.skipped_steps += skipped
        if not skipped and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if self.loss_scale is not None:
            self.loss_scale.update(bool(skipped))

    def _clip(self, parameters: list[nn.Parameter]) -> Tensor | None:
        if self._clip_grad_norm is not None:
            return whole(clip_grad_norm_(parameters, self._clip_grad_norm))
        if not self._skips:
            return None
        return whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is a step's last."""
        return (self.micro_steps + 1) % self._micro_batches == 0

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's gradients before clipping; None unless something reads it."""
        return None if self._norm is None else self._norm.item()

    def get_lr(self) -> list[float]:
        """Each parameter group's learning rate in the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def parameters(self) -> Iterable[nn.Parameter]:
        """The model's."""
        return self.module.parameters()

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode."""
        return self.train(False)


def _fill_in(parameters: Iterable[nn.Parameter]) -> None:
    """Let a trained parameter without a gradient have one of zeros, as DeepSpeed does: its weight
    decay and its momentum go on."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter.detach())


def _divide(grads: Iterable[Tensor | None], by: float) -> None:
    with torch.no_grad():
        for grad in grads:
            if grad is not None:
                grad.div_(by)
