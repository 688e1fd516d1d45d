"""Calling what users wrote, and saying where it failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from fxzero._compat import no_value_error
from fxzero.errors import ConfigError


def asked(call: Callable[[], Any], what: str) -> Any:
    """Call what the user wrote, and say so if it raises.

    Raises:
        ConfigError: it did; the message has the line.
    """
    arguments = sys.argv
    sys.argv = arguments[:1]  # a factory that reads its command line has none: it gets its defaults
    try:
        return call()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise failed(what, error) from error
    finally:
        sys.argv = arguments


def failed(what: str, error: BaseException) -> ConfigError:
    """The error of a call: what was called, and which line raised what."""
    reason = " ".join(str(error).split()) or "no reason given"
    if isinstance(error, no_value_error()):
        reason += (
            ". It reads the value of a tensor, and here tensors have shapes alone: let Python or "
            "numpy compute it, or leave it out"
        )
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for place, hint in _HABITS.items():
        if any(place in text for text in (reason, *files)):
            reason = f"{reason.partition('. ')[0]}. {hint}"
    return ConfigError(f"{what} raised {type(error).__name__} at {raised_at(error)}: {reason}")


_HABITS = {
    "UninitializedParameter": (
        "Tensors have no values here, and lazy modules find out by a first call how large they "
        "are: name their sizes, as in nn.Linear(192, 4)"
    ),
    "/safetensors/": (
        "Weights are not read here, as tensors have no values: make the model, and adapters, of "
        "their configurations"
    ),
    "/torch/nn/parallel/": (
        "Return the model as it is, without DistributedDataParallel or FSDP: what they do is what "
        "is estimated and compiled here"
    ),
}
"""By a place that an error came through, or a word of it, what to do instead."""


def raised_at(error: BaseException) -> str:
    """``file.py:12``: the last line outside of torch and fxzero that an error came through."""
    ours = ("/torch/", "/fxzero/", "/passes/", "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in ours)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "fxzero"
