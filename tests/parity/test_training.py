"""The comparison that all parity tests rest on must see what can go wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.parity.models import EXAMPLES
from tests.parity.training import (
    RTOL,
    assert_same,
    assert_same_trace,
    build,
    make_batch,
    train,
)

REFERENCE = torch.tensor([1e-3, 1.0, -4.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (None, "a: None where torch.float64"),
        (REFERENCE.float(), "a: torch.float32"),
        (REFERENCE[:2], r"shape \(2,\) where"),
        (REFERENCE * torch.nan, "a: off by nan"),
        (REFERENCE + 5e-12, "1.25e-12 of the largest"),
        (torch.zeros(3, dtype=torch.float64), "a: off by 4.00e[+]00"),
    ],
)
def test_differences_are_seen(actual: Tensor | None, message: str) -> None:
    """A missing gradient, another dtype or shape, a NaN, an error just above the tolerance."""
    with pytest.raises(AssertionError, match=message):
        assert_same({"a": actual}, {"a": REFERENCE}, 1e-12)


def test_missing_and_unexpected_names_are_seen() -> None:
    """Names are part of the comparison."""
    with pytest.raises(AssertionError, match=r"missing \['a'\], not expected \['b'\]"):
        assert_same({"b": REFERENCE}, {"a": REFERENCE}, 1.0)


def test_rounding_is_allowed_and_nothing_is_with_zero() -> None:
    """The tolerance is of the largest element, so small elements may be off by as much."""
    assert_same({"a": REFERENCE + 3e-12}, {"a": REFERENCE}, 1e-12)
    with pytest.raises(AssertionError):
        assert_same({"a": REFERENCE + 1e-15}, {"a": REFERENCE}, 0)


def test_reference_of_zeros() -> None:
    """There is no largest element to measure by."""
    zeros = torch.zeros(3)
    assert_same({"a": zeros + 1e-13}, {"a": zeros}, 1e-12)
    with pytest.raises(AssertionError):
        assert_same({"a": zeros + 1e-11}, {"a": zeros}, 1e-12)


def test_every_part_of_a_trace_counts() -> None:
    """One wrong element anywhere is reported under its part and name."""
    example = EXAMPLES["convnet"]
    batch = make_batch(example, torch.float64, seed=0)
    trace = train(build(example, torch.float64), example.loss, [batch])
    for part in dataclasses.fields(trace):
        tensors = getattr(trace, part.name)
        name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
        wrong = {**tensors, name: tensors[name] + 1e-6 * tensors[name].abs().max()}
        with pytest.raises(AssertionError, match=f"^{part.name}: {name}: off by"):
            assert_same_trace(
                dataclasses.replace(trace, **{part.name: wrong}), trace, RTOL[torch.float64]
            )


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_examples_train(name: str) -> None:
    """Every trainable parameter that is used gets a gradient that is not only rounding."""
    example = EXAMPLES[name]
    batch = make_batch(example, torch.float64, seed=0)
    model = build(example, torch.float64)
    gradients = train(model, example.loss, [batch]).gradients
    for key, parameter in model.named_parameters():
        gradient = gradients[key]
        if not parameter.requires_grad or key.startswith("unused"):
            assert gradient is None, key
        else:
            assert gradient is not None, key
            assert gradient.abs().max() > 1e-4, f"{key}: {gradient.abs().max():.1e}"
