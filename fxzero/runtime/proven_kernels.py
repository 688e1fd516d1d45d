"""Whether one of torch's fused updates computes what torch's own loop over parameters does.

It is tried before it is chosen: three steps on some eighty numbers, once for every kernel,
dtype, device and settings of a process, a few milliseconds each. torch 2.11 to 2.13 need it: their
fused SGD on CPU multiplies bf16 and fp16 parameters wrongly (pytorch#191763).

    exact   the loop in float64, from the same numbers
    found   the kernel in the parameters' dtype: must be as near to it as the loop is, twice over

Kernels on CUDA take Adam's betas as float32 where parameters are no float64, loops take them as
float64: 1 - beta2 = 0.001 is then off by up to 6e-5 of itself, and so is what it multiplies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fxzero._compat import real_tensors
from fxzero.runtime.updates import KERNELS

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
}
_FLAGS = ("nesterov", "maximize", "amsgrad")
_NUMBERS = {"momentum": 0.9, "weight_decay": 0.1, "lr_decay": 0.1}
"""What is tried where a setting is not zero."""
_SHAPES = ((67,), (16,), (1,), (3, 5))
"""Of which some are no multiple of a vector register."""
_STEPS = 3
_RATE = 0.5
"""Large, so that an update that is missing shows beside what bf16 rounds off."""
_ROUNDINGS = 4
"""What a kernel may differ by where the loop is exact, in units of the dtype's precision."""


def is_proven(
    kernel: str,
    state: tuple[str, ...],
    group: Mapping[str, Any],
    parameter: Tensor,
    device: torch.device | None = None,
) -> bool:
    """Whether a fused update is right, for a parameter group's settings.

    Args:
        kernel: the function in `fxzero.runtime.updates`.
        state: the names of its state, in order.
        group: the parameter group.
        parameter: one of its parameters, for its dtype and device.
        device: where it is updated, if elsewhere.
    """
    device = device or parameter.device
    if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):
        return True  # nothing will run: somebody looks at a machine that is not here
    settings = {flag: bool(group[flag]) for flag in _FLAGS if flag in group}
    numbers = {name: n if group[name] else 0.0 for name, n in _NUMBERS.items() if name in group}
    return _try(kernel, state, parameter.dtype, device.type, tuple({**settings, **numbers}.items()))


@functools.cache
def _try(
    kernel: str,
    state: tuple[str, ...],
    dtype: torch.dtype,
    device: str,
    settings: tuple[tuple[str, Any], ...],
) -> bool:
    with real_tensors(), torch.no_grad():
        start = [_numbers(shape, 0, dtype, device) for shape in _SHAPES]
        grads = [
            [_numbers(shape, step, dtype, device) for shape in _SHAPES]
            for step in range(1, _STEPS + 1)
        ]
        kind = _OPTIMIZERS[kernel]
        exact, loop = (
            _loop(kind, settings, _in(to, start), [_in(to, g) for g in grads])
            for to in (torch.float64, dtype)
        )
        found = _fused(kernel, kind, state, settings, _in(dtype, start), grads)
        rounded = 0.0 if device == "cpu" or dtype == torch.float64 else _of_rounded_betas(kind)
        return all(_is_near(a, b, c, rounded) for a, b, c in zip(found, loop, exact, strict=True))


def _of_rounded_betas(kind: type[Optimizer]) -> float:
    """How far results may be off, as a share of the largest, when betas are rounded to float32."""
    made: Any = kind
    betas = made([nn.Parameter(torch.zeros(1, device="cpu"))]).defaults.get("betas", ())
    unit = torch.finfo(torch.float32).eps / 2
    return sum(unit / (1 - beta) for beta in betas)


def _numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Numbers between -1 and 1; not torch's random ones, whose state is the user's."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device)
    return (count * 1.7 + seed).sin().reshape(shape).to(dtype)


def _in(dtype: torch.dtype, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(dtype, copy=True) for tensor in tensors]


def _optimizer(
    kind: type[Optimizer], settings: tuple[tuple[str, Any], ...], start: list[Tensor]
) -> Optimizer:
    options: dict[str, Any] = {"lr": _RATE, "foreach": False, "fused": False, **dict(settings)}
    return kind([nn.Parameter(tensor) for tensor in start], **options)


def _loop(
    kind: type[Optimizer],
    settings: tuple[tuple[str, Any], ...],
    start: list[Tensor],
    grads: list[list[Tensor]],
) -> list[Tensor]:
    """Parameters, then state, after the optimizer's own steps."""
    optimizer = _optimizer(kind, settings, start)
    parameters = optimizer.param_groups[0]["params"]
    for of_step in grads:
        for parameter, grad in zip(parameters, of_step, strict=True):
            parameter.grad = grad
        optimizer.step()
    names = sorted(name for name, v in optimizer.state[parameters[0]].items() if _is_state(v))
    return [*parameters, *(optimizer.state[p][name] for name in names for p in parameters)]


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _fused(
    kernel: str,
    kind: type[Optimizer],
    state: tuple[str, ...],
    settings: tuple[tuple[str, Any], ...],
    start: list[Tensor],
    grads: list[list[Tensor]],
) -> list[Tensor]:
    """The same by a fused kernel."""
    group = _optimizer(kind, settings, start).param_groups[0]
    lists = {
        name: [
            torch.zeros((), device=tensor.device) if name == "step" else torch.zeros_like(tensor)
            for tensor in start
        ]
        for name in state
    }
    for of_step in grads:
        gradients = [grad.clone() for grad in of_step]
        KERNELS[kernel](start, gradients, [lists[name] for name in state], group, None, None)
    names = sorted(name for name in state if name != "step")
    return [*start, *(tensor for name in names for tensor in lists[name])]


def _is_near(found: Tensor, loop: Tensor, exact: Tensor, rounded: float) -> bool:
    """Whether a result is as good as the loop's, but for a share of the largest."""
    scale = exact.abs().max().item()
    allowed = 2 * (loop.double() - exact).abs().max().item()
    if not math.isfinite(allowed):  # Adam's epsilon is zero in float16, and 0 / 0 no measure
        allowed = 0.0
    allowed += (_ROUNDINGS * torch.finfo(found.dtype).eps + rounded) * scale
    return bool((found.double() - exact).abs().max() <= allowed)
