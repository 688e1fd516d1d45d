"""The whole-step door under a Trainer: what its loop does with micro-batches, as one graph.

    get_batch_samples       the micro-batches of the next update: are they alike?
    training_step  1 … n-1  nothing yet: a loss of zero
                   n        forward, loss, backward, clipping and update, of all of them
    clip, optimizer.step    nothing is left: no parameter has a gradient

Micro-batches that are not alike (rows that an epoch ends with) are trained one after another by the
Trainer's own loop, with the same numbers.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from fxzero._compat import pytree
from fxzero.compiler.config import Config
from fxzero.errors import ConfigError
from fxzero.sharding.precision import Precision
from fxzero.step.loss import unwrapped
from fxzero.step.train_step import StepOutput, TrainStep

log = logging.getLogger("fxzero")


class WholeSteps:
    """The compiled steps of one Trainer: one for each number of micro-batches, of one optimizer."""

    def __init__(self, trainer: Any) -> None:
        """Look at what the Trainer's classes and callbacks do in the middle of a step.

        Raises:
            ConfigError: something that a graph would go round.
        """
        _refuse_own_methods(type(trainer))
        self._trainer = trainer
        self._optimizer: Any = None
        self._steps: dict[int, TrainStep] = {}
        self._waiting: list[dict[str, Any]] = []
        self._micro_batches = 0
        self._has_told = False
        self.last: StepOutput | None = None
        """What the update that is under way has done; None where the Trainer's loop does it."""

    def look_at(self, batches: Sequence[Any]) -> None:
        """Choose how the next update is made."""
        _refuse_callbacks_between(self._trainer.callback_handler.callbacks)
        self.last = None
        self._waiting = []
        self._micro_batches = len(batches) if _are_alike(batches) else 0
        if batches and not self._micro_batches:
            self._tell_unlike(len(batches))

    @property
    def takes_next(self) -> bool:
        """Whether the micro-batch that comes belongs to a whole step."""
        return self._micro_batches > 0

    def train(self, inputs: Mapping[str, Any], count: Any) -> Tensor:
        """Take a micro-batch, and with the last of an update train on all.

        Args:
            inputs: on the model's device.
            count: of labels in all micro-batches, of all ranks if Trainer counts so; or None.

        Returns:
            the loss of all micro-batches, where it is the last; else zero.
        """
        self._waiting.append(dict(inputs))
        if len(self._waiting) < self._micro_batches:
            return torch.zeros((), device=self._trainer.args.device)
        waiting, self._waiting = self._waiting, []
        if isinstance(count, int):
            # A number would be part of the graph.
            count = torch.tensor(count, device=self._trainer.args.device)
        batch = _joined(waiting) if len(waiting) > 1 else waiting[0]
        self.last = self._step(len(waiting))(batch, count)
        return self.last.loss

    def _step(self, micro_batches: int) -> TrainStep:
        trainer = self._trainer
        optimizer = unwrapped(trainer.optimizer, "optimizer", torch.optim.Optimizer)
        if optimizer is not self._optimizer:  # train() was called again
            self._optimizer, self._steps = optimizer, {}
        if micro_batches not in self._steps:
            limit = trainer.args.max_grad_norm
            made = TrainStep(
                trainer.model,
                optimizer,
                None,
                micro_batches=micro_batches,
                # Of what is not clipped the norm is logged too.
                clip_grad_norm=limit if limit and limit > 0 else math.inf,
                precision=Precision.of(None),
                scheduler=None,  # the Trainer's, and stepped by it
                config=Config.from_options(trainer.fxzero.options),
                call=_loss_of_micro_batch(trainer, micro_batches),
            )
            if made.loss_scale is not None:
                raise ConfigError(
                    "FxZeroPlugin(whole_step=True) and float16: Trainer would count and schedule "
                    "steps that a loss scale skips, and save no scale. Use bf16=True, or your own "
                    "loop with fxzero.compile_step(…, precision='fp16')."
                )
            self._steps[micro_batches] = made
        return self._steps[micro_batches]

    def _tell_unlike(self, count: int) -> None:
        config = Config.from_options(self._trainer.fxzero.options)
        if config.offloads:
            raise ConfigError(
                f"{count} micro-batches of one update have different shapes, and {config.offloads} "
                "needs them in one graph. Pad them alike, and set dataloader_drop_last=True."
            )
        if not self._has_told:
            self._has_told = True
            log.warning(
                "%d micro-batches of one update have different shapes: this update, and others "
                "like it, are made by Trainer's loop. Pad them alike for one graph.",
                count,
            )


def _loss_of_micro_batch(trainer: Any, micro_batches: int) -> Any:
    """What is traced: `Trainer.compute_loss`, so that losses of one's own are kept."""

    def call(inputs: dict[str, Any], count: Tensor | None) -> Tensor:
        # Dynamo reads no ExitStack, in which compute_loss_context_manager has the same.
        with trainer.autocast_smart_context_manager():
            loss: Tensor = trainer.compute_loss(
                trainer.model, dict(inputs), num_items_in_batch=count
            )
        # A step takes the mean over its micro-batches, and what was divided by a count of all
        # labels is to be summed.
        return loss * micro_batches if _is_scaled(trainer, count) else loss

    return call


def _is_scaled(trainer: Any, count: Any) -> bool:
    """Whether a loss is one part of a sum over micro-batches already, as Trainer decides it."""
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    return (
        trainer.model_accepts_loss_kwargs and count is not None
    ) or trainer.compute_loss_func is not None


def _are_alike(batches: Sequence[Any]) -> bool:
    """Whether micro-batches can be told from one tensor by its rows."""
    if len(batches) < 2:
        return len(batches) == 1
    return all(_is_like(one, other) for one, other in itertools.pairwise(batches))


def _is_like(one: Any, other: Any) -> bool:
    values, structure = pytree.tree_flatten(dict(one))
    others, other_structure = pytree.tree_flatten(dict(other))
    if structure != other_structure:
        return False
    for value, with_it in zip(values, others, strict=True):
        if not isinstance(value, Tensor) or not isinstance(with_it, Tensor):
            if type(value) is not type(with_it) or value != with_it:
                return False
        elif not value.dim() or value.shape != with_it.shape or value.dtype != with_it.dtype:
            return False
    return True


def _joined(batches: Sequence[dict[str, Any]]) -> Any:
    """Micro-batches below each other, as the step will split them."""

    def join(*values: Any) -> Any:
        return torch.cat(values) if isinstance(values[0], Tensor) else values[0]

    return pytree.tree_map(join, *batches)


def _refuse_own_methods(kind: type) -> None:
    """A graph is made of `compute_loss`; what is written around it would not run."""
    for method in ("training_step", "compute_loss_context_manager"):
        bases = (base for base in kind.__mro__ if method in vars(base))
        base = next(base for base in bases if not base.__module__.startswith("fxzero."))
        if base is not Trainer:
            raise ConfigError(
                f"FxZeroPlugin(whole_step=True) compiles compute_loss, backward and update, and "
                f"{base.__qualname__}.{method} would not run. Put what it does into compute_loss, "
                "or leave out whole_step."
            )


def _refuse_callbacks_between(callbacks: Sequence[TrainerCallback]) -> None:
    """Between backward and update a callback would find no gradients, and new weights."""
    for callback in callbacks:
        kind = type(callback)
        if kind.on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            raise ConfigError(
                f"{kind.__qualname__}.on_pre_optimizer_step comes between backward and update, "
                "which are one graph under FxZeroPlugin(whole_step=True). Leave out one of the two."
            )
