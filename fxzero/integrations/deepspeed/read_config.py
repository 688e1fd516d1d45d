"""From a file or a mapping to a mapping that nobody else holds, with no key twice."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fxzero.errors import ConfigError

Source = str | PathLike[str] | Mapping[str, Any]
"""What says a configuration: the path of a JSON file, or what one holds; JSON in base64 too."""


def read_config(source: Source) -> tuple[dict[str, Any], str]:
    """A configuration, and what to call it in messages.

    Raises:
        ConfigError: there is no such file, it is no JSON object, or a key is there twice.
    """
    if isinstance(source, Mapping):
        return _own(source, "the configuration"), "the configuration"
    if not isinstance(source, (str, PathLike)):
        raise ConfigError(
            f"from_deepspeed takes the path of a JSON file or a dict, not {type(source).__name__}"
        )
    if not str(source):
        raise ConfigError("from_deepspeed('') names no file. Name DeepSpeed's JSON.")
    if str(source).lstrip().startswith("{"):
        raise ConfigError("from_deepspeed was given JSON in the place of a path: json.loads it.")
    held = _in_base64(source)
    if held is not None:
        return _parsed(held, "the configuration in base64")
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file. Name DeepSpeed's JSON.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return _parsed(text, str(path))


def _in_base64(source: str | PathLike[str]) -> str | None:
    """JSON that launchers hand over in the place of a path, as DeepSpeed takes it; None for any
    other text."""
    if not isinstance(source, str) or os.path.isfile(source):
        return None
    try:
        text = base64.urlsafe_b64decode(source).decode("utf-8")
    except ValueError:
        return None
    return text if text.startswith("{") else None


def _parsed(text: str, where: str) -> tuple[dict[str, Any], str]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = sorted({key for key, _ in items if [k for k, _ in items].count(key) > 1})
        if twice:
            raise ConfigError(
                f"{where} has {', '.join(map(repr, twice))} twice in one object, so that nobody "
                "knows which holds. Leave one."
            )
        return dict(items)

    try:
        found = json.loads(text, object_pairs_hook=pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is no JSON: {error.msg} in line {error.lineno}, column {error.colno}. "
            "(Comments and trailing commas, which DeepSpeed's Hjson takes, are none.)"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} holds a {type(found).__name__}, and should hold an object")
    return found, where


def _no_constant(word: str) -> float:
    return float(word.replace("Infinity", "inf"))  # refused as no finite number, by its key


def _own(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in source:
        if not isinstance(key, str):
            raise ConfigError(f"{where} has the key {key!r}, which is no text")
    return {key: _copied(value) for key, value in source.items()}


def _copied(value: Any) -> Any:
    """The same, no part of which is a part of anything else, whatever was there twice."""
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, (list, tuple)) else value


def without(config: dict[str, Any], path: str, where: str) -> Any:
    """Take a key out of a configuration, and return what it held.

    Raises:
        ConfigError: it is not there.
    """
    *above, last = path.split(".")
    section: Any = config
    for name in above:
        section = section.get(name) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section:
        raise ConfigError(f"leave_out names {path!r}, which {where} does not have")
    return section.pop(last)
