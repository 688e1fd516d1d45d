"""What training takes while it runs: time, memory and communication, from one reading to the next.

    meter = Meter(model, samples_per_step=16, tokens_per_step=2048)
    for step in …:
        train(step)
        print(meter.read(step))   # means over the steps since the last reading, or `restart`

On CUDA memory is what torch's allocator gave to tensors, elsewhere the whole process's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import torch
from torch import nn

import fxzero
from examples.benchmarks.measure import peak_meter, synchronize
from fxzero import Traffic


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What this rank's steps took; times and traffic are means of one step."""

    step_s: float
    samples_per_s: float
    """Of all ranks together."""
    tokens_per_s: float | None
    """The same; None where the model reads none."""
    memory_bytes: int
    """In use now."""
    peak_bytes: int
    """Most since the meter was made."""
    num_gathers: int
    """This and what follows: per step, in compiled graphs."""
    gathered_bytes: int
    num_reduces: int
    reduced_bytes: int
    num_uploads: int
    """Copies from the host's memory, where it holds part of the step, and back there."""
    uploaded_bytes: int
    num_downloads: int
    downloaded_bytes: int

    def __str__(self) -> str:
        speed = (
            f"{self.samples_per_s:,.0f} samples/s"
            if self.tokens_per_s is None
            else f"{self.tokens_per_s:,.0f} tokens/s"
        )
        copies = (
            f"  {self.num_uploads} up {mebibytes(self.uploaded_bytes)}"
            f"  {self.num_downloads} down {mebibytes(self.downloaded_bytes)}"
        )
        return (
            f"{speed}  peak {mebibytes(self.peak_bytes)}  "
            f"{self.num_gathers} gathers {mebibytes(self.gathered_bytes)}  "
            f"{self.num_reduces} reduces {mebibytes(self.reduced_bytes)}"
            f"{copies if self.num_uploads else ''}"
        )


class Meter:
    """Measures the steps of one model.

    Args:
        samples_per_step: rows of a step, of all ranks.
        tokens_per_step: tokens of a step, of all ranks; None where there are none.
        step: the last one before this moment.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        samples_per_step: int,
        tokens_per_step: int | None = None,
        step: int = 0,
    ) -> None:
        self._model = model
        self._samples, self._tokens = samples_per_step, tokens_per_step
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._memory = peak_meter(self._device)
        self._memory.reset()
        self.restart(step)

    def restart(self, step: int) -> None:
        """Leave out what was done since the last reading, a validation for one."""
        synchronize(self._device)
        self._step, self._time_s = step, time.perf_counter()
        self._traffic = traffic_of(self._model)

    @property
    def seconds(self) -> float:
        """Since the last reading."""
        synchronize(self._device)
        return time.perf_counter() - self._time_s

    def read(self, step: int) -> Measured:
        """What the steps up to this one took."""
        num_steps, seconds = step - self._step, self.seconds
        before, after = self._traffic, traffic_of(self._model)
        per_step = {
            f.name: (getattr(after, f.name) - getattr(before, f.name)) // num_steps
            for f in fields(Traffic)
        }
        self.restart(step)
        return Measured(
            step_s=seconds / num_steps,
            samples_per_s=self._samples * num_steps / seconds,
            tokens_per_s=None if self._tokens is None else self._tokens * num_steps / seconds,
            memory_bytes=self._memory.now_bytes(),
            peak_bytes=self._memory.peak_bytes(),
            **per_step,
        )


def traffic_of(model: nn.Module) -> Traffic:
    """What fxzero has communicated for a model: nothing for one that it does not shard."""
    try:
        return fxzero.report(model)
    except fxzero.ShardingError:
        return Traffic()


def mebibytes(num_bytes: int) -> str:
    """``3.2 MiB``."""
    return f"{num_bytes / 2**20:,.1f} MiB"
