"""The whole-step door under a Trainer: what its loop does with micro-batches, as one graph.

    get_batch_samples       the micro-batches of the next update: are they alike, on all ranks?
    training_step  1 … n-1  nothing yet: a loss of zero
                   n        forward, loss, backward, clipping and update, of all of them
    clip, optimizer.step    nothing is left to do, and nothing is done

What cannot be one graph is trained micro-batch by micro-batch by the Trainer's own loop, with the
same numbers: micro-batches that are not alike (rows that an epoch ends with), and those of an epoch
that ends before an update is due, whose gradients wait for the next one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

from fxzero._compat import pytree
from fxzero._compat.optimizers import is_scheduler_counter, mark_stepped
from fxzero.compiler.config import Config
from fxzero.errors import ConfigError
from fxzero.runtime.delayed import use_gradients
from fxzero.sharding.precision import Precision
from fxzero.step.loss import unwrapped
from fxzero.step.train_step import StepOutput, TrainStep

log = logging.getLogger("fxzero")


class WholeSteps:
    """The compiled steps of one Trainer: one for each number of micro-batches and each limit of
    the norm, of one optimizer."""

    def __init__(self, trainer: Any) -> None:
        """Look at what the Trainer's classes and callbacks do in the middle of a step.

        Raises:
            ConfigError: something that a graph would go round.
        """
        _refuse_own_methods(trainer)
        self._trainer = trainer
        self._optimizer: Any = None
        self._steps: dict[tuple[int, float], TrainStep] = {}
        self._waiting: list[tuple[dict[str, Any], Any]] = []
        """Micro-batches, each with the count of labels that came with it."""
        self._owed: Tensor | None = None
        """The loss of micro-batches that were trained on after the Trainer had asked for it."""
        self._micro_batches = 0
        self._has_told = False
        self._own_step: Any = None
        """What stands in for the ``step`` of accelerate's optimizer."""
        self.last: StepOutput | None = None
        """What the update that is under way has done; None where the Trainer's loop does it."""

    def begin(self) -> None:
        """A training begins: nothing is left of one before."""
        self._waiting, self._owed, self.last = [], None, None

    def look_at(self, batches: Sequence[Any]) -> None:
        """Choose how the next update is made. A collective, where it has several micro-batches.

        Raises:
            ConfigError: something that a graph would go round has come.
        """
        self._refuse_what_has_changed()
        self.last = None
        if self._waiting:  # a callback has ended the epoch before their update was due
            self._micro_batches = 0
            self._owed = self._train_by_loop()
        self._micro_batches = len(batches)
        why = self._why_apart(batches) if self._may_differ else ""
        if why:
            self._micro_batches = 0
            self._tell(why, len(batches))

    @property
    def _may_differ(self) -> bool:
        """Whether updates have several micro-batches, on all ranks or on none."""
        return bool(self._trainer.args.gradient_accumulation_steps > 1)

    def _why_apart(self, batches: Sequence[Any]) -> str:
        """Why the micro-batches of an update are not one graph, for one rank at least; or ""."""
        why = ""
        if any(p.grad is not None for p in self._trainer.model.parameters()):
            why = "an epoch has ended before an update was due, and left gradients for the next"
        elif not _are_alike(batches):
            why = "they differ in shape, or in something that is no tensor of rows"
        if dist.is_initialized() and dist.get_world_size() > 1:
            is_apart = torch.tensor(int(bool(why)), device=self._trainer.args.device)
            dist.all_reduce(is_apart, op=dist.ReduceOp.MAX)
            if is_apart.item() and not why:
                why = "those of another rank are not alike"
        return why

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
        self._waiting.append((dict(inputs), count))
        if len(self._waiting) < self._micro_batches:
            return torch.zeros((), device=self._trainer.args.device)
        if not self._trainer.accelerator.gradient_state.sync_gradients:
            self._tell("an epoch ends before an update is due", len(self._waiting))
            return self._train_by_loop()
        waiting, self._waiting = [batch for batch, _ in self._waiting], []
        if isinstance(count, int):
            # A number would be part of the graph.
            count = torch.tensor(count, device=self._trainer.args.device)
        batch = _joined(waiting) if len(waiting) > 1 else waiting[0]
        self.last = self._step(len(waiting))(batch, count)
        return self.last.loss

    def with_owed(self, loss: Tensor) -> Tensor:
        """A loss of the loop, and what was not told of before."""
        owed, self._owed = self._owed, None
        return loss if owed is None else loss + owed

    def _train_by_loop(self) -> Tensor:
        """Train on the micro-batches that wait, one after another, and leave their gradients to the
        next update: the sum of their losses."""
        waiting, self._waiting = self._waiting, []
        gradients = self._trainer.accelerator.gradient_state
        before = gradients.sync_gradients
        gradients._set_sync_gradients(False)
        try:
            losses = [
                self._trainer.train_by_loop(self._trainer.model, batch, count)
                for batch, count in waiting
            ]
        finally:
            gradients._set_sync_gradients(before)
        return torch.stack(losses).sum()

    def _step(self, micro_batches: int) -> TrainStep:
        trainer = self._trainer
        optimizer = unwrapped(trainer.optimizer, "optimizer", Optimizer)
        if optimizer is not self._optimizer:  # train() was called again
            self._optimizer, self._steps = optimizer, {}
        self._stand_aside(trainer.optimizer)
        limit = trainer.args.max_grad_norm or 0.0
        if (micro_batches, limit) not in self._steps:
            made = TrainStep(
                trainer.model,
                optimizer,
                None,
                micro_batches=micro_batches,
                # Of what is not clipped the norm is logged too.
                clip_grad_norm=limit if limit > 0 else math.inf,
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
            self._steps[micro_batches, limit] = made
        return self._steps[micro_batches, limit]

    def use_gradients(self) -> None:
        """Make the update that the last step has left to the next (`offload_states.delay`)."""
        if self._optimizer is not None:
            use_gradients(self._optimizer)

    def _stand_aside(self, accelerated: AcceleratedOptimizer) -> None:
        """Let Trainer's ``optimizer.step()`` do nothing where a graph has made the update: an
        optimizer that counts its steps, or whose hooks do, would see two."""
        step = accelerated.step
        if step is self._own_step:
            return

        @functools.wraps(step)  # whether a scheduler counts by it stands in its attributes
        def step_of_loop(*args: Any, **kwargs: Any) -> None:
            if self.last is None:
                step(*args, **kwargs)
            else:
                mark_stepped(accelerated)

        vars(accelerated)["step"] = self._own_step = step_of_loop

    def _tell(self, why: str, count: int) -> None:
        """Say once that the loop makes an update; with something offloaded it cannot.

        Raises:
            ConfigError: something is offloaded.
        """
        config = Config.from_options(self._trainer.fxzero.options)
        if config.offloads:
            raise ConfigError(
                f"the {count} micro-batches of one update are not one graph ({why}), and "
                f"{config.offloads} needs them in one. Pad them alike, and set "
                "dataloader_drop_last=True."
            )
        if not self._has_told:
            self._has_told = True
            log.warning(
                "the %d micro-batches of one update are not one graph: %s. This update, and "
                "others like it, are made by Trainer's loop.",
                count,
                why,
            )

    def _refuse_what_has_changed(self) -> None:
        """See that nobody has put something in the way of an update since."""
        trainer = self._trainer
        _refuse_own_methods(trainer)
        _refuse_callbacks_between(trainer.callback_handler.callbacks)
        inner = unwrapped(trainer.optimizer, "optimizer", Optimizer)
        steps = [vars(optimizer).get("step") for optimizer in (trainer.optimizer, inner)]
        known = (None, self._own_step)
        patched = {
            "accelerator.backward": "backward" in vars(trainer.accelerator)
            or type(trainer.accelerator).backward is not Accelerator.backward,
            "accelerator.clip_grad_norm_": not trainer.clips_by_fxzero,
            "optimizer.step": not all(
                step in known or is_scheduler_counter(step) for step in steps
            ),
        }
        for name in (name for name, is_patched in patched.items() if is_patched):
            raise ConfigError(
                f"FxZeroPlugin(whole_step=True) compiles compute_loss, backward and update, and "
                f"{name}, which somebody has replaced, would not run. Leave out one of the two."
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
        return True
    tensors = [v for v in pytree.tree_leaves(dict(batches[0])) if isinstance(v, Tensor) and v.dim()]
    if len({tensor.shape[0] for tensor in tensors}) > 1:
        return False  # positions, say, that all rows share
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


_AROUND = (
    "training_step",
    "compute_loss_context_manager",
    "_clip_grad_norm",
    "_get_grad_norm",
)
"""Methods of a Trainer that run around `compute_loss`; the last two since transformers 5."""


def _refuse_own_methods(trainer: Any) -> None:
    """A graph is made of `compute_loss`; what is written around it would not run."""
    for method in _AROUND:
        kinds = [kind for kind in type(trainer).__mro__ if method in vars(kind)]
        owners = [kind for kind in kinds if not kind.__module__.startswith("fxzero.")]
        if owners and (owners[0] is not Trainer or method in vars(trainer)):
            raise ConfigError(
                f"FxZeroPlugin(whole_step=True) compiles compute_loss, backward and update, and "
                f"{owners[0].__qualname__}.{method} would not run. Put what it does into "
                "compute_loss, or leave out whole_step."
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
