"""What becomes of each key of a DeepSpeed configuration: one line a key, none without.

zero_optimization.stage = 3            mapped    shard(zero=3)
zero_optimization.overlap_comm = true  needless  transfers overlap with compute by cost
zero_optimization.staeg = 3            refused   DeepSpeed has no such key: did you mean 'stage'?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fxzero.errors import ConfigError

NOT_GIVEN = "(not given)"
"""The value of a line about a key that is not there and should be."""


class Verdict(StrEnum):
    """What became of a key."""

    MAPPED = "mapped"
    """It decides a setting of fxzero's."""
    NEEDLESS = "needless"
    """Nothing is lost without it; the reason says why."""
    REFUSED = "refused"
    """Training would differ from what it asks for; the reason says what to do."""


@dataclass(frozen=True)
class Line:
    """One key, and what became of it."""

    key: str
    """Its path: ``zero_optimization.stage``."""
    value: Any
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {shown(self.value)}: {self.verdict}: {self.reason}"


def shown(value: Any) -> str:
    """A value as JSON has it, shortened."""
    text = str(value) if value is NOT_GIVEN else json_text(value)
    return text if len(text) <= 60 else f"{text[:56]} …"


def json_text(value: Any) -> str:
    """A value as JSON has it, numbers as people write them."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{k}": {json_text(v)}' for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(json_text, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass
class Found:
    """What was found so far: lines, and the values of keys that hold."""

    lines: dict[str, Line] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """By canonical path: old names and aliases stand under the new ones."""
    written: dict[str, str] = field(default_factory=dict)
    """Canonical paths as the configuration writes them."""

    def say(self, path: str, value: Any, verdict: Verdict, reason: str) -> None:
        """Note a line, or what a later look has made of it; what is refused stays so."""
        path = self.written.get(path, path)
        before = self.lines.get(path)
        if before is not None and before.verdict is Verdict.REFUSED:
            return
        self.lines[path] = Line(path, value, verdict, reason)

    def mapped(self, path: str, reason: str) -> None:
        """Say what a key that is there decides."""
        if path in self.values:
            self.say(path, self._value(path), Verdict.MAPPED, reason)

    def needless(self, path: str, reason: str) -> None:
        """Say why nothing is lost without a key that is there."""
        if path in self.values:
            self.say(path, self._value(path), Verdict.NEEDLESS, reason)

    def refuse(self, path: str, reason: str) -> None:
        """Say why a key cannot be, or that one is missing."""
        self.say(path, self._value(path), Verdict.REFUSED, reason)

    def _value(self, path: str) -> Any:
        line = self.lines.get(self.written.get(path, path))
        return line.value if line is not None else self.values.get(path, NOT_GIVEN)

    def get(self, path: str, default: Any = None) -> Any:
        """A value that the configuration gives; None is one that it does not."""
        value = self.values.get(path)
        return default if value is None else value

    def has(self, path: str) -> bool:
        """Whether the configuration gives a value."""
        return self.values.get(path) is not None

    def below(self, path: str) -> dict[str, Any]:
        """The given values of a section, by their names."""
        start = f"{path}."
        return {p[len(start) :]: v for p, v in self.values.items() if p.startswith(start)}

    @property
    def refused(self) -> list[Line]:
        """Lines of what is refused."""
        return [line for line in self.lines.values() if line.verdict is Verdict.REFUSED]


def raise_refused(lines: Iterable[Line], where: str) -> None:
    """Raise if something is refused, all of it in one message.

    Raises:
        ConfigError: something is.
    """
    refused = [line for line in lines if line.verdict is Verdict.REFUSED]
    if not refused:
        return
    keys = "a key" if len(refused) == 1 else f"{len(refused)} keys"
    listed = "\n".join(f"  {line.key} = {shown(line.value)}: {line.reason}" for line in refused)
    raise ConfigError(
        f"{where} has {keys} that fxzero cannot train by:\n{listed}\nChange it there, or name what "
        "to do without: leave_out=[…]."
    )
