"""Parameters of an optimizer or a schedule, held against what it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fxzero.integrations.deepspeed.kinds import ANY, Kind
from fxzero.integrations.deepspeed.lines import Found, Verdict
from fxzero.integrations.deepspeed.near import near


def check_arguments(
    found: Found,
    path: str,
    settings: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    required: Iterable[str],
    who: str,
) -> dict[str, Any] | None:
    """Look at each of them, with a line of its own.

    Returns:
        Their values, or None if one of them cannot be.
    """
    held: dict[str, Any] = {}
    good = True
    for name, value in settings.items():
        here = f"{path}.{name}"
        kind = kinds.get(name)
        if kind is None:
            reason = f"{who} has no such parameter: {near(str(name), kinds)}"
        elif value == "auto":
            what = "say a value" if kind is ANY else f"it must be {kind.what}"
            reason = f'"auto" is resolved by nobody here: {what}.'
        else:
            reason = kind.problem(value)
        if reason:
            good = False
            found.say(here, value, Verdict.REFUSED, reason)
            continue
        assert kind is not None
        held[name] = found.values[here] = kind.of(value)
        found.say(here, value, Verdict.MAPPED, f"{who}({name}={held[name]})")
    for name in required:
        if name not in settings:
            good = False
            found.refuse(f"{path}.{name}", f"{who} needs it.")
    if path in found.lines and settings:
        found.lines.pop(path)  # its parts have lines of their own
    return held if good else None
