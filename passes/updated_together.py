"""Which parameters are updated together, and whether our own kernel computes their update.

The gradients that one transfer brings are there at one time, and so are those that a layer's
backward leaves where nothing travels. What is ready together and of one parameter group is one
update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from fxzero.graph import Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.runtime.optimizers import OptimizerLayout
from fxzero.sharding.ops import local_of


@dataclass(frozen=True)
class Ready:
    """Gradients that are there at one time."""

    place: str
    """The bucket that brings them, or the layer whose backward ends with them."""
    keys: list[str]
    """Their parameters."""
    grads: list[fx.Node]


def ready_together(graph: StepGraph, layout: OptimizerLayout) -> list[Ready]:
    """The gradients of the optimizer's parameters, by the time at which they are there."""
    values = graph.output_values
    found: dict[str, Ready] = {}
    for position, key in graph.gradients.items():
        node = values[position]
        if not isinstance(node, fx.Node) or key not in layout.parameters:
            continue
        place = _bucket(node) or f"layer {stamp_of(node).layer}"
        ready = found.setdefault(place, Ready(place, [], []))
        ready.keys.append(key)
        ready.grads.append(node)
    return list(found.values())


def _bucket(node: fx.Node) -> str:
    """The bucket of the reduce that a gradient comes from; "" if nothing was reduced."""
    while node.op == "call_function":
        stamp = stamp_of(node)
        if stamp.bucket:
            return stamp.bucket
        if stamp.role is Role.ACCUMULATE:
            node = node.all_input_nodes[-1]
        elif stamp.role in (Role.PART, Role.WAIT, Role.FINISH):
            node = node.all_input_nodes[0]
        else:
            break
    return ""


@dataclass(frozen=True)
class Together:
    """Parameters of one group whose gradients are there at one time."""

    place: str
    group: int
    keys: list[str]
    grads: list[fx.Node]


def updated_together(graph: StepGraph, layout: OptimizerLayout) -> list[Together]:
    """What one fused update takes, in order: of one group, and where parameters live."""
    found = []
    for ready in ready_together(graph, layout):
        for index in range(len(layout.kernels)):
            by_device: dict[torch.device, list[tuple[str, fx.Node]]] = {}
            for key, grad in zip(ready.keys, ready.grads, strict=True):
                if layout.group[key] == index:
                    device = local_of(layout.parameters[key]).device
                    by_device.setdefault(device, []).append((key, grad))
            for members in by_device.values():
                keys, grads = map(list, zip(*members, strict=True))
                found.append(Together(ready.place, index, keys, grads))
    return found


_STATE = ("exp_avg", "exp_avg_sq", "step")
"""Of an Adam that `adamw_` can compute: without the largest averages."""


def fits_own_kernel(layout: OptimizerLayout, together: Together) -> bool:
    """Whether `fxzero.kernels.adamw_` computes the update of some parameters."""
    kernel = layout.kernels[together.group]
    if kernel.name not in ("adam", "adamw") or kernel.state != _STATE:
        return False
    if layout.optimizer.param_groups[together.group]["maximize"]:
        return False
    own = [local_of(layout.parameters[key]) for key in together.keys]
    dtypes = {parameter.dtype for parameter in own}
    states = {
        layout.optimizer.state[layout.parameters[key]][name].dtype
        for key in together.keys
        for name in _STATE[:2]
    }
    allowed = {torch.float64} if dtypes == {torch.float64} else {torch.float32, torch.bfloat16}
    alike = len(dtypes) == len(states) == 1 and states <= allowed
    return alike and all(parameter.is_contiguous() for parameter in own)


def moved_bytes(graph: StepGraph, layout: OptimizerLayout, together: Together) -> int:
    """What an Adam must read and write: parameters and state twice, gradients once.

    On the rank with the largest shards: all ranks take the same kernel, or what each of them holds
    in full would drift apart.
    """
    total = 0
    for key in together.keys:
        spec = graph.specs[key]
        state = layout.optimizer.state[layout.parameters[key]]
        per_element = 3 * spec.dtype.itemsize
        per_element += 2 * sum(state[name].dtype.itemsize for name in _STATE[:2])
        rows = spec.chunk_rows if spec.shape else 1
        total += rows * math.prod(spec.shape[1:]) * per_element
    return total
