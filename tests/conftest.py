"""Fixtures that all tests share.

A test that needs processes takes `ranks` and, unless it needs two of them, a parameter called
`world`; tests are run in the order of their worlds, so that each pool of processes is started
once. Of pytest's two workers one begins with tests of a single process, the other with those of
several; the first to be done takes over half of what the other has left, from its end.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# As torchrun has it for ranks. Two workers and their ranks share the cores: a thread that waits for
# another one's part of a loop would turn on a core that somebody else needs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # One folder for all workers and their ranks, for this run: a region is compiled once. Before
    # fxzero is imported, as torch then names a folder that all runs on the machine share.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fxzero-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

if not torch.cuda.is_available():
    # Triton decides when its functions are defined, its own included, whether they will be
    # interpreted: before anything else imports it. Whether CPU tensors go to kernels is decided
    # by the same variable when they are called: only in tests/kernels, whose fixture sets it.
    os.environ["TRITON_INTERPRET"] = "1"
    import fxzero.kernels  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

# A rule that a pass breaks and a later one mends by chance is found too; ranks inherit it.
os.environ.setdefault("FXZERO_VERIFY", "each")

from tests import garbage
from tests.parity.harness import Pools


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of fxzero are errors. Not in pyproject.toml: pytest would import fxzero for it
    before this file."""
    config.addinivalue_line("filterwarnings", "error::fxzero.errors.FxZeroWarning")
    garbage.keep_house_less_often()


@pytest.fixture(scope="module", autouse=True)
def _forget_what_dynamo_compiled() -> None:
    """A module's tests mean the same whatever ran before: a second size makes shapes dynamic."""
    torch._dynamo.reset()
    garbage.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(2).run(fn, *args)``: call a function on two gloo processes."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.hookimpl(trylast=True)  # once it is known which of them run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of several processes where the second of two workers begins, sorted by world size.

    Each worker begins with half of all tests: the other one runs tests of a single process
    meanwhile, of which there are more. What is left of those at the end is what it takes over.
    """
    alone = [item for item in items if not _world_of(item)]
    together = sorted((item for item in items if _world_of(item)), key=_world_of)
    half = len(items) // 2
    items[:] = [*alone[:half], *together, *alone[half:]]


def _world_of(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "world" in callspec.params:
        return int(callspec.params["world"])
    return 2 if "ranks" in getattr(item, "fixturenames", ()) else 0  # ``ranks(2)``
