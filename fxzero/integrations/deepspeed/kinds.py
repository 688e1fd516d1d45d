"""What a value of a DeepSpeed configuration may be.

JSON has one kind of number, and people write 5e8 for a count: a whole number may come as one with
an exponent. Nothing else is converted: ``"true"`` is no truth, ``"5e8"`` no number, which DeepSpeed
takes for some keys and not for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fxzero.integrations.deepspeed.near import near


@dataclass(frozen=True)
class Kind:
    """A type, and which of its values."""

    what: str
    """For messages: ``true or false``."""
    accepts: Callable[[Any], bool]
    nullable: bool = False
    convert: Callable[[Any], Any] | None = None
    choices: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    """By values that are none of it: what was meant."""

    def problem(self, value: Any) -> str:
        """What is wrong with a value; empty for nothing."""
        if value is None and self.nullable:
            return ""
        if isinstance(value, str) and value in self.hints:
            return self.hints[value]
        if self.choices and isinstance(value, str) and not self.accepts(value):
            return f"{near(value, self.choices)}"
        return "" if self.accepts(value) else f"must be {self.what}."

    def of(self, value: Any) -> Any:
        """A value that has no problem, as Python has it."""
        return value if value is None or self.convert is None else self.convert(value)

    @property
    def or_null(self) -> Kind:
        """The same, or null."""
        return replace(self, nullable=True, what=f"{self.what}, or null")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and float(value).is_integer()


def at_least(least: float) -> Kind:
    """A number, and not less than that."""
    return Kind(f"a number of {least:g} or more", lambda v: _is_number(v) and v >= least)


def whole(least: int | None = None) -> Kind:
    """A whole number, which may be written as 5e8."""
    what = "a whole number" if least is None else f"a whole number of {least} or more"
    return Kind(what, lambda v: _is_whole(v) and (least is None or v >= least), convert=int)


def one_of(*words: str, any_case: bool = False) -> Kind:
    """One of some words."""

    def accepts(value: Any) -> bool:
        return isinstance(value, str) and (value.lower() if any_case else value) in words

    convert = str.lower if any_case else str
    return Kind(f"one of {', '.join(words)}", accepts, convert=convert, choices=words)


def _is_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(accepts, value))


BOOL = Kind("true or false", lambda v: isinstance(v, bool))
INT = whole()
COUNT = whole(1)
SIZE = whole(0)
PERIOD = Kind(
    "a number, or Infinity for never",
    lambda v: _is_number(v) or (isinstance(v, float) and v == math.inf),
)
NUMBER = Kind("a number", _is_number)
SHARE = Kind("a number between 0 and 1", lambda v: _is_number(v) and 0 <= v <= 1)
TEXT = Kind("text", lambda v: isinstance(v, str))
MAPPING = Kind("an object", lambda v: isinstance(v, dict))
LIST = Kind("a list", lambda v: isinstance(v, (list, tuple)))
TEXTS = Kind("a list of texts", _is_list_of(lambda v: isinstance(v, str)))
PAIR = Kind("two numbers", lambda v: _is_list_of(_is_number)(v) and len(v) == 2, convert=tuple)
NUMBERS = Kind(
    "a number, or a list of one for each parameter group",
    lambda v: _is_number(v) or (_is_list_of(_is_number)(v) and len(v) > 0),
)
ANY = Kind("anything", lambda v: True, nullable=True)
EXACT_COUNT = Kind(
    "a whole number of 1 or more",
    lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
)
"""Where DeepSpeed itself takes no 1e3."""
