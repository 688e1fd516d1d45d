"""What autograd knows of a tensor, and of the backward that is running."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch


def backward_keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_number() -> int:
    """A number of the running backward; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; under inference_mode nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def set_versions(versions: Mapping[torch.Tensor, int]) -> None:
    """Let tensors, whose values are again what they were, count as written to so often."""
    counted = {tensor: n for tensor, n in versions.items() if not tensor.is_inference()}
    torch._C._autograd._unsafe_set_version_counter(tuple(counted), tuple(counted.values()))


def use_count(tensor: torch.Tensor) -> int:
    """How many hold a tensor beside Python: an operation that autograd has recorded does."""
    count: Callable[[], int] = getattr(tensor, "_use_count")  # noqa: B009 - not typed
    return count()


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """What wants to see a parameter's gradient when it comes."""
    later = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(parameter._backward_hooks or {}).values(), *(later or {}).values()]


def below_autograd() -> Any:
    """A context in which operators go straight to their kernels.

    Nothing that a scheduled graph runs is recorded, and functional collectives have autograd
    kernels in Python, which cost some 6 us a call. In-place operators still count versions.
    """
    return torch._C._AutoDispatchBelowAutograd()


def is_profiling() -> bool:
    """Whether a profiler records already, or is about to: a second one would end it."""
    if torch._C._autograd._profiler_enabled():
        return True
    # One that warms up is known to nobody but itself.
    warms_up = torch.profiler.ProfilerAction.WARMUP
    return any(
        type(found) is torch.profiler.profile and found.current_action is warms_up
        for found in gc.get_objects()
    )
