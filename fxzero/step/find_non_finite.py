"""`fxzero.find_non_finite`: one step again, operator by operator, to say where a NaN begins.

parameters, buffers, batch  ──►  forward  ──►  backward      the first that is not finite, of
                                                             any rank; nothing is changed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxzero._compat import pytree
from fxzero.errors import BatchError, CaptureError, ConfigError
from fxzero.sharding.shard import model_state, param_specs
from fxzero.step.first_non_finite import Finder, NonFinite, count_bad, is_bad
from fxzero.step.loss import loss_function
from fxzero.step.train_step import TrainStep


def find_non_finite(
    trained: TrainStep | nn.Module,
    *batch: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    **kwargs: Any,
) -> NonFinite | None:
    """Find where a step's first number arises that is infinite or not a number. All ranks call it.

        try:
            step(*batch)
        except fxzero.NonFiniteGradientError:
            print(fxzero.find_non_finite(step, *batch))

    Parameters, buffers and batch are looked at first; then forward and backward run once more,
    operator by operator, without a compiler, which takes many times as long as a step, and as much
    memory as an ordinary loop. Parameters, gradients, buffers and generators are afterwards what
    they were. Masks of dropout are drawn from where the generators stand.

    Args:
        trained: a step of `compile_step`; or a model, sharded or not, that is trained by a loop.
        batch: what the step is called with; of a model, what it is called with, and then the
            target if there is a `loss_fn`.
        loss_fn: of a model that does not return its loss. A step has its own.
        kwargs: further arguments of the model.

    Returns:
        The first place, of all ranks; None if all numbers are finite, in the gradients too.

    Raises:
        ConfigError: a model in stages of a pipeline, or whose parameters are held elsewhere than
            where they are computed with.
        CaptureError: the loss is no scalar that depends on a parameter.
    """
    if isinstance(trained, TrainStep):
        if loss_fn is not None:
            raise ConfigError("loss_fn= is for a model: a step of compile_step has its own")
        loss, count = trained._loss_function(whole=True), trained._micro_batches
        model, scale = trained.model, trained.loss_scale
        factor = scale.value if scale is not None else 1.0
    elif isinstance(trained, nn.Module):
        model = getattr(trained, "_orig_mod", trained)
        loss, count, factor = loss_function(model, loss_fn, 1, True, None), 1, 1.0
        if loss_fn is not None and len(batch) < 2:
            raise BatchError("with a loss_fn, the model's inputs and a target are needed")
    else:
        raise ConfigError(
            "find_non_finite takes a step of compile_step or a module, not "
            f"{type(trained).__name__}"
        )
    _refuse(model, (batch, kwargs))
    rank = dist.get_rank() if _in_company() else 0
    found = _first(_at_rest(model, batch, kwargs, rank))
    if found is not None:
        return found
    with _as_before(model), Finder(model, rank) as finder:
        for index in range(count):
            found = _run(finder, loss, *_rows(batch, kwargs, index, count), factor / count)
            if found is not None:
                return found
        return _first(_bad_gradient(model, rank))


def _run(
    finder: Finder,
    loss_of: Callable[..., Any],
    batch: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    factor: float,
) -> NonFinite | None:
    """Forward and backward of a micro-batch. A collective."""
    with torch.enable_grad():
        with finder.forward():
            loss = loss_of(*batch, **kwargs)
            if not isinstance(loss, Tensor) or loss.dim() > 0 or not loss.requires_grad:
                what = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise CaptureError(
                    f"the loss must be a scalar tensor that depends on a parameter, found {what}"
                )
        finder.end_of_forward(loss)
        found = _first(finder.found)
        if found is not None:
            return found
        with finder.backward():
            (loss * factor).backward()
    return _first(finder.found)


def _first(found: NonFinite | None) -> NonFinite | None:
    """The first place of all ranks. A collective."""
    if not _in_company():
        return found
    places: list[NonFinite | None] = [None] * dist.get_world_size()
    dist.all_gather_object(places, found)
    there = [place for place in places if place is not None]
    return min(there, key=lambda place: (place.position, place.rank), default=None)


def _in_company() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def _at_rest(
    model: nn.Module, batch: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int
) -> NonFinite | None:
    """What is not finite before anything runs."""
    arguments = {f"[{i}]": value for i, value in enumerate(batch)} | dict(kwargs)
    named: list[tuple[str, str, Any]] = [
        *(("parameter", name, value) for name, value in model.named_parameters()),
        *(("buffer", name, value) for name, value in model.named_buffers()),
        *(
            ("batch", name, leaf)
            for name, value in arguments.items()
            for leaf in pytree.tree_leaves(value)
        ),
    ]
    for kind, name, value in named:
        if isinstance(value, Tensor) and value.is_floating_point() and is_bad(value, _MEANT[kind]):
            return NonFinite(rank, kind, name, about=count_bad(value))
    return None


_MEANT = {"parameter": "", "buffer": "infinity", "batch": "minus infinity"}
"""What may be there on purpose: masks, and the largest value so far of nothing."""


def _bad_gradient(model: nn.Module, rank: int) -> NonFinite | None:
    """A gradient that came to it on its way between ranks."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and is_bad(parameter.grad):
            about = f"its gradient's sum over micro-batches or ranks: {count_bad(parameter.grad)}"
            return NonFinite(rank, "backward", name, about=about)
    return None


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Leave gradients, buffers and generators as they are."""
    gradients = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    for parameter in gradients:
        parameter.grad = None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, gradient in gradients.items():
                    parameter.grad = gradient
                for buffer, before in buffers.items():
                    buffer.copy_(before)


def _rows(
    batch: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, count: int
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a micro-batch."""

    def rows(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.chunk(count)[index]
        return value

    parts: tuple[tuple[Any, ...], Mapping[str, Any]] = (batch, kwargs)
    return parts if count == 1 else pytree.tree_map(rows, parts)


def _refuse(model: nn.Module, arguments: Any) -> None:
    """See that an ordinary forward can run."""
    state = model_state(model)
    if state is not None and state.pipeline is not None:
        raise ConfigError(
            "find_non_finite runs an ordinary forward, and this model is in stages of a pipeline. "
            "Build it without one, load a checkpoint, and look there."
        )
    devices = {v.device.type for v in pytree.tree_leaves(arguments) if isinstance(v, Tensor)}
    for name, spec in param_specs(model).items():
        parameter = spec.parameter() if spec.parameter is not None else None
        here = parameter is not None and parameter.device.type == "cpu" and spec.device is None
        if here and devices and "cpu" not in devices:
            raise ConfigError(
                f"find_non_finite runs an ordinary forward on {', '.join(sorted(devices))}, and "
                f"this step holds {name} on the host. Shard with offload=True, or drop memory=."
            )
