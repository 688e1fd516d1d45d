"""What a step must come to: the model itself, run eagerly on every rank's batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxzero._compat import pytree
from fxzero.errors import CaptureError
from fxzero.inspect.bisect.recorded import LR, Case
from fxzero.inspect.capture import scalar_of
from fxzero.inspect.optimizer import adamw
from fxzero.inspect.targets import Batch


class DrawsError(CaptureError):
    """A model that draws random numbers."""


def eager(case: Case) -> dict[str, list[Tensor]]:
    """By name, a tensor's value on each rank: losses, full gradients averaged over the ranks and,
    of a whole step, full parameters and optimizer states behind AdamW's.

    Raises:
        CaptureError: no parameter is trained.
        DrawsError: the model gives another loss when it is run again.
    """
    losses, gradients, names = [], [], []
    model = None
    for rank in range(case.world_size):
        model, batch = case.model_and_batch(rank)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        if not names:
            raise CaptureError(
                f"{type(model).__name__} has no parameter that requires a gradient, and a loss and "
                "its gradients are what bisect compares. Unfreeze one."
            )
        found = _run(case, model, batch)
        _check_repeats(case, rank, found[0])
        losses.append(found[0])
        gradients.append(found[1])
    means = [
        None if any(g is None for g in parts) else torch.stack(parts).mean(0)
        for parts in zip(*gradients, strict=True)
    ]
    result = {"loss": losses}
    for name, mean in zip(names, means, strict=True):
        if mean is not None:
            result[f"gradient of {name}"] = [mean] * case.world_size
    if case.step and model is not None:
        named = dict(model.named_parameters())
        for name, mean in zip(names, means, strict=True):
            named[name].grad = None if mean is None else mean.clone()  # which clipping changes
        if case.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_grad_norm)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = adamw(trained, lr=LR)
        optimizer.step()
        largest = max((_largest(mean) for mean in means), default=0.0)
        for name, mean in zip(names, means, strict=True):
            if mean is None or not mean.numel():
                continue  # no gradient reaches it: AdamW leaves it alone, and a graph leaves it out
            # AdamW divides by a gradient: of one that is rounding alone any step is right.
            if _largest(mean) > 1e3 * torch.finfo(mean.dtype).eps * largest:
                result[f"{name} after the update"] = [named[name].detach()] * case.world_size
            for word, state in optimizer.state[named[name]].items():
                # What AdamW's own step keeps is no input of a graph.
                if isinstance(state, Tensor) and optimizer.defaults["fused"]:
                    result[f"{word} of {name} after the update"] = [state] * case.world_size
    return result


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None or not gradient.numel() else gradient.abs().max().item()


def _run(case: Case, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
    """The mean loss of the micro-batches, and its gradients."""
    total: Tensor | None = None
    parameters = [p for p in model.parameters() if p.requires_grad]
    for part in _parts(batch, case.micro_batches):
        try:
            output = model(*part.args, **part.kwargs)
        except RuntimeError as error:
            if "dtype" not in str(error):
                raise
            raise CaptureError(
                f"{type(model).__name__} and its batch were cast to {case.dtype}, and its forward "
                f"casts to another dtype by name: {error}. Take that one (--dtype float32), or let "
                "it cast to the dtype of what it reads."
            ) from error
        loss = scalar_of(output) / case.micro_batches
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total, [p.grad for p in parameters]


def _parts(batch: Batch, count: int) -> list[Batch]:
    if count == 1:
        return [batch]
    rows = batch.num_rows or count

    def part(index: int) -> Batch:
        def cut(value: Any) -> Any:
            has_rows = isinstance(value, Tensor) and value.dim() and value.shape[0] == rows
            return value.chunk(count)[index] if has_rows else value

        args, kwargs = pytree.tree_map(cut, (batch.args, dict(batch.kwargs)))
        return Batch(tuple(args), kwargs)

    return [part(index) for index in range(count)]


def _check_repeats(case: Case, rank: int, loss: Tensor) -> None:
    model, batch = case.model_and_batch(rank)
    torch.manual_seed(case.seed + 1234)
    again, _ = _run(case, model, batch)
    if not torch.allclose(loss, again, rtol=1e-6, atol=0, equal_nan=True):
        raise DrawsError(
            f"the model's loss is {loss.item():.6g}, and {again.item():.6g} when it runs again on "
            "the same batch: it draws random numbers beyond nn.Dropout, and two orders of drawing "
            "are two results. Set what it draws to nothing in the factory."
        )
