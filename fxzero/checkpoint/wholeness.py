"""Whether a checkpoint is whole: what meets a byte that was changed goes on to the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from fxzero.checkpoint.folder import PUBLISHED, is_ours, read_manifest
from fxzero.checkpoint.manifest import Manifest
from fxzero.errors import CheckpointError

P = ParamSpec("P")
T = TypeVar("T")


class NotWholeError(CheckpointError):
    """A checkpoint of which something is missing or was changed: the one before may be whole."""


def whole(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what reads and checks; what it meets means that a checkpoint is not whole.

    Raises:
        NotWholeError: what it has met.
    """
    try:
        return function(*args, **kwargs)
    except NotWholeError:
        raise
    except CheckpointError as error:
        raise NotWholeError(str(error)) from error
    except OSError as error:
        raise NotWholeError(f"{error.filename} cannot be read: {error.strerror}") from error


def manifest_of(path: Path) -> Manifest | None:
    """A checkpoint's manifest; None for one that others have written.

    Raises:
        CheckpointError: it is one of ours, and has none; or is under another number.
    """
    match = PUBLISHED.fullmatch(path.resolve().name)
    if match is None and not is_ours(path):
        return None
    manifest = read_manifest(path)
    if match is not None and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path} is the checkpoint of step {manifest.step}, and was renamed")
    return manifest
