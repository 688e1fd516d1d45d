"""What ranks tell each other of where they are, and how long they wait before they worry."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from fxzero.errors import ConfigError
from fxzero.ranks.places import Place

_said: list[float] = []
"""The timeout that the program has asked for, if it has."""


def say_timeout(seconds: float) -> None:
    """Let no rank wait for longer, whatever the environment says.

    Raises:
        ConfigError: it is no positive number.
    """
    _said[:] = [_positive("timeout_s", seconds)]


def timeout_s() -> float:
    """How long a rank may wait for others: what was said, else FXZERO_TIMEOUT_S, else for ever.

    Raises:
        ConfigError: FXZERO_TIMEOUT_S is no positive number.
    """
    text = os.environ.get("FXZERO_TIMEOUT_S")
    if _said or text is None:
        return _said[0] if _said else math.inf
    return _positive("FXZERO_TIMEOUT_S", text)


def _positive(name: str, value: float | str) -> float:
    """A number of seconds."""
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name}={value!r} must be a positive number of seconds")
    return seconds


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    warn: float
    look: float
    """A wait after which the other ranks' places are read."""
    deadlock: float
    stopped: float
    probe: float
    beat: float
    sample: float
    timeout: float = math.inf
    """A wait that is ended, whoever is late and why."""

    @classmethod
    def from_environment(cls) -> Limits:
        """By FXZERO_WARN_S, and by the timeout. Below its default of 30 all other limits shrink
        alike, but for the probe: on a busy machine an answer takes as long, however impatient
        somebody is. So they do for a timeout below 10, which would be over before they are.

        Raises:
            ConfigError: one of them is no positive number.
        """
        warn = _positive("FXZERO_WARN_S", os.environ.get("FXZERO_WARN_S", "30"))
        timeout = timeout_s()
        scale = min(warn / 30, timeout / 10, 1.0)
        return cls(
            warn=min(warn, timeout / 2),
            look=3 * scale,
            deadlock=10 * scale,
            stopped=20 * scale,
            probe=max(5 * scale, 2.0),
            beat=2 * scale,
            sample=scale,
            timeout=timeout,
        )


@dataclass
class Status:
    """What a rank says of itself, twice a beat."""

    beat: int = 0
    kind: str = "elsewhere"
    name: str = ""
    line: str = ""
    transfer: str = ""
    blocked_s: float = 0.0
    """How long its main thread has been in one call of a collective."""
    idle: bool = False
    """Whether the process did nothing meanwhile."""
    ended: str = ""
    """Why it will not answer any more: it has raised, or its script is over."""

    @property
    def place(self) -> Place:
        """Where its main thread is."""
        return Place(self.kind, self.name, self.line, self.transfer)
