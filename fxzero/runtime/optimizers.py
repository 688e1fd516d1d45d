"""What an optimizer is to the compiler: which kernel updates a parameter, and its state.

SGD, Adam, AdamW and Adagrad have fused kernels in torch, which update a bucket of shards in
one call, as soon as their gradients are there. Every other optimizer runs its own
``step()``, on the model's own parameters, once the last gradient is there; so does one
whose fused kernel is wrong for its dtype: see `fxzero.runtime.proven_kernels`.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fxzero import _compat
from fxzero.disk.scratch import BLOCK, pages
from fxzero.errors import CaptureError, FxZeroWarning
from fxzero.runtime.held_states import hold_all
from fxzero.runtime.proven_kernels import is_proven
from fxzero.sharding.ops import local_of
from fxzero.sharding.sharded_value import read_of_all_ranks

log = logging.getLogger("fxzero")


@dataclass(frozen=True)
class Kernel:
    """One of torch's fused updates, in the form that a parameter group asks for."""

    name: str
    """The function in `fxzero.runtime.updates`."""
    state: tuple[str, ...] = ()
    """Names of the tensors in ``optimizer.state[parameter]`` that it reads and changes."""


@dataclass(frozen=True)
class OptimizerLayout:
    """Which parameters an optimizer updates, in which group, by which kernel."""

    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    """The parameters that it updates, by key, in the model's order."""
    group: Mapping[str, int]
    """Each parameter's group."""
    kernels: tuple[Kernel, ...]
    """Each group's kernel; empty if the optimizer runs its own ``step()``."""

    @property
    def name(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__


def kernel_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Kernel | None:
    """The fused kernel that computes what the optimizer would; None if there is none.

    The step counts of Adam and Adagrad live on the CPU unless ``fused=True``, where a CUDA
    kernel cannot read them.
    """
    if group.get("fused") is False or group.get("foreach") or group.get("differentiable"):
        return None
    parameters = group["params"]
    if any(p.is_complex() or not p.is_floating_point() for p in parameters):
        return None
    if not all(map(_is_dense, parameters)):
        return None  # they walk through memory, gaps included
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    kind = type(optimizer)
    if kind is SGD:
        if group["momentum"] == 0:
            return Kernel("sgd")
        # Dampening does not apply to the first step, which leaves no trace in the state.
        return Kernel("sgd", ("momentum_buffer",)) if group["dampening"] == 0 else None
    if not on_cpu and not group.get("fused"):
        return None
    if kind in (Adam, AdamW):
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        name = "adamw" if group.get("decoupled_weight_decay", kind is AdamW) else "adam"
        return Kernel(name, ("exp_avg", "exp_avg_sq", *largest, "step"))
    if kind is Adagrad and on_cpu:
        return Kernel("adagrad", ("sum", "step"))
    return None


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether a parameter's elements lie in memory without gaps, in whatever order."""
    local = local_of(parameter)
    steps = zip(local.shape, local.stride(), strict=True)
    return local.numel() in (0, 1 + sum((size - 1) * stride for size, stride in steps))


def proven_kernel_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Kernel | None:
    """The fused kernel of a parameter group, if it is right for all dtypes in the group."""
    kernel = kernel_of(optimizer, group)
    if kernel is None:
        return None
    by_dtype = {(p.dtype, p.device.type): p for p in group["params"]}
    for (dtype, device), parameter in by_dtype.items():
        if not is_proven(kernel.name, kernel.state, group, parameter):
            _warn_of_wrong_kernel(optimizer, group, dtype, device)
            return None
    return kernel


def fused_on(layout: OptimizerLayout, device: torch.device) -> bool:
    """Whether another device than the parameters' has fused kernels for an optimizer, that are
    right."""
    groups = zip(layout.kernels, layout.optimizer.param_groups, strict=True)
    return all(
        (kernel.name != "adagrad" or device.type == "cpu")
        and all(
            is_proven(kernel.name, kernel.state, group, parameter, device)
            for parameter in {p.dtype: p for p in group["params"]}.values()
        )
        for kernel, group in groups
    )


def _warn_of_wrong_kernel(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, device: str
) -> None:
    """Say that a fused kernel is not used, and that the optimizer itself will."""
    name = type(optimizer).__name__
    wrong = (
        f"torch's fused {name} on {device} computes something else than its loop for {dtype} "
        f"parameters (torch {torch.__version__})"
    )
    if group.get("fused"):
        warnings.warn(
            f"{wrong}, and this optimizer was made with fused=True: it trains wrongly, in an "
            "ordinary loop too. Drop fused=True.",
            FxZeroWarning,
            stacklevel=4,
        )
    else:
        log.warning("%s: compile_step runs %s.step() instead, at the end", wrong, name)


def kernels_of(optimizer: Optimizer) -> tuple[Kernel, ...]:
    """Each group's kernel; empty if any group has none, or if somebody hooked into ``step()``.

    Raises:
        CaptureError: a step that wants to evaluate the loss itself.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            f"{type(optimizer).__name__} wants to evaluate the loss several times in one step "
            "(its step() needs a closure). That is no single step graph: use the ordinary loop "
            "with torch.compile(model, backend='fxzero')."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CaptureError(
            f"{type(optimizer).__name__}(differentiable=True) records its update for autograd; "
            "compile_step does not. Use the ordinary loop."
        )
    if _compat.has_step_hooks(optimizer) or is_patched(optimizer):
        return ()
    found = [proven_kernel_of(optimizer, group) for group in optimizer.param_groups]
    if None in found:
        return ()
    return tuple(kernel for kernel in found if kernel is not None)


def is_patched(optimizer: Optimizer) -> bool:
    """Whether somebody has put a function of his own in the place of ``optimizer.step``.

    Learning-rate schedulers do so, too, to count: theirs only calls what was there.
    """
    step: Any = vars(optimizer).get("step")
    while step is not None:
        step = getattr(step, "__func__", step)
        if step is type(optimizer).step:
            return False
        if not _compat.is_scheduler_counter(step):
            return True
        step = step.__wrapped__
    return False


def create_state(
    layout: OptimizerLayout,
    keys: Collection[str],
    *,
    will_move: bool = False,
    home: torch.device | None = None,
) -> None:
    """Let the optimizer make its state now, where a first step would make it lazily.

    Memory that the second step needs is then there before the first. Optimizers that run
    their own ``step()`` keep their own habits.

    Args:
        keys: the parameters that have gradients; the others get no state, as in a loop.
        will_move: whether there may be no room for all of it where it is made: what is zero takes
            no memory then until somebody writes to it.
        home: where it is held, if not with its parameters: a GPU has no room for all of it.
    """
    optimizer = layout.optimizer
    freed_bytes = 0
    for index, kernel in enumerate(layout.kernels):
        for key, parameter in layout.parameters.items():
            if key not in keys or layout.group[key] != index:
                continue
            state = optimizer.state[parameter]
            if all(state.get(name) is not None for name in kernel.state):
                continue
            if kernel.name == "sgd":
                with _compat.mode_of(parameter):
                    state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
                read_of_all_ranks(state)
                if home is not None:
                    hold_all(state, home, counts=False)
                if will_move:
                    freed_bytes = _take_no_memory(state, freed_bytes)
                continue
            group = {**optimizer.param_groups[index], "params": [parameter]}
            before, parameter.grad = parameter.grad, parameter.detach()  # its values do not matter
            try:
                with _compat.mode_of(parameter):
                    _compat.init_optimizer_state(optimizer, group)
            finally:
                parameter.grad = before
            read_of_all_ranks(state)
            if home is not None:
                hold_all(state, home, counts=False)
            if will_move:
                freed_bytes = _take_no_memory(state, freed_bytes)


def state_as_made(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """The state that an optimizer would make for a parameter in its first step, which tells how it
    lies over the ranks. The optimizer itself keeps none of it.

    Returns:
        Nothing where only a step makes it, as of optimizers that are not torch's.
    """
    if optimizer.state.get(parameter) or not hasattr(optimizer, "_init_group"):
        return {}
    group = next(
        group for group in optimizer.param_groups if any(p is parameter for p in group["params"])
    )
    before, parameter.grad = parameter.grad, parameter.detach()  # its values do not matter
    try:
        with _compat.mode_of(parameter):
            _compat.init_optimizer_state(optimizer, {**group, "params": [parameter]})
        return dict(optimizer.state[parameter])
    finally:
        parameter.grad = before
        optimizer.state.pop(parameter, None)


_TRIM_AT = 64 << 20
"""Bytes that are freed before the system gets them back."""


def _take_no_memory(state: Mapping[str, Any], freed_bytes: int) -> int:
    """Let what is zero of a parameter's state lie in pages that are made when they are written.

    Args:
        freed_bytes: what earlier calls have freed and the heap still has.

    Returns:
        The same behind this one.
    """
    for value in state.values():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        tensor = local_of(value)
        if _compat.is_fake(tensor) or tensor.device.type != "cpu":
            continue
        if tensor.nbytes < BLOCK or bool(tensor.any()):
            continue
        freed_bytes += tensor.nbytes
        own = torch.frombuffer(pages(tensor.nbytes), dtype=tensor.dtype)
        tensor.data = own.as_strided(tensor.shape, tensor.stride())
    if freed_bytes > _TRIM_AT:
        _compat.trim_heap()
        return 0
    return freed_bytes
