"""Every key of DeepSpeed 0.19, at every level, in one table: what becomes of it, and why.

    Key       one value, with its verdict; refused ones ask for nothing at the values in `off`
    Feature   keys of something that fxzero does not have, refused where its switch is on
    Section   keys by name

What is mapped is mapped beside this (`zero`, `precisions`, `batches`, `optimizers`, `schedules`);
a test sets every key on its own and sees that those here have an effect, and others none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxzero.integrations.deepspeed.kinds import BOOL, Kind
from fxzero.integrations.deepspeed.lines import Verdict


@dataclass(frozen=True)
class Key:
    """One value."""

    kind: Kind
    verdict: Verdict
    reason: str
    off: tuple[Any, ...] = ()
    """Of what is refused, the values that ask for nothing."""
    alias: str = ""
    """The name in this section under which it is known further on."""
    auto: bool = True
    """Whether DeepSpeed takes its default where nobody has resolved an "auto"."""


@dataclass(frozen=True)
class Feature:
    """A section about one thing, which fxzero does not have."""

    keys: Mapping[str, Kind | Mapping[str, Any]]
    """Kinds by name; a mapping of them is a section inside of it."""
    reason: str
    """Why it is refused where it is on, and what to do."""
    switch: str = "enabled"
    off: tuple[Any, ...] = (False,)
    """Values of the switch at which nothing is asked for."""
    default_on: bool = False
    """What no switch means."""
    verdict: Verdict = Verdict.REFUSED
    """What it is where it is on."""


@dataclass(frozen=True)
class Section:
    """Keys by name."""

    keys: Mapping[str, Entry]
    nullable: bool = False
    auto: bool = True
    """Whether "auto" inside of it means DeepSpeed's default."""
    alias: str = ""


Entry = Key | Feature | Section


def mapped(kind: Kind, reason: str, *, alias: str = "", auto: bool = True) -> Key:
    """A key that decides something; `reason` names what, until the mapping says more."""
    return Key(kind, Verdict.MAPPED, reason, alias=alias, auto=auto)


def needless(kind: Kind, reason: str, *, alias: str = "", auto: bool = True) -> Key:
    """A key without which nothing is lost."""
    return Key(kind, Verdict.NEEDLESS, reason, alias=alias, auto=auto)


def refused(kind: Kind, reason: str, *off: Any, auto: bool = True) -> Key:
    """A key for something that fxzero has not, but at the values in `off`."""
    return Key(kind, Verdict.REFUSED, reason, off, auto=auto)


@dataclass(frozen=True)
class Removed:
    """A key that DeepSpeed had once, and refuses now."""

    since: tuple[int, ...]
    reason: str
    off: tuple[Any, ...] = field(default=(False, None))
    """Values, of it or of its ``enabled``, that asked for nothing."""


def is_off(value: Any, removed: Removed) -> bool:
    """Whether a removed key asked for nothing."""
    if isinstance(value, dict):
        return not value or value.get("enabled", False) is False
    return value in removed.off and not (value == 0 and not isinstance(value, bool))


SWITCH = {"enabled": BOOL}
