"""Figures of compute: a line through times that are known, and products that are timed here too."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from fxzero.cost import AnalyticCosts, ClusterSpec, LinkSpec, analytic
from fxzero.cost.analytic import Work
from fxzero.doctor import compute
from fxzero.doctor.compute import Line, Product, Timed, _share

CPU = torch.device("cpu")


def test_a_line_finds_what_times_were_made_of() -> None:
    """t = launch + (FLOPs + half) / rate."""
    sizes = [2.0 * width**3 for width in (128, 256, 512, 1024)]
    made = [Product(flops, 3.0 + (flops + 2e6) / 1e11 * 1e6) for flops in sizes]
    line = Line.through(made, launch_us=3.0)
    assert line.flops_per_s == pytest.approx(1e11)
    assert line.half_flops == pytest.approx(2e6)


def test_a_line_has_no_less_than_no_constant() -> None:
    """Where large products are slower for their size, small ones do not take negative time."""
    made = [Product(1e6, 9.0), Product(1e8, 1000.0), Product(1e9, 11000.0)]
    line = Line.through(made, launch_us=0.0)
    assert line.half_flops == 0.0
    assert 9e10 < line.flops_per_s < 1.12e11


def test_one_product_is_a_line_too() -> None:
    """On a slow machine, the first takes as long as any may."""
    assert Line.through([Product(1e6, 100.0)], 0.0) == Line(pytest.approx(1e10), 0.0)


@pytest.mark.exhaustive
def test_figures_say_what_products_take() -> None:
    """The analytic model of measured figures, against the same product timed here: within a factor
    that a busy machine leaves."""
    device = compute.measure_device(CPU, None, lambda: None)
    link = LinkSpec(1e9, 1.0)
    costs = AnalyticCosts(ClusterSpec("c", device, link, link))
    width = 512
    a, b = torch.randn(width, width), torch.randn(width, width)
    a @ b
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    said_us = costs.work_us(
        Work((analytic.Product(2.0 * width**3, 12.0 * width**2, "fp32"),), 0.0, 1)
    )
    assert 0.4 < said_us / (median(times) * 1e6) < 2.5
    assert device.flops_efficiency <= 1.0
    assert device.memory_efficiency <= 1.0
    assert 1e8 < device.memory_bytes_per_s < 1e13
    assert 0.1 < device.launch_us < 100
    assert set(device.peak_flops) == {"fp32", "fp64", "bf16", "fp16"}
    assert 1e5 < device.random_per_s < 1e12
    assert 1e6 < device.transcendental_per_s < 1e13
    assert 0.01 < device.convolution_efficiency <= 1.0
    assert 0.01 < device.attention_efficiency <= 1.0


def test_ranks_meet_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast each of them is: a barrier more on one is a hang on all."""

    def meetings(us_of_a_flop: float) -> int:
        monkeypatch.setattr(
            compute, "_product_us", lambda device, dtype, width: 2 * width**3 * us_of_a_flop
        )
        met: list[None] = []
        compute.measure_device(CPU, None, lambda: met.append(None))
        return len(met)

    assert meetings(1e-7) == meetings(1e-4) > 0


def test_a_share_is_of_the_line_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two operators one as fast as a product of its size and one three times as slow: what a
    step takes that runs both is twice as much."""
    monkeypatch.setattr(compute, "median_us", lambda run, *_, **__: run())
    line = Line(flops_per_s=1e9, half_flops=1e6)
    met: list[None] = []
    timed = [Timed(8e6, lambda: 10_000), Timed(8e6, lambda: 30_000)]
    assert _share(line, timed, lambda: met.append(None)) == pytest.approx(0.5)
    assert len(met) == len(timed)
    assert _share(line, [Timed(8e6, lambda: 1_000)], lambda: None) == 1.0


def test_the_middle_one_of_a_products_times_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is fast for a moment is not so for a step."""
    times = iter([8e4, 8e4, 1.0, 9e4, 8e4, 7e4])
    monkeypatch.setattr(compute, "_product_us", lambda *of: next(times))
    (found,) = compute.measure_products(CPU, torch.float32, lambda: None, 5)
    assert found.us == 8e4
