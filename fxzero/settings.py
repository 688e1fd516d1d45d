"""Settings are frozen dataclasses: what a field may hold is its type, and is checked.

    build(Prefetch, {"distance": 2}, "options.prefetch")   →   Prefetch(distance=2)
    Prefetch(distance="2")                                 →   ConfigError, by `check_types`

Types are `bool`, `int`, `float`, `str`, an `Enum` (by its value too), another such dataclass, a
tuple of one of them (a list in a mapping), and each of them, or an `Enum`'s member, or None. A
number is finite, and a whole one fits 64 bits; a `Size` may be one too. Nothing is converted that
somebody may not have meant: ``"2"`` is no number, ``1`` is no ``true``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Any, TypeVar, Union

from fxzero.errors import ConfigError, nearest

T = TypeVar("T")


class Size(str):
    """A number of bytes, as text that whoever uses it understands: ``8GiB``, ``80%``. A whole
    number is taken too."""

    __slots__ = ()


class Auto(StrEnum):
    """What is not said but left to be decided."""

    AUTO = "auto"


Share = float | Auto | None
"""A part of a whole: between 0 and 1, ``auto`` to have it decided, None for what another setting
says."""

LARGEST = (1 << 63) - 1

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
"""What a number of bytes may be counted in, in small letters."""


def build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a settings dataclass of a mapping, checking names and types.

    Args:
        where: the path of the mapping, for messages.

    Raises:
        ConfigError: an unknown key, one that is missing, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} takes a mapping of settings, not {_shown(values)}")
    known = fields_of(kind)
    arguments = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where} has no setting {key!r}: {nearest(str(key), known)}")
        arguments[key] = convert(known[key], value, f"{where}.{key}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if not has_default and field.name not in arguments:
            raise ConfigError(f"{where} lacks {field.name!r}")
    return kind(**arguments)


def plain(value: Any) -> Any:
    """What `build` reads, and `json` can write: dataclasses as mappings, enums by their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return value.value if isinstance(value, Enum) else value


def check_types(settings: Any, where: str) -> None:
    """See that every field holds what its type says; for ``__post_init__``.

    An enum's member may be given by its value, as in a mapping.

    Raises:
        ConfigError: a value of another type.
    """
    for name, hint in fields_of(type(settings)).items():
        value = getattr(settings, name)
        converted = convert(hint, value, f"{where}.{name}" if where else name)
        if converted is not value:
            object.__setattr__(settings, name, converted)  # frozen, and not yet made


def at_least(where: str, value: float | None, least: int) -> None:
    """See that a number is `least` or more; None is.

    Raises:
        ConfigError: it is less.
    """
    if value is not None and value < least:
        must = "be positive" if least == 1 else f"be {least} or more"
        raise ConfigError(f"{where}={value} must {must}")


def a_share(where: str, value: Share) -> None:
    """See that a number is a part of a whole; None is, and what is to be decided.

    Raises:
        ConfigError: it is not.
    """
    if value is not None and not isinstance(value, Auto) and not 0 <= value <= 1:
        raise ConfigError(f"{where}={value} must be between 0 and 1")


def decided(share: Share) -> float:
    """A part of a whole that somebody has said, or decided."""
    assert not isinstance(share, Auto)
    return share or 0.0


_fields: dict[type[Any], dict[str, Any]] = {}


def fields_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields, by name; evaluated once."""
    if kind not in _fields:
        hints = typing.get_type_hints(kind)
        _fields[kind] = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    return _fields[kind]


def convert(hint: Any, value: Any, where: str) -> Any:
    """Check a value against a field's type.

    Returns:
        The value; the member where an enum's value was given, the dataclass where a mapping was.

    Raises:
        ConfigError: it is of another type.
    """
    if typing.get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        words, (hint,) = _words_of(hint)
        if words is not None and isinstance(value, str):
            choices = [member.value for member in words]
            if value not in choices:
                shown = f"{where}={_shown(value)}"
                raise ConfigError(f"{shown} must be {_PROBLEMS[hint](value)} or {choices[0]!r}")
            return words(value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}={_shown(value)} must be a list")
        kind = typing.get_args(hint)[0]
        parts = [convert(kind, part, f"{where}[{i}]") for i, part in enumerate(value)]
        same = isinstance(value, tuple) and all(map(operator.is_, parts, value))
        return value if same else tuple(parts)
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={_shown(value)} must be a mapping")
        kind = typing.get_args(hint)[1]
        return {str(key): convert(kind, part, f"{where}.{key}") for key, part in value.items()}
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return value if isinstance(value, hint) else build(hint, value, where)
    assert isinstance(hint, type), f"{where}: settings have plain types, not {hint}"
    if issubclass(hint, Enum):
        return _member(hint, value, where)
    if hint is Size:
        return value if isinstance(value, Size) else _size(value, where)
    problem = _PROBLEMS[hint](value)
    if problem:
        raise ConfigError(f"{where}={_shown(value)} must be {problem}")
    return value


def _words_of(hint: Any) -> tuple[type[Enum] | None, list[Any]]:
    """Of several types, one whose members may stand for a value of another one; and the others."""
    kinds = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if len(kinds) == 1:
        return None, kinds
    (words,) = (kind for kind in kinds if issubclass(kind, Enum))
    return words, [kind for kind in kinds if kind is not words]


def _member(kind: type[Enum], value: Any, where: str) -> Enum:
    if isinstance(value, kind):
        return value
    choices = [member.value for member in kind]
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{where}={_shown(value)}: {nearest(str(value), choices)}")
    return kind(value)


def _size(value: Any, where: str) -> Size:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(
            f"{where}={_shown(value)} must be a size: text, or a whole number of bytes"
        )
    return Size(value)


def _no_whole_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return "a whole number"
    return "" if abs(value) <= LARGEST else "a whole number of 64 bits"


def _no_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "a number"
    return "" if abs(value) <= LARGEST and math.isfinite(value) else "a finite number"


_PROBLEMS = {
    bool: lambda value: "" if isinstance(value, bool) else "true or false",
    int: _no_whole_number,
    float: _no_number,
    str: lambda value: "" if isinstance(value, str) else "text",
}
"""What a value should have been, by the type of its field; empty where it is that."""


def _shown(value: Any) -> str:
    """A value in a message: a tensor or a thousand rows would hide the sentence."""
    try:
        text = repr(value)
    except ValueError:  # whole numbers of more than 4,300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}… ({type(value).__name__})"
