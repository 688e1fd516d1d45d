"""The loss of a linear layer without its logits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxzero.errors import KernelError
from fxzero.kernels import chunked_cross_entropy
from fxzero.kernels.chunked_cross_entropy import (
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from tests.kernels.checking import DEVICE, DTYPES, check_close, double, random
from tests.tiers import in_two_tiers

SETTINGS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2, "reduction": "sum"},
    {"ignore_index": 3},
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one short."""
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_BYTES", 1)


def arguments(
    rows: int, width: int, classes: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias that want gradients, and targets of which some are ignored."""
    leaves = [
        random(rows, width, dtype=dtype, grad=True),
        random(classes, width, dtype=dtype, grad=True),
        random(classes, dtype=dtype, grad=True),
    ]
    target = torch.randint(classes, (rows,), device=DEVICE)
    target[::7] = -100
    return leaves, target


@pytest.mark.parametrize(("dtype", "classes"), in_two_tiers([*product(DTYPES, [31, 1000, 4097])]))
def test_against_float64(dtype: torch.dtype, classes: int) -> None:
    rows = 150 if classes < 4097 else 70  # three chunks or two, the last one short
    leaves, target = arguments(rows, 16, classes, dtype)
    wide = double(*leaves)
    linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2]).backward()
    expected = linear_cross_entropy_reference(wide[0], wide[1], target, bias=wide[2])
    expected.backward()
    kept = int((target != -100).sum())
    probabilities = (wide[0] @ wide[1].t() + wide[2]).softmax(-1).detach()
    hot = F.one_hot(target.clamp(min=0), classes) * (target != -100)[:, None]
    slope = ((probabilities + hot) * (target != -100)[:, None]) / kept
    # The absolute terms of each gradient. Logits are rounded once, to an error of the largest of
    # them times u; so is their exponential, the slope, and the result.
    h, w = wide[0].detach().abs(), wide[1].detach().abs()
    scales = [(slope @ w).max(), (slope.t() @ h).max(), slope.sum(0).max()]
    largest = float((h @ w.t()).max() + wide[2].detach().abs().max())
    for leaf, reference, scale in zip(leaves, wide, scales, strict=True):
        assert leaf.grad is not None
        check_close(
            leaf.grad, reference.grad, scale=scale, roundings=3 + largest,
            operations=40 + 2 * largest, terms=rows * classes,
        )  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_in_float64_it_is_the_reference(settings: dict[str, Any]) -> None:
    leaves, target = arguments(150, 16, 37, torch.float64)
    again = double(*leaves)
    loss = linear_cross_entropy(leaves[0], leaves[1], target.clamp(min=0), **settings)
    loss.backward()
    expected = linear_cross_entropy_reference(again[0], again[1], target.clamp(min=0), **settings)
    expected.backward()
    assert abs(float(loss - expected)) <= 1e-12 * abs(float(expected))
    for leaf, reference in zip(leaves[:2], again[:2], strict=True):
        assert leaf.grad is not None
        assert reference.grad is not None
        error = float((leaf.grad - reference.grad).abs().max())
        assert error <= 1e-12 * float(reference.grad.abs().max())


def test_gradients_by_finite_differences() -> None:
    leaves, target = arguments(5, 3, 7, torch.float64)
    for settings in SETTINGS:

        def loss(h: Tensor, w: Tensor, b: Tensor, settings: Any = settings) -> Tensor:
            return linear_cross_entropy(h, w, target.clamp(min=0), bias=b, **settings)

        assert torch.autograd.gradcheck(loss, tuple(leaves))


def test_any_rank_and_stride() -> None:
    hidden, weight = random(16, 3, 50), random(31, 32)[:, ::2]
    target = torch.randint(31, (3, 50), device=DEVICE)
    found = linear_cross_entropy(hidden.permute(1, 2, 0), weight, target)
    expected = F.cross_entropy(
        (hidden.permute(1, 2, 0) @ weight.t()).flatten(0, 1), target.flatten()
    )
    torch.testing.assert_close(found, expected)


def test_only_what_is_wanted_is_computed() -> None:
    leaves, target = arguments(70, 8, 31)
    frozen = leaves[1].detach()
    linear_cross_entropy(leaves[0], frozen, target).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(leaves[0] @ frozen.t(), target), leaves[0])
    torch.testing.assert_close(leaves[0].grad, expected)
    with torch.no_grad():
        loss = linear_cross_entropy(leaves[0], leaves[1], target)
    assert not loss.requires_grad
    operator = torch.ops.fxzero.linear_cross_entropy
    parts = operator(leaves[0], leaves[1], None, target, -100, 0.0, 0.0, [False] * 3)
    assert [part.numel() for part in parts] == [1, 0, 0, 0]


def test_nothing_but_ignored_rows() -> None:
    leaves, _ = arguments(70, 8, 31)
    target = torch.full((70,), -100, device=DEVICE)
    loss = linear_cross_entropy(leaves[0], leaves[1], target)
    loss.backward()
    assert bool(loss.isnan())
    assert all(bool((leaf.grad == 0).all()) for leaf in leaves[:2] if leaf.grad is not None)


def test_a_second_derivative_is_refused() -> None:
    leaves, target = arguments(70, 8, 31)
    loss = linear_cross_entropy(leaves[0] * 2, leaves[1], target)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(loss, leaves[0], create_graph=True)


def test_a_loss_scale_that_float16_cannot_hold() -> None:
    """The gradient in float16 is that of the scaled loss: no over- or underflow on the way."""
    hidden, weight = random(70, 16, dtype=torch.float16, grad=True), random(50, 16) / 8
    weight = weight.half().requires_grad_()
    target = torch.randint(50, (70,), device=DEVICE)
    (linear_cross_entropy(hidden, weight, target) * 2.0**17).backward()
    wide = double(hidden, weight)
    (F.cross_entropy(wide[0] @ wide[1].t(), target) * 2.0**17).backward()
    assert hidden.grad is not None
    assert wide[0].grad is not None
    assert bool(torch.isfinite(hidden.grad).all())
    largest = float(wide[0].grad.abs().max())
    assert float((hidden.grad.double() - wide[0].grad).abs().max()) < 0.01 * largest


def test_operator_is_well_formed() -> None:
    leaves, target = arguments(5, 3, 7)
    torch.library.opcheck(
        torch.ops.fxzero.linear_cross_entropy.default,
        (*leaves, target, -100, 0.1, 0.1, [True, True, True]),
    )


def test_compiled_equals_eager() -> None:
    leaves, target = arguments(70, 8, 31)
    eager = linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2])
    expected = torch.autograd.grad(eager, leaves)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    loss = compiled(leaves[0], leaves[1], target, bias=leaves[2])
    found = torch.autograd.grad(loss, leaves)
    assert torch.equal(loss, eager)
    assert all(map(torch.equal, found, expected))


def test_chunks_are_even_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_BYTES", 64 << 20)
    rows = chunk_rows(4096, 50_304, torch.float32)
    assert rows % 64 == 0
    assert rows * 50_304 * 4 <= 1.3 * (64 << 20)
    assert chunk_rows(10, 50, torch.float32) == 64
    assert chunk_rows(0, 50, torch.float32) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 3)}, r"weight must be \[V, 4\]"),
        ({"weight": torch.zeros(5, 4, dtype=torch.bfloat16)}, "weight must be torch.float32"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "target must be of shape"),
        ({"target": torch.zeros(2)}, "target must be int64"),
        ({"hidden": torch.zeros(2, 4, dtype=torch.int64)}, "hidden must be float32"),
        ({"bias": torch.zeros(4)}, "bias must be of shape"),
        ({"reduction": "none"}, "reduction must be one of"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"target": torch.tensor([0, 9])}, r"target must be within \[0, 5\)"),
        ({"weight": torch.zeros(5, 4, device="meta")}, "weight must be on cpu"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(5, 4),
        "target": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(KernelError, match=message):
        linear_cross_entropy(**(given | change))
