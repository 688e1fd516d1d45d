"""Cross entropy of logits: every element against float64, and torch's own where it has the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels.cross_entropy import softmax_cross_entropy, softmax_cross_entropy_reference
from tests.kernels.checking import DEVICE, check_close, double, each_dtype, each_size, random

SETTINGS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3, "reduction": "sum"},
    {"ignore_index": 0, "reduction": "none"},
]


def targets(rows: int, classes: int) -> Tensor:
    """Classes, the first row's ignored."""
    found = torch.randint(classes, (rows,), device=DEVICE)
    found[0] = -100
    return found


def check(logits: Tensor, target: Tensor, **settings: Any) -> None:
    """Compare the loss and its gradient with those of the reference in float64."""
    (wide,) = double(logits)
    found = softmax_cross_entropy(logits, target, **settings)
    expected = softmax_cross_entropy_reference(wide, target, **settings)
    assert found.dtype is torch.float32
    size = logits.shape[-1]
    # Each row's loss is a difference of a log-sum-exp, a logit and a mean of logits. exp, log and
    # the squares of the z-loss are some twenty operations; a sum of rows adds their depth.
    per_row = 2 * wide.detach().abs().amax() + torch.logsumexp(wide.detach(), -1).abs().max()
    per_row = (
        per_row + settings.get("z_loss", 0) * torch.logsumexp(wide.detach(), -1).square().max()
    )
    scale = per_row * (len(logits) if settings.get("reduction") == "sum" else 1)
    check_close(found, expected, scale=scale, operations=20, terms=size * len(logits))
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad.double())
    assert logits.grad is not None
    # exp(x − lse): a relative error of |x − lse|·u, beside that of the sum.
    spread = float((wide.detach() - torch.logsumexp(wide.detach(), -1, keepdim=True)).abs().max())
    check_close(
        logits.grad, wide.grad, operations=20 + 2 * spread, terms=size, scale=grad.abs().max()
        * (1 if settings.get("reduction") in ("sum", "none") else 1 / max(len(logits) - 1, 1))
        * (1 + 2 * settings.get("z_loss", 0) * torch.logsumexp(wide.detach(), -1).abs().max()),
    )  # fmt: skip


@each_dtype
@each_size
def test_sizes(dtype: torch.dtype, size: int) -> None:
    check(random(4, size, dtype=dtype, grad=True), targets(4, size))


@each_dtype
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    target = targets(5, 127)
    if settings.get("ignore_index") == 0:
        target[0] = 0
    check(random(5, 127, dtype=dtype, grad=True), target, **settings)


def test_more_classes_than_a_block_holds() -> None:
    logits = random(2, 9000, grad=True)
    check(logits, torch.tensor([8999, 4096], device=DEVICE), label_smoothing=0.1)


def test_rows_apart_and_strided() -> None:
    leaf = random(6, 300, grad=True)
    logits = leaf[::2, 10:137]
    target = targets(3, 127)
    found = softmax_cross_entropy(logits, target)
    found.backward()
    (wide,) = double(leaf)
    F.cross_entropy(wide[::2, 10:137], target).backward()
    assert leaf.grad is not None
    check_close(leaf.grad, wide.grad, operations=40, terms=127)
    transposed = random(127, 3, grad=True)
    check(transposed.detach().t().requires_grad_(), target)


def test_any_rank() -> None:
    logits, target = random(2, 3, 31), torch.randint(31, (2, 3), device=DEVICE)
    found = softmax_cross_entropy(logits, target, reduction="none")
    assert found.shape == (2, 3)
    torch.testing.assert_close(
        found, F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(2, 3)
    )
    single = softmax_cross_entropy(logits[0, 0], target[0, 0])
    torch.testing.assert_close(single, found[0, 0])


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], device=DEVICE, requires_grad=True)
    loss = softmax_cross_entropy(logits, torch.tensor([0, 1], device=DEVICE), reduction="none")
    expected = torch.tensor([0.0, 1.0986123], device=DEVICE)
    # The log-sum-exp and the logit that is taken from it are each rounded at 1e4.
    torch.testing.assert_close(loss, expected, atol=2 * 2.0**-24 * 1e4, rtol=0)
    loss.sum().backward()
    assert bool(torch.isfinite(logits.grad).all())


def test_classes_that_cannot_be() -> None:
    """A mask of −inf leaves the other classes' probabilities whole."""
    logits = random(3, 8)
    logits[:, 5:] = float("-inf")
    logits.requires_grad_()
    target = torch.tensor([0, 1, 2], device=DEVICE)
    loss = softmax_cross_entropy(logits, target)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))
    loss.backward()
    assert logits.grad is not None
    assert bool((logits.grad[:, 5:] == 0).all())


def test_nothing_but_ignored_rows() -> None:
    logits = random(3, 8, grad=True)
    target = torch.full((3,), -100, device=DEVICE)
    loss = softmax_cross_entropy(logits, target)
    assert bool(loss.isnan())  # a mean of nothing, as in torch
    loss.backward()
    assert logits.grad is not None
    assert bool((logits.grad == 0).all())


def test_no_rows() -> None:
    logits = random(0, 8, grad=True)
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    loss = softmax_cross_entropy(logits, empty, reduction="sum")
    loss.backward()
    assert float(loss) == 0
    assert logits.grad is not None
    assert logits.grad.shape == (0, 8)


def test_gradients_by_finite_differences() -> None:
    logits = random(3, 7, dtype=torch.float64, grad=True)
    for settings in SETTINGS:
        target = torch.tensor([0, 6, 3], device=DEVICE)

        def loss(x: Tensor, target: Tensor = target, settings: Any = settings) -> Tensor:
            return softmax_cross_entropy(x, target, **settings)

        assert torch.autograd.gradcheck(loss, (logits,))


def test_operators_are_well_formed() -> None:
    logits, target = random(3, 7, grad=True), targets(3, 7)
    ops = torch.ops.fxzero
    torch.library.opcheck(ops.softmax_cross_entropy.default, (logits, target, -100, 0.1, 0.01))
    loss, lse = ops.softmax_cross_entropy(logits.detach(), target, -100, 0.1, 0.01)
    torch.library.opcheck(
        ops.softmax_cross_entropy_backward.default,
        (loss, logits.detach(), target, lse, -100, 0.1, 0.01),
    )


def test_compiled_equals_eager() -> None:
    logits, target = random(3, 31, grad=True), targets(3, 31)
    eager = softmax_cross_entropy(logits, target, label_smoothing=0.1)
    (expected,) = torch.autograd.grad(eager, logits)
    compiled = torch.compile(softmax_cross_entropy, backend="aot_eager", fullgraph=True)
    loss = compiled(logits, target, label_smoothing=0.1)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.equal(loss, eager)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)), "logits"),
        ((torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)), "target must be of shape"),
        ((torch.zeros(2, 3), torch.zeros(2)), "target must be int64"),
        ((torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64)), "logits"),
        (
            (torch.zeros(2, 3, device="meta"), torch.zeros(2, dtype=torch.int64)),
            "target must be on",
        ),
    ],
)
def test_bad_arguments(arguments: tuple[Tensor, Tensor], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        softmax_cross_entropy(*arguments)


@pytest.mark.parametrize(
    "settings", [{"label_smoothing": 1.5}, {"z_loss": -1.0}, {"reduction": "average"}], ids=str
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match=next(iter(settings))):
        softmax_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), **settings)


def test_a_target_that_is_no_class() -> None:
    logits, target = random(3, 7), torch.tensor([0, 7, 1], device=DEVICE)
    if DEVICE == "cuda":  # raising would mean waiting
        assert bool(softmax_cross_entropy(logits, target, reduction="none").isnan()[1])
        return
    with pytest.raises(KernelError, match=r"target must be within \[0, 7\).*\[7\]"):
        softmax_cross_entropy(logits, target)
