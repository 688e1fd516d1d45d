"""Fake tensors say what real ones are."""

from __future__ import annotations

import pytest
import torch

from fxzero._compat.fakes import (
    empty_fake,
    fake_tensors,
    is_plain_fake,
    let_fakes_have_dtypes_of_real_ones,
    let_fakes_say_their_device_at_once,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_cpu(dtype: torch.dtype, causal: bool) -> None:
    """The logarithms that it keeps for backward are float64 where the query is."""
    let_fakes_have_dtypes_of_real_ones()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.randn(2, 3, 5, 4, dtype=dtype)
    real = attention(query, query, query, 0.0, causal)
    with fake_tensors() as mode:
        fake = attention(*[mode.from_tensor(query)] * 3, 0.0, causal)
    for found, expected in zip(fake, real, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 0), (1, 1)), ((), ()), ((3,), (2,))],
)
def test_an_empty_one_is_what_torch_makes(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Of the same layout, in the same mode, and in nobody else's memory."""
    with fake_tensors() as mode:
        expected = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        inside = empty_fake(expected, mode)
    for found in (inside, empty_fake(expected, mode)):
        assert is_plain_fake(found)
        assert (found.shape, found.stride(), found.dtype) == (shape, stride, dtype)
        assert found.device == expected.device
        assert found.fake_mode is mode  # type: ignore[attr-defined]
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert found.untyped_storage()._cdata != expected.untyped_storage()._cdata
        assert not found.requires_grad
        assert found.is_leaf
    assert (inside + inside).device == expected.device


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_a_functional_tensor_is_on_its_fakes_device(device: str) -> None:
    """However often it is said that it is to be asked at once."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    let_fakes_say_their_device_at_once()
    let_fakes_say_their_device_at_once()
    with fake_tensors():
        value = torch.empty(2, device=device)
        with FunctionalTensorMode():
            functional = FunctionalTensor.to_functional(value)
            assert functional.device == value.device
            assert (functional + 1).device == value.device
