"""Calling what users wrote, and saying where it failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from fxzero.errors import ConfigError


def asked(call: Callable[[], Any], what: str) -> Any:
    """Call what the user wrote, and say so if it raises.

    Raises:
        ConfigError: it did; the message has the line.
    """
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:
        raise failed(what, error) from error


def failed(what: str, error: Exception) -> ConfigError:
    """The error of a call: what was called, and which line raised what."""
    reason = " ".join(str(error).split()) or "no reason given"
    return ConfigError(f"{what} raised {type(error).__name__} at {raised_at(error)}: {reason}")


def raised_at(error: BaseException) -> str:
    """``file.py:12``: the last line outside of torch and fxzero that an error came through."""
    ours = ("/torch/", "/fxzero/", "/passes/", "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in ours)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "fxzero"
