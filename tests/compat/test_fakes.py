"""Fake tensors say what real ones are."""

from __future__ import annotations

import pytest
import torch

from fxzero._compat.fakes import fake_tensors, let_fakes_have_dtypes_of_real_ones


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
