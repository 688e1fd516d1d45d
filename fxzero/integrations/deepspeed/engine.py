"""DeepSpeed's three calls around an ordinary model: forward, ``backward(loss)``, ``step()``.

    engine = fxzero.from_deepspeed("ds_config.json").engine(model)
    for inputs, targets in loader:
        loss = F.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()

A micro-batch each turn, as there: the last of a step clips, updates and steps the schedule. With
fp16 the loss is scaled. A step whose gradients are not finite changes nothing, where DeepSpeed
would skip it. What else loops call is in `engine_says` and `engine_saves`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fxzero.errors import ConfigError
from fxzero.integrations.deepspeed.engine_saves import EngineSaves
from fxzero.integrations.whole import whole
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.precision import LossScale
from fxzero.sharding.shard import model_state, no_sync


class Engine(EngineSaves):
    """A model that is sharded and compiled, with its optimizer and schedule."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        *,
        rows: int,
        micro_batches: int,
        train_batch_size: int,
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
        self._rows = rows
        self._train_batch_size = train_batch_size
        self._micro_batches = micro_batches
        self._clip_grad_norm = clip_grad_norm
        self._skips = skips or loss_scale is not None
        state = model_state(module)
        assert state is not None
        self._zero = state.zero
        self._waits = state.zero < 2  # gradients are reduced once a step
        self._keeps = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, on one micro-batch of this rank's."""
        later = (
            self._waits and self.module.training and not self.is_gradient_accumulation_boundary()
        )
        with no_sync(self.module) if later else contextlib.nullcontext():
            return self.module(*args, **kwargs)

    forward = __call__

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forwards run inside, and their backwards, not reduce gradients; `step` comes after.

        Raises:
            ConfigError: at stages 2 and 3, which reduce each micro-batch.
        """
        if not self._waits:
            raise ConfigError(
                f"engine.no_sync() at stage {self._zero}: full gradients are kept nowhere there, "
                "and each micro-batch is reduced. Leave it out, or say stage 0 or 1."
            )
        self._keeps = True
        try:
            with no_sync(self.module):
                yield
        finally:
            self._keeps = False

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Add a micro-batch's gradients: those of the mean over the step's micro-batches.

        Args:
            loss: a scalar.
            retain_graph: as of torch's.
            scale_wrt_gas: whether it is divided by the number of micro-batches.
        """
        part = loss / self._micro_batches if scale_wrt_gas else loss
        (part * self.cur_scale).backward(retain_graph=retain_graph)
        return part.detach()

    def step(self) -> None:
        """Behind a step's last micro-batch update the model; behind others do nothing.

        Raises:
            ConfigError: inside of `no_sync`, where nothing is reduced yet.
        """
        if self._keeps:
            raise ConfigError("engine.step() inside of engine.no_sync(): step behind it.")
        last = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
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
        self.global_samples += self._train_batch_size
        self.skipped_steps += bool(skipped)
        self._applied = not skipped
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
