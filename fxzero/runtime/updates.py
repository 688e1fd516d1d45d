"""What changes parameters at the end of a step: torch's fused kernels, and what guards them.

Each update takes the shards of a bucket, their gradients, the optimizer's state for them
(one list per name in `fxzero.runtime.optimizers.Kernel.state`) and the parameter group itself, so
that a learning rate or any other number in it may change from step to step.

    scale   what gradients are multiplied by first: clipping, and the loss scale's inverse
    skip    one if the step must not happen: a gradient was not finite
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxzero._compat import (
    dtensor_like,
    foreach_add_,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
    fused_adagrad_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
    is_fake,
    real_tensors,
)
from fxzero.errors import CaptureError, FxZeroError, NonFiniteGradientError

Lists = list[list[Tensor]]
Group = dict[str, Any]


def _adam(
    kernel: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    state: Lists,
    group: Group,
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    grads = ready(grads, params, scale)
    with counted(state[-1], skip):
        _adam_slices(kernel, params, grads, state, group, skip)


def _adam_slices(
    kernel: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    state: Lists,
    group: Group,
    skip: Tensor | None,
) -> None:
    exp_avgs, exp_avg_sqs, *largest, steps = state
    beta1, beta2 = group["betas"]
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        largest[0] if largest else [],
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=skip,
    )


def adam(params: Any, grads: Any, state: Any, group: Group, scale: Any, skip: Any) -> None:
    """`torch.optim.Adam`, with state exp_avg, exp_avg_sq, max_exp_avg_sq if amsgrad, step."""
    _adam(fused_adam_, params, grads, state, group, scale, skip)


def adamw(params: Any, grads: Any, state: Any, group: Group, scale: Any, skip: Any) -> None:
    """`torch.optim.AdamW`, with the state of `adam`."""
    _adam(fused_adamw_, params, grads, state, group, scale, skip)


def sgd(
    params: list[Tensor],
    grads: list[Tensor],
    state: Lists,
    group: Group,
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """`torch.optim.SGD`, with state momentum_buffer unless momentum is 0."""
    _sgd_slices(params, ready(grads, params, scale), state, group, skip)


def _sgd_slices(
    params: list[Tensor], grads: list[Tensor], state: Lists, group: Group, skip: Tensor | None
) -> None:
    fused_sgd_(
        params,
        grads,
        state[0] if state else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=None,
        found_inf=skip,
    )


def adagrad(
    params: list[Tensor],
    grads: list[Tensor],
    state: Lists,
    group: Group,
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """`torch.optim.Adagrad`, with state sum, step."""
    grads = ready(grads, params, scale)
    with counted(state[-1], skip):
        _adagrad_slices(params, grads, state, group, skip)


def _adagrad_slices(
    params: list[Tensor], grads: list[Tensor], state: Lists, group: Group, skip: Tensor | None
) -> None:
    sums, steps = state
    fused_adagrad_(
        params,
        grads,
        sums,
        steps,
        lr=group["lr"],
        lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=skip,
    )


KERNELS = {function.__name__: function for function in (adam, adamw, sgd, adagrad)}

ON_SLICES: dict[str, Callable[..., None]] = {
    "adam": partial(_adam_slices, fused_adam_),
    "adamw": partial(_adam_slices, fused_adamw_),
    "sgd": _sgd_slices,
    "adagrad": _adagrad_slices,
}
"""By kernel, what it does element by element: to slices of parameters, gradients (`ready`) and
state, whose steps are `counted` around all of them."""


def ready(grads: list[Tensor], params: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    """Gradients with the strides of their parameters, rescaled.

    Fused kernels walk through both in the order of memory, and a graph knows of the strides that
    a fake kernel returned: some convolutions choose others when they run.
    """
    grads = laid_out(grads, params)
    if scale is not None:
        foreach_mul_(grads, scale)
    return grads


def laid_out(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Gradients with the strides of their parameters."""
    return [
        grad if grad.stride() == param.stride() else laid_out_like(grad, param)
        for grad, param in zip(grads, params, strict=True)
    ]


@contextlib.contextmanager
def counted(steps: list[Tensor], skip: Tensor | None) -> Iterator[None]:
    """Count one step for what runs inside, and not for one that was skipped."""
    foreach_add_(steps, 1)
    yield
    take_back(steps, skip)


def take_back(steps: list[Tensor], skip: Tensor | None) -> None:
    """Do not count a step that was skipped."""
    if skip is not None:
        foreach_sub_(steps, [skip] * len(steps))


class OwnStep:
    """An optimizer's own ``step()`` on the model's own parameters."""

    __module__ = "fxzero.runtime.updates"

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = tuple(parameters)
        self.__name__ = f"{type(optimizer).__name__}_step"

    def __call__(
        self, params: list[Tensor], grads: list[Tensor], scale: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update `params`, the local tensors of the parameters, unless `skip` says not to."""
        if skip is not None and skip.item():
            return
        grads = ready(grads, params, scale)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            sharded = isinstance(parameter, DTensor)
            parameter.grad = dtensor_like(grad, cast(DTensor, parameter)) if sharded else grad
        try:
            self.optimizer.step()
        except FxZeroError:
            raise
        except Exception as error:
            if not any(isinstance(parameter, DTensor) for parameter in self.parameters):
                raise
            raise CaptureError(
                f"{type(self.optimizer).__name__}.step() failed on sharded parameters: {error}. "
                "It may not work on DTensors at all: try it in an ordinary loop, or use zero=0. "
                "Parameters before the one that it failed at may have been updated."
            ) from error
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def __repr__(self) -> str:
        return self.__name__


def commit(buffers: list[Tensor], values: list[Tensor], skip: Tensor | None) -> None:
    """Give buffers the values that the forward left for them."""
    for buffer, value in zip(buffers, values, strict=True):
        if buffer is value:
            continue
        buffer.copy_(value if skip is None else torch.where(skip.bool(), buffer, value))


def laid_out_like(grad: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a gradient with the strides of its parameter."""
    return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


def norms(grads: list[Tensor]) -> Tensor:
    """The 2-norm of each of n local gradients: (n,)."""
    return torch.stack(foreach_norm(grads, 2.0))


def in_order(parts: list[Tensor], order: list[int]) -> Tensor:
    """Joined norms in the model's order of parameters, in which torch would take them."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined if order == list(range(len(order))) else _at(joined, order)


def no_norms(like: Tensor) -> Tensor:
    """The norms of no gradients: (0,)."""
    return like.new_empty(0)


def sum_of_squares(norms: Tensor, positions: list[int]) -> Tensor:
    """The part of the squared total norm that this rank's shards hold: (1,)."""
    return _at(norms, positions).square().sum().reshape(1)


def _at(norms: Tensor, positions: list[int]) -> Tensor:
    """Some of the norms, in the order of their positions."""
    if is_fake(norms):
        return norms[positions]
    return norms.index_select(0, _index(tuple(positions), norms.device))


@functools.lru_cache(maxsize=256)
def _index(positions: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions on a device. A list as an index would be copied there in every step, and could not
    be while a CUDA graph is captured: the steps before it have put it here."""
    with real_tensors():
        return torch.tensor(positions, dtype=torch.int64, device=device)


def add_squares(norms: Tensor, squares: Tensor, positions: list[int]) -> Tensor:
    """What one stage of a pipeline adds to the squared total norm: (1,), in float64, in which
    stages of any dtype meet."""
    total = squares + sum_of_squares(norms, positions) if positions else squares
    return total.double()


def norm_of_stages(squares: Tensor, norms: Tensor) -> Tensor:
    """The norm of all stages' gradients, in the dtype of this one's."""
    return squares.squeeze(0).sqrt().to(norms.dtype)


def total_norm(norms: Tensor, sharded: Tensor, replicated: list[int]) -> Tensor:
    """The norm of all gradients, of which every rank holds the replicated ones."""
    total = sharded.squeeze(0)
    if replicated:
        total = total + _at(norms, replicated).square().sum()
    return total.sqrt()


def unscaled(norm: Tensor, inverse: Tensor) -> Tensor:
    """A norm without the loss scale."""
    return norm * inverse


def clip_coefficient(norm: Tensor, max_norm: float, inverse: Tensor | None) -> Tensor:
    """What gradients are multiplied by: the formula of `torch.nn.utils.clip_grad_norm_`."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return coefficient if inverse is None else coefficient * inverse


def is_not_finite(norm: Tensor) -> Tensor:
    """One for a norm that is infinite or not a number, else zero."""
    return (~torch.isfinite(norm)).to(torch.float32)


def stop_unless_finite(total: Tensor, norms: Tensor, names: list[str]) -> Tensor:
    """Pass on the total norm.

    Raises:
        NonFiniteGradientError: on every rank alike, if it is infinite or not a number.
    """
    if torch.isfinite(total):
        return total
    bad = [name for name, norm in zip(names, norms.tolist(), strict=True) if not _finite(norm)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, bad)
        bad = [name for name in names if any(name in part for part in found)]
    where = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
    raise NonFiniteGradientError(
        f"the gradient of {where or 'the whole model'} is infinite or not a number, the total norm "
        f"is {total.item()}. Nothing was updated. Look at the batch and at the learning rate, "
        "let fxzero.find_non_finite(step, *batch) say where it begins, or drop "
        "options={'stop_unless_finite': True} to go on regardless."
    )


def _finite(value: float) -> bool:
    return value - value == 0
