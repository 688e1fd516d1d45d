"""Which pass costs the time: steps with each of those switched off that can be, by the clock.

Runs in the world that it is started in: alone, or on every rank under torchrun, where transfers
take time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxzero._compat import reset_dynamo
from fxzero.compiler.config import Config
from fxzero.inspect.bisect.recorded import Case, one_step
from fxzero.settings import build, plain

OFF: Mapping[str, Mapping[str, Any]] = {
    "lower_kernels": {"enabled": False},
    "recompute": {"max_nodes": 0},
    "bucket": {"min_bytes": 0},
    "prefetch": {"distance": 0},
    "gather_ahead": {"enabled": False},
    "lower_regions": {"backend": "eager"},
}
"""What switches a pass off, or leaves it the least to do: of `bucket` that layers travel by
themselves, of `prefetch` that nothing starts before its use."""
WARM_STEPS = 3


@dataclass(frozen=True)
class Timed:
    """The steps of one setting."""

    without: str
    """The pass that was switched off; empty for none."""
    step_ms: float
    """The median."""
    steps_ms: tuple[float, ...]


def slow(
    case: Case, steps: int = 10, observe: Callable[[Timed], None] | None = None
) -> tuple[Timed, ...]:
    """Time steps with all passes, then without each, then with all once more.

    Args:
        observe: called with each as soon as it is known.
    """
    found = []
    for name, config in _variants(case.config):
        timed = _timed(case, name, config, steps)
        found.append(timed)
        if observe is not None:
            observe(timed)
    return tuple(found)


def _variants(config: Config) -> Iterator[tuple[str, Config]]:
    yield "", config
    for name, changes in OFF.items():
        settings = plain(config)
        settings[name] |= changes
        other = build(Config, settings, "options")
        if other != config:
            yield name, other
    yield "", config


def _timed(case: Case, name: str, config: Config, steps: int) -> Timed:
    reset_dynamo()
    run = one_step(case, config)
    taken = []
    for number in range(WARM_STEPS + steps):
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        if number >= WARM_STEPS:
            taken.append((time.perf_counter() - start) * 1e3)
    return Timed(name, statistics.median(taken), tuple(round(ms, 3) for ms in taken))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
