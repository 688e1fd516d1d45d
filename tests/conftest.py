"""Fixtures that all tests share.

A test that needs processes takes `ranks` and a parameter called `world`; tests are run
in the order of their worlds, so that each pool of processes is started once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when its functions are defined, its own included, whether they will be
    # interpreted: before anything else imports it. Whether CPU tensors go to kernels is decided
    # by the same variable when they are called: only in tests/kernels, whose fixture sets it.
    os.environ["TRITON_INTERPRET"] = "1"
    import fxzero.kernels  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

from tests.parity.harness import Pools


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of fxzero are errors. Not in pyproject.toml: pytest would import fxzero for it
    before this file."""
    config.addinivalue_line("filterwarnings", "error::fxzero.errors.FxZeroWarning")


@pytest.fixture(scope="module", autouse=True)
def _forget_what_dynamo_compiled() -> None:
    """A module's tests mean the same whatever ran before: a second size makes shapes dynamic."""
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2).run(fn, *args)``: call a function on two gloo processes."""
    pools = Pools()
    yield pools
    pools.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by world size, those without one first; the sort is stable."""
    items.sort(key=_world_of)


def _world_of(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("world", 0) if callspec is not None else 0
