"""Parameters that have fewer rows than there are ranks, and many bytes: somebody says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero import FxZeroWarning
from fxzero._compat import fake_tensors
from fxzero.inspect.capture import fake_ranks


class Experts(nn.Module):
    """Eight experts in one parameter, beside a matrix."""

    def __init__(self, rows: int = 2048, dense: int = 1024) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(8, rows, 2048))
        self.dense = nn.Linear(2048, dense, bias=False)


def said(
    build: Callable[[], nn.Module], ranks: int, zero: int = 3, replicas: int = 1
) -> tuple[nn.Module, list[str]]:
    """A model on the first of some ranks, and what sharding it warned of."""
    with fake_ranks(ranks), warnings.catch_warnings(record=True) as found:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas) if replicas > 1 else (ranks,))
        warnings.simplefilter("always", FxZeroWarning)
        with fake_tensors():
            model = fxzero.shard(build(), zero=zero, mesh=mesh)
    return model, [str(one.message) for one in found]


@pytest.mark.parametrize("zero", [1, 3])
def test_what_it_costs_is_said(zero: int) -> None:
    """The figures are those of the shards."""
    model, (text,) = said(Experts, 64, zero)
    held = sum(p.to_local().numel() for p in model.parameters()) * 4  # type: ignore[operator]
    full_bytes = 4 * (8 * 2048 * 2048 + 1024 * 2048)
    assert held == 4 * (2048 * 2048 + 16 * 2048)
    assert "have fewer rows than the 64 ranks (1, as experts (8, 2048, 2048))" in text
    assert f"hold {held / 2**30:.1f} GiB of parameters" in text
    assert f"even share is {full_bytes / 64 / 2**30:.1f}" in text
    assert f"carry {4 * 56 * 2048 * 2048 / 2**30:.1f} GiB of padding" in text
    assert "share among 8 ranks" in text


@pytest.mark.parametrize(
    ("ranks", "zero", "replicas", "build"),
    [
        pytest.param(8, 3, 1, Experts, id="a row each"),
        pytest.param(64, 0, 1, Experts, id="nothing is shared"),
        pytest.param(64, 3, 8, Experts, id="shared among eight"),
        pytest.param(64, 3, 1, lambda: Experts(rows=8), id="few bytes"),
        pytest.param(16, 3, 1, lambda: Experts(512, 65536), id="a small part of the model"),
    ],
)
def test_nothing_is_said_of_what_costs_little(
    ranks: int, zero: int, replicas: int, build: Callable[[], nn.Module]
) -> None:
    _, texts = said(build, ranks, zero, replicas)
    assert texts == []
