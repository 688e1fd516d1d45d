"""A bandwidth for lanes that would be faster: what offload costs elsewhere, tried on any machine.

throttle={"h2d": "1GB/s", "d2h": "500MB/s"}
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxzero.errors import ConfigError
from fxzero.graph.stamps import Lane
from fxzero.settings import UNITS, check_types

_RATE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)/s", re.IGNORECASE)


@dataclass(frozen=True)
class Throttle:
    """What copies between a device, its host's memory and the disk are held back to."""

    h2d: str = ""
    """To the device: ``1GB/s``, ``500MiB/s``. By default it is as fast as it goes."""
    d2h: str = ""
    """From the device."""
    read: str = ""
    """From disk."""
    write: str = ""
    """To disk."""

    def __post_init__(self) -> None:
        check_types(self, "throttle")
        for lane in (Lane.H2D, Lane.D2H, Lane.READ, Lane.WRITE):
            self.bytes_per_s(lane)

    def bytes_per_s(self, lane: Lane) -> float:
        """What a lane is held back to; 0 for nothing.

        Raises:
            ConfigError: what was given is no bandwidth.
        """
        text: str = getattr(self, lane.value)
        if not text:
            return 0.0
        match = _RATE.fullmatch(text.strip())
        rate = float(match[1]) * UNITS.get(match[2].lower(), 0) if match is not None else 0.0
        if not 1 <= rate < float("inf"):
            raise ConfigError(
                f"throttle.{lane.value}={text!r} is no bandwidth: '1GB/s', '500MiB/s', '1e9B/s'"
            )
        return rate
