"""Hand shards to a compiled graph as plain tensors.

Dynamo's graph takes DTensor parameters and begins with

    local = param.to_local();  full = unshard(local, key, sync)

AOTAutograd can trace DTensor inputs, at a price: each is wrapped and unwrapped in every
one of its tracings and again on every call (measured on a 24-layer GPT: a quarter of the
time of a compilation). Here the graph takes the local tensors themselves; one autograd
node in front of it turns the parameters into them, and their gradients into DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fxzero._compat import (
    gradient_of,
    is_plain_to_local,
    layout_of,
    local_tensor,
    own_local_fake,
    without_torch_function,
)


def take_local_tensors(
    module: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[list[Any], tuple[int, ...]]:
    """Let Dynamo's graph take the local tensors of DTensors that it only reads locally.

    Args:
        module: Dynamo's graph, changed in place.
        example_inputs: its inputs.

    Returns:
        The inputs with fake local tensors among them, and the positions of those.
    """
    inputs = list(example_inputs)
    positions = []
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        readers = list(node.users)
        value = node.meta.get("example_value")
        if not isinstance(value, DTensor) or not all(is_plain_to_local(n) for n in readers):
            continue
        local = own_local_fake(node)
        inputs[position] = node.meta["example_value"] = local
        positions.append(position)
        for reader in readers:
            reader.replace_all_uses_with(node)
            module.graph.erase_node(reader)
    if positions:
        module.recompile()
    return inputs, tuple(positions)


def with_parameters(compiled: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
    """Make a function of local tensors at `positions` one of DTensors."""
    if not positions:
        return compiled

    def call(*inputs: Any) -> Any:
        values = list(inputs)
        with without_torch_function():
            records = torch.is_grad_enabled()
            trainable = [p for p in positions if records and values[p].requires_grad]
            for position in set(positions).difference(trainable):
                values[position] = local_tensor(values[position]).detach()
        if trainable:
            local = _LocalTensors.apply(*(values[p] for p in trainable))
            for position, value in zip(trainable, local, strict=True):
                values[position] = value
        return compiled(*values)

    return call


class _LocalTensors(torch.autograd.Function):
    """The local tensors of DTensors; their gradients become DTensors of the same layout.

    A stage-3 backward gathers shards again, so a parameter that changed since the forward
    would give a wrong gradient. In-place operations on a DTensor do not show in its local
    tensor's version, which the graph's own check looks at; hence the parameters are saved.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*parameters)
        ctx.layouts = tuple(layout_of(parameter) for parameter in parameters)
        ctx.set_materialize_grads(False)  # a parameter without gradient has None, not zeros
        return tuple(local_tensor(parameter).detach() for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        _ = ctx.saved_tensors  # raises if one was written to; hooks may have replaced their values
        return tuple(
            None if grad is None else gradient_of(grad, layout)
            for grad, layout in zip(grads, ctx.layouts, strict=True)
        )
