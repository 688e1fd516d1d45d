"""Fixtures that all tests share.

A test that needs processes takes `ranks` and a parameter called `world`; tests are run
in the order of their worlds, so that each pool of processes is started once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.harness import Pools


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
