"""How our kernels compare with the compiler's, measured on one kind of device.

``examples/benchmarks/kernels.py --table`` writes such a table. Those that come with fxzero are
in ``fxzero/kernels/tables``, one for a device; a device without one keeps the compiler's kernels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from fxzero.errors import ConfigError

WORTHWHILE = 1.05
"""From which speed-up on a kernel is taken: measurements scatter by less, and a kernel in a region
keeps the compiler from fusing what stands beside it."""


@dataclass(frozen=True)
class Measured:
    """One measurement."""

    kernel: str
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``."""
    num_bytes: int
    """Of the kernel's tensors: what it must read and write, forward and backward."""
    kernel_us: float
    compiler_us: float
    """The same written in plain torch and compiled by Inductor; of an update, torch's fused one."""


@dataclass(frozen=True)
class KernelTable:
    """What was measured on a device."""

    device: str
    rows: tuple[Measured, ...]

    def speedup(self, kernel: str, dtype: torch.dtype, num_bytes: int) -> float | None:
        """The compiler's time over the kernel's, at the nearest size measured; None if never."""
        name = str(dtype).removeprefix("torch.")
        rows = [r for r in self.rows if r.kernel == kernel and r.dtype == name]
        if not rows:
            return None
        near = min(rows, key=lambda r: abs(math.log(max(r.num_bytes, 1) / max(num_bytes, 1))))
        return near.compiler_us / near.kernel_us


def read_table(path: str) -> KernelTable:
    """Read a table from a file.

    Raises:
        ConfigError: there is no such file, or it is no table.
    """
    try:
        return _parse(json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"lower_kernels.table={path!r} cannot be read ({type(error).__name__}: {error}). "
            "Write one with examples/benchmarks/kernels.py --table."
        ) from error


def _parse(content: Mapping[str, object]) -> KernelTable:
    rows = content["rows"]
    if not isinstance(rows, list):
        raise TypeError("its rows are no list")
    return KernelTable(str(content["device"]), tuple(Measured(**row) for row in rows))


def table_for(device_name: str) -> KernelTable | None:
    """The table that comes with fxzero for a device, by the name that torch gives it."""
    name = re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")
    file = resources.files("fxzero.kernels") / "tables" / f"{name}.json"
    return _parse(json.loads(file.read_text())) if file.is_file() else None
