"""What a step minimises: the loss in what a model returns, or what a loss function makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxzero._compat import pytree
from fxzero.errors import CaptureError


def loss_function(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    micro_batches: int,
    fp32_loss: bool,
    find_loss: Callable[[Any], Any] | None = None,
    call: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The loss of the first of some micro-batches, as a function of the whole batch.

    Args:
        loss_fn: gets the model's output and the batch's last argument; None if the model returns
            its loss.
        fp32_loss: whether `loss_fn` gets a low-precision output as fp32.
        find_loss: what finds the loss in the model's output, if not `loss_of`.
        call: what gets the batch in the model's place, and calls the model.
    """
    find = find_loss or loss_of
    forward = call or model

    def first(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0:
            return torch.ops.fxzero.micro_batch(value, 0, micro_batches)
        return value

    def widen(value: Any) -> Any:
        low = (torch.float16, torch.bfloat16)
        if isinstance(value, Tensor) and value.dtype in low:
            return value.float()
        return value

    def loss(*batch: Any, **kwargs: Any) -> Any:
        if micro_batches > 1:
            batch, kwargs = pytree.tree_map(first, (batch, kwargs))
        if loss_fn is None:
            found = find(forward(*batch, **kwargs))
        else:
            output = forward(*batch[:-1], **kwargs)
            if fp32_loss:
                output = pytree.tree_map(widen, output)
            found = loss_fn(output, batch[-1])
        return found

    return loss


def loss_of(output: Any) -> Any:
    """The loss in what a model returns."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(output, (tuple, list)):
        scalars = [item for item in output if isinstance(item, Tensor) and item.dim() == 0]
        return scalars[0] if len(scalars) == 1 and output[0] is scalars[0] else output
    return getattr(output, "loss", output)


_THIN = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose wrappers pass on what they wrap: a compiled step needs nothing of them."""


def unwrapped(wrapper: Any, attribute: str, kind: type) -> Any:
    """What a wrapper such as accelerate's, of the same kind as what it wraps, holds.

    Raises:
        CaptureError: a wrapper of others, whose own ``step()`` would be left out.
    """
    while isinstance(inner := getattr(wrapper, attribute, None), kind):
        name = type(wrapper).__qualname__
        if type(wrapper).__module__.partition(".")[0] not in _THIN:
            raise CaptureError(
                f"{name} wraps {type(inner).__qualname__}, and a compiled step would run that "
                f"one's update: what {name}.step does besides would be left out. Give the inner "
                f"{attribute}, or use the ordinary loop, in which {name}.step is called."
            )
        wrapper = inner
    return wrapper
