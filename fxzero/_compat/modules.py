"""Calls of modules: what runs them, and the hooks around them."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch


def module_call() -> types.FunctionType:
    """What runs for every call of a module, around its forward and its hooks."""
    function = vars(torch.nn.Module)["_call_impl"]
    assert isinstance(function, types.FunctionType)
    return function


def num_module_hooks(modules: Iterable[torch.nn.Module]) -> int:
    """How many hooks there are on modules: Dynamo does not look whether some were added."""
    return sum(
        len(m._forward_hooks)
        + len(m._forward_pre_hooks)
        + len(m._backward_hooks)
        + len(m._backward_pre_hooks)
        for m in modules
    )


def load_hooks(module: torch.nn.Module) -> list[Any]:
    """What wants to be called before or after ``module.load_state_dict()``."""
    before = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return [*before, *module._load_state_dict_post_hooks.values()]


def active_ddp_module() -> Any:
    """The DistributedDataParallel module whose forward is running, if any."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()
