"""What a check says: a name, what was found, whether that is all right, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check ends."""

    OK = "ok"
    WARN = "warn"
    """It works, slower or less than it could."""
    FAIL = "fail"
    """Something that is needed does not work."""


@dataclass(frozen=True)
class Checked:
    """One line of the doctor's."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do; empty where there is nothing."""


def ok(name: str, found: str) -> Checked:
    """All right."""
    return Checked(name, Verdict.OK, found)


def warn(name: str, found: str, advice: str) -> Checked:
    """It works, slower or less than it could."""
    return Checked(name, Verdict.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Checked:
    """Something that is needed does not work."""
    return Checked(name, Verdict.FAIL, found, advice)


Check = Callable[[], "Checked | Iterable[Checked]"]


def run(name: str, check: Check) -> Iterator[Checked]:
    """What a check says. One that raises has failed: the others say what they have to say."""
    try:
        found = check()
        yield from [found] if isinstance(found, Checked) else list(found)
    except Exception as error:
        yield fail(name, f"the check raised {reason(error)}", "See what that says of this machine.")


def reason(error: BaseException) -> str:
    """An error as one line: its type, and the first of its lines that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line), "")
    said = said if len(said) <= 300 else said[:297] + "…"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
