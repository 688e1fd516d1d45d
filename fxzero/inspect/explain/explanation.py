"""What an explanation is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fxzero.settings import plain


@dataclass(frozen=True)
class Answer:
    """One thing that somebody may ask."""

    question: str
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the text says, for programs; ``_us`` and ``_bytes`` say the unit."""


@dataclass(frozen=True)
class Setting:
    """What would change it."""

    option: str
    now: str
    effect: str


@dataclass(frozen=True)
class Explanation:
    """All that there is to say of one subject."""

    kind: str
    """``node``, ``bucket``, ``parameter``, ``module`` or ``pass``."""
    name: str
    graph: int
    title: str
    answers: tuple[Answer, ...]
    settings: tuple[Setting, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as what `json` can write."""
        found: dict[str, Any] = plain(self)
        return found
