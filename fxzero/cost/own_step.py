"""What an optimizer that runs its own ``step()`` holds: its state, and what it needs meanwhile.

    RMSprop(momentum=0.9, centered=True)    three tensors of state a parameter
    RAdam(foreach=True)                     copies of all gradients at once

No graph says it, and the state is made in the first step. So two steps of a copy of the optimizer
are run on tensors without values, and what they make is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from fxzero._compat import pytree, rehearse, step_without_hooks
from fxzero.runtime.optimizers import is_patched
from fxzero.runtime.updates import OwnStep

LATE = 1000.0
"""What a step's number is taken for: RAdam does more from its sixth step on."""


@dataclass(frozen=True)
class OwnStepMemory:
    """Bytes of an optimizer's own step."""

    state_bytes: int
    """What it keeps from step to step."""
    workspace_bytes: int
    """What it makes beside while it runs."""


_known: WeakKeyDictionary[Optimizer, dict[Any, OwnStepMemory | None]] = WeakKeyDictionary()


def memory_of_own_step(update: fx.Node) -> OwnStepMemory | None:
    """What a node holds that runs an optimizer's own step; None if that cannot be found out."""
    step: Any = update.target
    assert isinstance(step, OwnStep)
    params: Any = update.args[0]
    values: list[Tensor] = [node.meta["val"] for node in params]
    known = _known.setdefault(step.optimizer, {})
    layouts = tuple((tuple(v.shape), v.stride(), v.dtype, v.device) for v in values)
    key = layouts, repr([_settings(group) for group in step.optimizer.param_groups])
    if key not in known:
        known[key] = _rehearsed(step, values)
    return known[key]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What says how a group is updated, learning rates and other numbers aside."""
    return {name: value for name, value in group.items() if isinstance(value, (bool, type(None)))}


def _rehearsed(step: OwnStep, values: Sequence[Tensor]) -> OwnStepMemory | None:
    if is_patched(step.optimizer) or not _may_be_copied(step.optimizer):
        return None  # what runs is somebody's own function, or would write to what is shared
    state_bytes = 0

    def make() -> Any:
        optimizer = at_its_first_step(step, [_without_values(value) for value in values])

        def twice() -> None:
            nonlocal state_bytes
            with torch.no_grad():
                step_without_hooks(optimizer)
                step_without_hooks(optimizer)
            tensors = [t for t in pytree.tree_iter(dict(optimizer.state)) if isinstance(t, Tensor)]
            storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
            state_bytes = sum(storage.nbytes() for storage in storages.values())

        return twice

    try:
        most_bytes = rehearse(make, LATE)
    except Exception:
        return None
    return OwnStepMemory(state_bytes, max(most_bytes - state_bytes, 0))


def _may_be_copied(optimizer: Optimizer) -> bool:
    """Whether all that an optimizer has beside what every optimizer has are plain values: a copy
    shares the others, tensors and lists and optimizers of its own, and would change them."""
    plain = (bool, int, float, str, type(None), type, FunctionType, MethodType)
    others = (
        value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "defaults", "step")
        and not name.startswith("_optimizer_")
    )
    return all(isinstance(value, plain) for value in others)


def _without_values(value: Tensor) -> nn.Parameter:
    """A parameter of a value's layout, and its gradient."""
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    made = nn.Parameter(like)
    made.grad = torch.empty_like(like)
    return made


def at_its_first_step(step: OwnStep, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """A copy of an optimizer that has no state yet and that nobody watches.

    Args:
        step: the optimizer's.
        parameters: what the copy updates in the place of the step's, in their order.
    """
    of_parameter = {id(own): p for own, p in zip(step.parameters, parameters, strict=True)}
    optimizer: Optimizer = object.__new__(type(step.optimizer))
    vars(optimizer).update(vars(step.optimizer))
    vars(optimizer).pop("step", None)  # a scheduler's, which counts
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [
        {**group, "params": [of_parameter[id(p)] for p in group["params"] if id(p) in of_parameter]}
        for group in step.optimizer.param_groups
    ]
    return optimizer
