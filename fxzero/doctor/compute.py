"""How fast one rank computes: the figures of a `DeviceSpec`, and of updates on its host.

    products   square ones of doubled widths, in the three layouts of a linear layer's forward and
               backward; a line through their times: t = launch + (FLOPs + half) / (peak · share).
               On CPUs convolutions and attention, forward and backward, against that line
    streams    a copy that no cache holds; and the share of that which a compiled chain of operators
               reaches; on GPUs the chain and an update, half of the bytes each: a step's are so
    launches   many tiny operators
    random     one draw of many booleans
    polynomials exp, tanh and erf of numbers that stay in a cache, less what a sign's change takes
    updates    torch's fused AdamW

What ranks measure they begin together (`meet`), so that cores and memory are as busy as in
training.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxzero._compat import keep_freed_memory
from fxzero.cost.analytic import DTYPE_NAMES
from fxzero.cost.attention import attention_flops, computed_share
from fxzero.cost.cluster import DeviceSpec
from fxzero.cost.resources import device_bytes
from fxzero.cost.timing import median_us, synchronize
from fxzero.doctor.compilers import CHAIN_TENSORS, Chain

Meet = Callable[[], None]
"""Waits for the other ranks."""
FIRST_WIDTH, LAST_WIDTH = 128, 1 << 14
LIMIT_S = {"cpu": 0.05, "cuda": 0.02}
"""No product is timed that would take longer."""
ROUNDS = 5
"""How often the turn of a product, or of a stream, comes; the one in the middle counts: a machine
that is faster for a moment does not keep that up for a step."""
FACTORS_BYTES = {"cpu": 64 << 20, "cuda": 0}
"""Of the second factors, which take turns: a layer's parameters are in no cache when it runs."""
COPIED_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
CHAIN_SHAPES = {"cpu": (512, 1024), "cuda": (8192, 4096)}
"""Rows and columns of what the compiled chain works on: some layer's activations."""
NUM_LAUNCHES = 1000
NUM_DRAWN = 4 << 20
NUM_TRANSCENDENTAL = 1 << 18
CONVOLUTIONS = ((16, 16, 32), (8, 64, 28), (8, 128, 14))
"""Images, channels, and pixels of a side."""
ATTENTION = ((4, 8, 256, 64), (1, 8, 1024, 64))
"""Rows, heads, length and width of a head."""
NUM_UPDATED = {"cpu": 8 << 20, "cuda": 64 << 20}


@dataclass(frozen=True)
class Product:
    """Square matrix products of one width."""

    flops: float
    us: float
    """Of one: the mean of three layouts."""


@dataclass(frozen=True)
class Line:
    """t = launch + (FLOPs + `half_flops`) / `flops_per_s`, through the times of products."""

    flops_per_s: float
    half_flops: float

    @staticmethod
    def through(products: Sequence[Product], launch_us: float) -> Line:
        """The line whose relative errors have the least squares."""
        times = np.array([_beyond(p.us, launch_us) for p in products])
        flops = np.array([p.flops for p in products])
        columns = np.stack([flops / times, 1.0 / times], axis=1)
        scale = columns.max(axis=0)
        (slope, constant), *_ = np.linalg.lstsq(columns / scale, np.ones(len(times)), rcond=None)
        per_flop, constant_s = float(slope / scale[0]), float(constant / scale[1])
        if constant_s < 0 or per_flop <= 0 or len(products) < 2:
            per_flop, constant_s = float(np.mean(times / flops)), 0.0
        return Line(1.0 / per_flop, constant_s / per_flop)


def _beyond(us: float, launch_us: float) -> float:
    """Seconds of a product behind its launch."""
    return max(us - launch_us, 0.1 * us) * 1e-6


def measure_device(device: torch.device, run: Chain | None, meet: Meet) -> DeviceSpec:
    """The figures of this rank's device.

    Args:
        run: the chain, compiled for the device's shape; None where compilers do not work: updates
            alone then say what streams reach.
        meet: called equally often by all ranks.
    """
    kind = device.type
    on_cpu = kind == "cpu"
    with torch.no_grad():
        meet()
        launch_us = _launch_us(device)
        copied = _middle(lambda: _copied_bytes_per_s(device), meet)
        updated = _middle(lambda: update_bytes_per_s(device), meet)
        chained = updated
        if run is not None:
            chained = _middle(partial(_chained_bytes_per_s, run, device), meet)
        # A step's updates have a rate of their own on CPUs, the host's; and what it streams, the
        # caches that all cores share do not hold between forward and backward, as they may hold a
        # chain's.
        streamed = min(chained, copied) if on_cpu else 2.0 / (1.0 / chained + 1.0 / updated)
        products = measure_products(device, torch.float32, meet, ROUNDS)
        line = Line.through(products, launch_us)
        peak = max(line.flops_per_s, *(p.flops / p.us * 1e6 for p in products))
        peaks = {"fp32": peak}
        for dtype, name in DTYPE_NAMES.items():
            if name != "fp32":
                rate = max(
                    (p.flops + line.half_flops) / _beyond(p.us, launch_us)
                    for p in measure_products(device, dtype, meet, ROUNDS - 2)
                )
                peaks[name] = rate * peak / line.flops_per_s
        meet()
        convolutions = _share(line, _convolutions(), meet) if on_cpu else 1.0
        attention = _share(line, _attention(), meet) if on_cpu else 1.0
        meet()
        random_per_s = _random_per_s(device) if on_cpu else 0.0
        meet()
        transcendental_per_s = _transcendental_per_s() if on_cpu else 0.0
    fastest = max(copied, streamed)  # a copy may go past the caches, and be slower for it
    return DeviceSpec(
        name=device_name(device),
        peak_flops=peaks,
        memory_bytes_per_s=fastest,
        memory_bytes=device_bytes(kind),
        half_peak_flops=line.half_flops * max(peaks.values()) / peak,  # it was fp32's
        flops_efficiency=min(line.flops_per_s / peak, 1.0),
        memory_efficiency=streamed / fastest,
        launch_us=launch_us,
        convolution_efficiency=convolutions,
        attention_efficiency=attention,
        type=kind,
        random_per_s=random_per_s,
        transcendental_per_s=transcendental_per_s,
    )


def _middle(measure: Callable[[], float], meet: Meet) -> float:
    """The middle one of a few figures, between which others have their turn: what else the machine
    does lasts for longer than one of them takes."""
    found = []
    for _ in range(ROUNDS):
        meet()
        found.append(measure())
    return median(found)


def measure_products(
    device: torch.device, dtype: torch.dtype, meet: Meet, rounds: int
) -> list[Product]:
    """Time products of doubled widths, as long as they are short."""
    meet()
    times: dict[int, list[float]] = {}
    width = FIRST_WIDTH
    while width <= LAST_WIDTH:
        times[width] = [_product_us(device, dtype, width)]
        limit_us = LIMIT_S[device.type] * 1e6
        if 8 * times[width][0] > limit_us:  # unless that was somebody else's doing
            times[width].append(_product_us(device, dtype, width))
        if 8 * min(times[width]) > limit_us:
            break
        width *= 2
    for _ in range(rounds - 1):
        meet()
        for width, found in times.items():
            found.append(_product_us(device, dtype, width))
    return [Product(2.0 * width**3, median(found)) for width, found in times.items()]


def _product_us(device: torch.device, dtype: torch.dtype, width: int) -> float:
    a = torch.randn(width, width, device=device).to(dtype)
    count = max(FACTORS_BYTES[device.type] // a.nbytes, 1)
    factors = itertools.cycle(torch.ones(count, width, width, dtype=dtype, device=device))
    layouts = (
        lambda: a @ next(factors),
        lambda: a @ next(factors).t(),
        lambda: a.t() @ next(factors),
    )
    times = [median_us(call, device.type, runs=3, limit_s=0.1) for call in layouts]
    return sum(times) / len(times)


def _copied_bytes_per_s(device: torch.device) -> float:
    """What a copy reads and writes."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    us = median_us(lambda: target.copy_(source), device.type, limit_s=1.0)
    return 2 * source.nbytes / us * 1e6


def _chained_bytes_per_s(run: Chain, device: torch.device) -> float:
    """What a compiled chain reads and writes, of what no cache close to the core holds."""
    shape = CHAIN_SHAPES[device.type]
    # Whose like was freed before, as a step's were, the C library keeps: else its results would
    # be memory that nobody has touched, in each run, and it six times as slow.
    if device.type == "cpu":
        keep_freed_memory()
    sets = [[torch.randn(shape, device=device) for _ in range(3)] for _ in range(4)]
    turns = iter(range(1 << 30))
    us = median_us(lambda: run(*sets[next(turns) % 4]), device.type, runs=40, limit_s=0.5)
    return CHAIN_TENSORS * sets[0][0].nbytes / us * 1e6


def _launch_us(device: torch.device) -> float:
    """Of one operator that has next to nothing to do."""
    a, b = (torch.ones(64, device=device) for _ in range(2))

    def many() -> None:
        for _ in range(NUM_LAUNCHES):
            torch.add(a, b)

    return median_us(many, device.type) / NUM_LAUNCHES


def _random_per_s(device: torch.device) -> float:
    mask = torch.empty(NUM_DRAWN, dtype=torch.bool, device=device)
    return NUM_DRAWN / median_us(lambda: mask.bernoulli_(0.5), device.type) * 1e6


@dataclass(frozen=True)
class Timed:
    """Operators with a FLOP formula that are no matrix products."""

    flops: float
    run: Callable[[], object]
    num_products: int = 2
    """Operators among them: one forward, and one for its gradients."""


def _share(line: Line, timed: Sequence[Timed], meet: Meet) -> float:
    """Which share of a matrix product's speed some operators reach, each as important as the
    others: the middle one of a few runs, as products are timed."""
    shares = []
    for one in timed:
        meet()
        times = [median_us(one.run, "cpu", runs=3, limit_s=0.1) for _ in range(ROUNDS)]
        product_s = (one.flops + one.num_products * line.half_flops) / line.flops_per_s
        shares.append(product_s / (median(times) * 1e-6))
    return min(len(shares) / sum(1.0 / share for share in shares), 1.0)


def _convolutions() -> list[Timed]:
    """Of 3 x 3, forward and both gradients, of early, middle and late layers of an image net."""
    found = []
    for batch, channels, side in CONVOLUTIONS:
        x = torch.randn(batch, channels, side, side)
        weight = torch.randn(channels, channels, 3, 3)
        how = [1, 1], [1, 1], [1, 1], False, [0, 0], 1

        def run(x: Tensor = x, weight: Tensor = weight, how: Any = how) -> None:
            y = torch.ops.aten.convolution(x, weight, None, *how)
            torch.ops.aten.convolution_backward(y, x, weight, None, *how, [True, True, False])

        found.append(Timed(3 * 2.0 * x.numel() * channels * 9, run))
    return found


def _attention() -> list[Timed]:
    """Causal attention with its gradient, of short and long rows."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = []
    for shape in ATTENTION:
        q = torch.randn(shape)

        def run(q: Tensor = q) -> None:
            output, log_sums = forward(q, q, q, 0.0, True)
            backward(output, q, q, q, output, log_sums, 0.0, True)

        sizes = [q.shape] * 3
        flops = attention_flops(*sizes) + attention_flops(q.shape, *sizes)
        found.append(Timed(computed_share(shape[2], shape[2], is_causal=True) * flops, run))
    return found


def _transcendental_per_s() -> float:
    """By torch's own vector code, which Inductor calls too; what they take beyond a change of
    sign."""
    x = torch.randn(NUM_TRANSCENDENTAL)
    out = torch.empty_like(x)

    def us_of(call: Callable[..., Tensor]) -> float:
        return median_us(lambda: call(x, out=out), "cpu")

    base_us = us_of(torch.neg)
    times = [us_of(call) for call in (torch.exp, torch.tanh, torch.erf)]
    us = sum(max(found - base_us, 0.01 * found) for found in times) / len(times)
    return NUM_TRANSCENDENTAL / us * 1e6


def update_bytes_per_s(device: torch.device) -> float:
    """What AdamW reads and writes, counted as the analytic model counts it: each of its tensors is
    read and written."""
    param = torch.nn.Parameter(torch.randn(NUM_UPDATED[device.type], device=device))
    param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    us = median_us(optimizer.step, device.type, limit_s=1.0)
    return 2 * 4 * param.nbytes / us * 1e6


def device_name(device: torch.device) -> str:
    """What people call it; of a CPU with the threads that a rank has of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    return f"{threads} thread{'s' if threads > 1 else ''} of {model.strip() or 'a CPU'}"


def settle(device: torch.device, seconds: float) -> None:
    """Compute for a while: clocks rise, and memory is there."""
    a = torch.randn(512, 512, device=device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a @ a
        synchronize(device.type)
