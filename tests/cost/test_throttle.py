"""What copies to and from the host cost, and what they are held back to."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fxzero import Config, ConfigError
from fxzero.cost import AnalyticCosts, FixedCosts, load_cluster
from fxzero.cost.cluster import HostSpec, known_clusters
from fxzero.cost.throttle import Throttle
from fxzero.graph import Lane, Role
from fxzero.graph.operators import num_bytes
from fxzero.transfer import Pool, Transfer, TransferKind
from tests.passes.test_offload_states import ONE_PROCESS, offloaded
from tests.tracing import of_role

HOST = HostSpec(2e9, 1e9, 5.0, 4e9, 1e10)
UP = Transfer(TransferKind.COPY, 4_000_000, num_tensors=2, source=Pool.HOST, target=Pool.DEVICE)
DOWN = replace(UP, source=Pool.DEVICE, target=Pool.HOST)


# -- bandwidths

RATES = {
    "1GB/s": 1e9,
    "500MB/s": 5e8,
    "500MiB/s": 500 * 2.0**20,
    "1.5GiB/s": 1.5 * 2**30,
    "12 GB/s": 12e9,
    " 1GB/s ": 1e9,
    "1e9B/s": 1e9,
    "1E9b/s": 1e9,
    "1gb/s": 1e9,
    "1TB/S": 1e12,
    "2kb/s": 2e3,
    "1TiB/s": 2.0**40,
    "1000000/s": 1e6,
    "1B/s": 1.0,
    "3.GB/s": 3e9,
}


@pytest.mark.parametrize("text", RATES)
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_a_bandwidth(text: str, lane: Lane) -> None:
    """Of one lane, and not of the other."""
    throttle = Throttle(**{lane.value: text})
    other = Lane.D2H if lane is Lane.H2D else Lane.H2D
    assert throttle.bytes_per_s(lane) == RATES[text]
    assert throttle.bytes_per_s(other) == 0


def test_nothing_is_held_back_by_default() -> None:
    """As fast as it goes."""
    assert Throttle() == Config().throttle
    assert {Throttle().bytes_per_s(lane) for lane in (Lane.H2D, Lane.D2H)} == {0}


@pytest.mark.parametrize(
    "text",
    [
        *("1GB", "GB/s", "fast", "/s", "1GB/h", "1GB per s", "1 G B/s", "1,5GB/s", "1GB/s/s"),
        *("-1GB/s", "+1GB/s", "0GB/s", "0/s", "0.5B/s", "1e400B/s", "infB/s", "nan/s"),
        *("1PB/s", "1Gb it/s", "1Gbit/s", " ", "none", "80%", "1e-3GB/s"),
    ],
)
@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_no_bandwidth(text: str, lane: str) -> None:
    """It is said which setting, and what one looks like."""
    with pytest.raises(ConfigError, match=rf"throttle.{lane}=.* is no bandwidth: '1GB/s'"):
        Throttle(**{lane: text})


@pytest.mark.parametrize("value", [1e9, 1, None, True, b"1GB/s", ["1GB/s"], {"GB/s": 1}])
def test_another_type(value: Any) -> None:
    """Through the front door."""
    with pytest.raises(ConfigError, match=r"throttle\.h2d"):
        Config.from_options({"throttle": {"h2d": value}})


def test_another_lane() -> None:
    """It says which there are."""
    with pytest.raises(ConfigError, match="h2d"):
        Config.from_options({"throttle": {"h2h": "1GB/s"}})


# -- costs


def test_a_copy_by_alpha_and_beta() -> None:
    """Each way has a bandwidth of its own, and other ranks no part in it."""
    costs = AnalyticCosts(replace(load_cluster("laptop"), host=HOST))
    for copy, us in ((UP, 5 + 2000), (DOWN, 5 + 4000)):
        found = costs.transfer(copy)
        assert found.wire_us == pytest.approx(us)
        assert found.host_us == 0


@pytest.mark.parametrize(("rate", "us"), [(1e8, 5 + 40_000), (5e8, 5 + 8000), (1e12, 5 + 4000)])
def test_a_copy_that_is_held_back(rate: float, us: float) -> None:
    """To the slower of what it may, and what it can."""
    costs = AnalyticCosts(replace(load_cluster("laptop"), host=HOST))
    assert costs.transfer(replace(DOWN, bytes_per_s=rate)).wire_us == pytest.approx(us)


def test_an_update_by_the_hosts_memory() -> None:
    """Parameters, gradients and state, read and written."""
    costs = AnalyticCosts(replace(load_cluster("laptop"), host=HOST))
    update = of_role(offloaded(**ONE_PROCESS), Role.UPDATE)[0]
    moved = 2 * sum(map(num_bytes, update.all_input_nodes))
    assert moved >= 2 * 4 * 16 * 16 * 4
    assert costs.update_us(update) == pytest.approx(moved / 4e9 * 1e6)
    assert FixedCosts(lambda nodes: 7.0).update_us(update) == 7


# -- clusters


@pytest.mark.parametrize("name", known_clusters())
def test_every_cluster_has_a_host(name: str) -> None:
    """Positive figures of its own, and where they come from."""
    spec = load_cluster(name)
    for field in fields(HostSpec):
        assert getattr(spec.host, field.name) > 0, field.name
    assert spec.host != HostSpec()
    assert spec.sources["host"].strip()
    assert spec.host.memory_bytes >= 1e9


@pytest.mark.parametrize("field", [field.name for field in fields(HostSpec)])
@pytest.mark.parametrize("value", ["-1", ".inf", ".nan", "fast"])
def test_a_figure_that_is_none(tmp_path: Path, field: str, value: str) -> None:
    """It is named."""
    path = tmp_path / "mine.yaml"
    device = "device: {name: x, peak_flops: {fp32: 1}, memory_bytes_per_s: 1, memory_bytes: 1}"
    links = "intra: {bytes_per_s: 1, latency_us: 0}\ninter: {bytes_per_s: 1, latency_us: 0}"
    path.write_text(f"name: mine\n{device}\n{links}\nhost: {{{field}: 1}}\n")
    assert getattr(load_cluster(str(path)).host, field) == 1
    path.write_text(f"name: mine\n{device}\n{links}\nhost: {{{field}: {value}}}\n")
    with pytest.raises(ConfigError, match=field):
        load_cluster(str(path))


def test_a_figure_that_there_is_not(tmp_path: Path) -> None:
    """It says which one was meant."""
    path = tmp_path / "mine.yaml"
    path.write_text("host: {up_byte_per_s: 1}\n")
    with pytest.raises(ConfigError, match="did you mean 'up_bytes_per_s'"):
        load_cluster(str(path))
