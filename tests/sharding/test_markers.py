"""What a marked module hands to Dynamo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero.inspect.capture import fake_ranks


def test_what_functional_call_is_given_is_no_parameter() -> None:
    """Shards that were computed are not gathered under a parameter's name, which nobody asked for:
    they meet plain tensors, and torch says so."""
    with fake_ranks(2):
        model = fxzero.shard(nn.Linear(4, 4), zero=3)

        def call(x: Tensor) -> Tensor:
            given = {name: p.detach() for name, p in model._parameters.items()}  # type: ignore[union-attr]
            result: Tensor = torch.func.functional_call(model, given, (x,))
            return result.sum()

        options = {"lower_regions": {"backend": "eager"}}
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            torch.compile(call, backend="fxzero", options=options)(torch.ones(2, 4))


def test_what_functional_call_is_given_in_full_is_taken_as_it_is() -> None:
    """Plain tensors are not gathered again."""
    with fake_ranks(2):
        model = fxzero.shard(nn.Linear(4, 4, bias=False), zero=3)
        full = {"weight": torch.eye(4)}

        def call(x: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(model, full, (x,))
            return result

        options = {"lower_regions": {"backend": "eager"}}
        x = torch.arange(8.0).view(2, 4)
        assert torch.equal(torch.compile(call, backend="fxzero", options=options)(x), x)
