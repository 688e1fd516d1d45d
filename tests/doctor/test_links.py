"""Links: the analytic model of measured figures gives back what was measured."""

from __future__ import annotations

import pytest

from fxzero.cost import AnalyticCosts, ClusterSpec, DeviceSpec, LinkSpec
from fxzero.cost.links import CollectiveFigures
from fxzero.doctor.links import link_between, link_of
from fxzero.transfer import Transfer, TransferKind

DEVICE = DeviceSpec("d", {"fp32": 1e9}, memory_bytes_per_s=1e9, memory_bytes=1e9)
NONE = LinkSpec(1e9, 0.0)
INSIDE = CollectiveFigures(300.0, 1e-3, 100.0, 5e-4)
WHOLE = CollectiveFigures(900.0, 9e-3, 150.0, 2e-3)
NUM_BYTES = 10_000_000


@pytest.mark.parametrize("size", [2, 3, 8])
def test_of_one_level(size: int) -> None:
    """Ranks of one host."""
    cluster = ClusterSpec("c", DEVICE, link_of(INSIDE, size), NONE, size)
    found = AnalyticCosts(cluster).transfer(Transfer(TransferKind.ALL_GATHER, NUM_BYTES, size))
    assert found.wire_us == pytest.approx(300 + 1e-3 * NUM_BYTES)
    assert found.host_us == pytest.approx(100 + 5e-4 * NUM_BYTES)


def test_each_further_tensor() -> None:
    """Comes later, and the host loses it."""
    cluster = ClusterSpec("c", DEVICE, link_of(INSIDE, 2, 50.0), NONE, 2)
    costs = AnalyticCosts(cluster)
    one, five = (
        costs.transfer(Transfer(TransferKind.ALL_GATHER, NUM_BYTES, 2, num_tensors=n))
        for n in (1, 5)
    )
    assert five.wire_us - one.wire_us == pytest.approx(200)
    assert five.host_us - one.host_us == pytest.approx(200)


def test_of_two_levels() -> None:
    """Two hosts of four ranks: inside and between are together what all ranks took."""
    between = link_between(WHOLE, INSIDE, 2)
    cluster = ClusterSpec("c", DEVICE, link_of(INSIDE, 4), between, 4, 2)
    found = AnalyticCosts(cluster).transfer(Transfer(TransferKind.REDUCE_SCATTER, NUM_BYTES, 8))
    assert found.wire_us == pytest.approx(900 + 9e-3 * NUM_BYTES)
    assert found.host_us == pytest.approx(150 + 2e-3 * NUM_BYTES)


def test_a_network_that_adds_nothing() -> None:
    """Figures stay those that a cluster may have."""
    link = link_between(INSIDE, WHOLE, 2)
    cluster = ClusterSpec("c", DEVICE, link_of(INSIDE, 4), link, 4, 2)
    assert cluster.inter.latency_us == 0.0
