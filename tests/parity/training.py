"""A training loop that runs alike on a sharded model and on its reference, and leaves a trace.

The comparison is per tensor and elementwise: an error may be `rtol` of the tensor's
largest reference element, so that a gradient of a small layer is not hidden by a large
one. A tensor whose reference is zero everywhere gets `rtol` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.parity.models import Batch, Example

GLOBAL_ROWS = 12
"""Divisible by every world size under test."""
STEPS = 5
RTOL = {torch.float64: 1e-12, torch.float32: 1e-5}

Tensors = dict[str, Tensor | None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Trace:
    """All that a few training steps leave behind, as full tensors by name."""

    losses: Tensors
    """Of each step, averaged over the ranks."""
    gradients: Tensors
    """Of the first step."""
    parameters: Tensors
    """After the last step, as all below."""
    optimizer_state: Tensors
    buffers: Tensors
    """Of this rank."""


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Steps large enough that five of them move every parameter by several per cent."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def build(example: Example, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The example's model, equal on all ranks for equal seeds."""
    torch.manual_seed(seed)
    return example.build().to(dtype)


def make_batch(example: Example, dtype: torch.dtype, seed: int, rows: int = GLOBAL_ROWS) -> Batch:
    """A batch over all ranks, its floating-point tensors in `dtype`."""
    return cast(example.make_batch(rows, seed), dtype)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Leave token ids as they are, bring the rest to `dtype`."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in batch.items()
    }


def rows_of_rank(batch: Batch) -> Batch:
    """This rank's equal part of a batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {name: tensor.chunk(world_size)[rank] for name, tensor in batch.items()}


def train(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    batches: Iterable[Batch],
    make_optimizer: MakeOptimizer = adamw,
) -> Trace:
    """One optimizer step for each batch."""
    optimizer = make_optimizer(model.parameters())
    losses: Tensors = {}
    gradients: Tensors = {}
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        losses[f"step {len(losses)}"] = mean_over_ranks(value)
        gradients = gradients or full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return Trace(
        losses=losses,
        gradients=gradients,
        parameters=full_parameters(model),
        optimizer_state=full_optimizer_state(model, optimizer),
        buffers={name: buffer.clone() for name, buffer in _plain(model.named_buffers())},
    )


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a plain tensor over the ranks; itself without a process group."""
    total = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor. A collective, so all ranks must ask in the same order."""
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def full_parameters(model: nn.Module) -> Tensors:
    """Every parameter in full, by the name it has in the model as its author wrote it."""
    return {name: full(parameter) for name, parameter in _plain(model.named_parameters())}


def full_gradients(model: nn.Module) -> Tensors:
    """Every gradient in full; None where the parameter has none."""
    return {
        name: None if parameter.grad is None else full(parameter.grad)
        for name, parameter in _plain(model.named_parameters())
    }


def full_optimizer_state(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Every tensor that the optimizer keeps, by parameter and by its own name for it."""
    return {
        f"{name} {key}": full(value)
        for name, parameter in _plain(model.named_parameters())
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _plain(named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Names without what torch.compile and DDP put before them."""
    for name, tensor in named:
        yield name.removeprefix("_orig_mod.").removeprefix("module."), tensor


def assert_same_trace(actual: Trace, expected: Trace, rtol: float) -> None:
    """Compare every part of two traces, and report all that differ at once."""
    found = [
        f"{part}: {difference}"
        for part in ("losses", "gradients", "parameters", "optimizer_state", "buffers")
        for difference in differences(getattr(actual, part), getattr(expected, part), rtol)
    ]
    assert not found, "\n".join(found)


def assert_same(actual: Tensors, expected: Tensors, rtol: float) -> None:
    """Compare tensors by name. With ``rtol=0`` they must be equal bit by bit."""
    found = differences(actual, expected, rtol)
    assert not found, "\n".join(found)


def differences(actual: Tensors, expected: Tensors, rtol: float) -> list[str]:
    """What differs between tensors of the same names, a line each."""
    if actual.keys() != expected.keys():
        missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
        return [f"missing {sorted(missing)}, not expected {sorted(extra)}"]
    found = (_difference(actual[name], expected[name], rtol) for name in expected)
    return [f"{name}: {why}" for name, why in zip(expected, found, strict=True) if why]


def _difference(actual: Tensor | None, expected: Tensor | None, rtol: float) -> str | None:
    if actual is None or expected is None:
        same = actual is expected
        return None if same else f"{_kind(actual)} where {_kind(expected)} is expected"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{_kind(actual)} where {_kind(expected)} is expected"
    if expected.numel() == 0:
        return None
    error = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    allowed = rtol * (largest or 1.0)
    # Negated, so that a NaN does not pass.
    if not error <= allowed:
        return f"off by {error:.2e}, {error / (largest or 1.0):.2e} of the largest ({rtol:.0e})"
    return None


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
