"""What an optimizer is to torch: kernels, state, and steps that somebody watches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

# What torch's own optimizers are made of.
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_
fused_adagrad_ = torch._fused_adagrad_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_


def take_foreach_of(*classes: type[torch.Tensor]) -> None:
    """Let torch's optimizers and norms use their foreach kernels for tensors of some classes.

    They ask for the exact class, and DTensor puts itself on the same lists.
    """
    from torch.optim.optimizer import _foreach_supported_types as in_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as in_norms

    for supported in (in_optimizers, in_norms):
        supported += [kind for kind in classes if kind not in supported]


def unscale_function() -> Callable[..., Any]:
    """What GradScaler divides gradients by its scale with, and looks for infinities."""
    return torch._amp_foreach_non_finite_check_and_unscale_


def init_optimizer_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Let an optimizer create the state of a group's parameters, which must have gradients."""
    init_group: Callable[..., Any] = getattr(optimizer, "_init_group")  # noqa: B009 - not typed
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(init_group).parameters)[1:]]
    init_group(group, *lists)


_before_steps: list[Callable[..., None]] = []


def call_before_steps(hook: Callable[..., None]) -> None:
    """Let every optimizer call a function before its steps: once, however often it is asked."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if hook not in _before_steps:
        _before_steps.append(hook)
        register_optimizer_step_pre_hook(hook)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's step as its class has it, below hooks, its own and everybody's."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some user wants to be called before or after ``optimizer.step()``."""
    from torch.optim import optimizer as module

    before = vars(module)["_global_optimizer_pre_hooks"].values()
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(hook not in _before_steps for hook in before)
        or vars(module)["_global_optimizer_post_hooks"]
    )


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to be called before or after ``optimizer.load_state_dict()``."""
    return bool(
        optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
    )


def is_scheduler_counter(function: Callable[..., Any]) -> bool:
    """Whether a learning-rate scheduler has wrapped an optimizer's step, to count."""
    return bool(getattr(function, "_wrapped_by_lr_sched", False))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers, which watch ``optimizer.step``, that there was a step."""
    vars(optimizer)["_opt_called"] = True
