"""A training step in several graphs, for a forward that Dynamo cannot trace as one.

The step trains through the other front door, ``torch.compile(model, backend="fxzero")``, and
does what an ordinary loop would: micro-batches under `fxzero.no_sync` where the stage keeps
full gradients, clipping by the norm over all ranks, the loss scale, the optimizer's own step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxzero import backend
from fxzero._compat import foreach_mul_, graph_break_errors, local_tensor, pytree
from fxzero.compiler.config import Config
from fxzero.errors import CaptureError
from fxzero.runtime.updates import clip_coefficient, stop_unless_finite
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.params import ModelState
from fxzero.sharding.shard import no_sync

Result = tuple[Tensor, Tensor | None, Tensor | None]
"""The mean loss, the gradients' norm, and one if the step must be skipped."""


class LoopStep:
    """One training step as a loop would take it.

    Args:
        loss: computes the loss of one micro-batch from its arguments.
        parameters: those that the optimizer updates, by name.
        clip_grad_norm: the largest norm of all gradients; infinity takes it alone, None neither.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[..., Any],
        *,
        state: ModelState,
        parameters: Mapping[str, nn.Parameter],
        micro_batches: int,
        clip_grad_norm: float | None,
        config: Config,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.parameters = dict(parameters)
        self.micro_batches = micro_batches
        self.clip_grad_norm = clip_grad_norm
        self.config = config
        self._state = state
        self._loss = torch.compile(
            loss, backend=functools.partial(backend.fxzero, options=_options(config))
        )

    def __call__(
        self, batch: Sequence[Any], kwargs: Mapping[str, Any], loss_scale: float | None
    ) -> Result:
        """Train on one batch.

        Args:
            loss_scale: what the loss is multiplied by; None where nothing is scaled.

        Raises:
            CaptureError: the loss is no scalar that depends on a parameter.
            NonFiniteGradientError: gradients that are not finite, where that is an error.
        """
        losses = []
        for index in range(self.micro_batches):
            losses.append(self._backward(index, batch, kwargs, loss_scale or 1.0))
        loss = torch.stack(losses).mean() if len(losses) > 1 else losses[0]
        reduce_leftovers(self.model)
        norm, skip = self._norm(loss_scale)
        if skip is None or not bool(skip):
            self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        return loss, norm, skip

    def _backward(
        self, index: int, batch: Sequence[Any], kwargs: Mapping[str, Any], scale: float
    ) -> Tensor:
        """Forward and backward of one micro-batch; returns its loss."""
        count = self.micro_batches

        def rows(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dim() > 0:
                return value.chunk(count)[index]
            return value

        if count > 1:
            batch, kwargs = pytree.tree_map(rows, (tuple(batch), dict(kwargs)))
        keeps = index < count - 1 and self._state.zero < 2
        with no_sync(self.model) if keeps else contextlib.nullcontext():
            loss = self._traced_loss(batch, kwargs)
            if not isinstance(loss, Tensor) or loss.dim() > 0 or not loss.requires_grad:
                shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise CaptureError(
                    f"the loss must be a scalar tensor that depends on a parameter, found {shape}. "
                    "Reduce it, or pass loss_fn(output, target) to compile_step."
                )
            (loss * (scale / count)).backward()
        return loss.detach()

    def _traced_loss(self, batch: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return self._loss(*batch, **kwargs)
        except graph_break_errors() as error:
            raise CaptureError(f"Dynamo could not trace a part of the step:\n{error}") from error

    def _norm(self, loss_scale: float | None) -> tuple[Tensor | None, Tensor | None]:
        """The norm of all gradients, which are then unscaled and clipped; whether to skip."""
        stop = self.config.stop_unless_finite and loss_scale is None
        if self.clip_grad_norm is None and loss_scale is None and not stop:
            return None, None
        trained = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        norms = torch.stack([_full(torch.linalg.vector_norm(g)) for g in trained.values()])
        norm = torch.linalg.vector_norm(norms)
        inverse = None
        if loss_scale is not None:
            inverse = torch.tensor(1.0 / loss_scale, dtype=norm.dtype, device=norm.device)
            norm = norm * inverse
        if stop:
            stop_unless_finite(norm, norms, list(trained))
        skip = ~torch.isfinite(norm) if loss_scale is not None else None
        if self.clip_grad_norm is not None and math.isfinite(self.clip_grad_norm):
            factor: Tensor | None = clip_coefficient(norm, self.clip_grad_norm, inverse)
        else:
            factor = inverse
        if factor is not None:
            foreach_mul_([_local(g) for g in trained.values()], factor)
        return norm, skip


def _options(config: Config) -> Config:
    """The settings of the graphs: what is asked of the whole step is the step's own business."""
    return dataclasses.replace(config, stop_unless_finite=False, cuda_graph=False)


def _local(gradient: Tensor) -> Tensor:
    return local_tensor(gradient) if isinstance(gradient, DTensor) else gradient


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
