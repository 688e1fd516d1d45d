"""What ranks tell each other of where they are, and how long they wait before they worry."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fxzero.errors import ConfigError
from fxzero.ranks.places import Place


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

    @classmethod
    def from_environment(cls) -> Limits:
        """By FXZERO_WARN_S. Below its default of 30 all other limits shrink alike, but for the
        probe: on a busy machine an answer takes as long, however impatient somebody is.

        Raises:
            ConfigError: it is no positive number.
        """
        text = os.environ.get("FXZERO_WARN_S", "30")
        try:
            warn = float(text)
        except ValueError:
            warn = -1.0
        if not 0 < warn < float("inf"):
            raise ConfigError(f"FXZERO_WARN_S={text!r} must be a positive number of seconds")
        scale = min(warn / 30, 1.0)
        probe = max(5 * scale, 2.0)
        return cls(warn, 3 * scale, 10 * scale, 20 * scale, probe, 2 * scale, scale)


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
