"""What a run says when it cannot go on: one message, from one rank, and it stands last.

Wrong settings are found on rank 0 before any rank trains. What all ranks meet while they train,
rank 0 tells. torchrun ends with a table of its own, whose last line is what the failed process
left in a file for it: that is where the message goes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import fxzero
from fxzero.errors import nearest

FAILED = 1
WRONG_USE = 2

GRACE_S = 5.0
"""How long a rank waits for rank 0 to fail of the same reason, before it speaks for itself."""
LEAVE_S = 2.0
"""How long rank 0 lets the others leave before it ends with an error's code."""


class SettingsError(ValueError):
    """A setting that cannot hold, found before training."""


def exit_code(error: BaseException) -> int:
    """2 for wrong settings, 1 for everything else."""
    wrong = (HydraException, OmegaConfBaseException, SettingsError, fxzero.ConfigError)
    return WRONG_USE if isinstance(error, wrong) or _is_hydras(error) else FAILED


def report(error: BaseException, rank: int = 0) -> None:
    """Tell the user, once: in torchrun's table, or on the standard error without torchrun."""
    message = sentence(error)
    if rank:
        message = f"rank {rank}: {message}"
    told = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if told is None:
        print(message, file=sys.stderr, flush=True)
        return
    # The form that torch.distributed.elastic reads; its `record` would put a traceback there.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    Path(told).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def sentence(error: BaseException) -> str:
    """What was asked, what was found and what to do; a traceback where nobody foresaw it."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name}: {nearest(name, error.options)}"
    if isinstance(error, MissingConfigException):
        return _joined(str(error).partition("Config search path")[0])
    if isinstance(error, ConfigCompositionException):
        key = re.search(r"'([^']+)'", str(error))
        if isinstance(cause, OmegaConfBaseException):
            return unknown_key(cause, key[1] if key else "")
        return _joined(str(error))
    if isinstance(error, OmegaConfBaseException):
        where = f"{error.full_key}: " if error.full_key else ""
        return where + _joined(str(error).partition("\n    full_key:")[0])
    if isinstance(error, HydraException):
        text = re.sub(r"See https://hydra\.cc\S*( for details)?", "", str(error))
        asked = getattr(error, "override", None)
        where = f"{asked!r} is no setting=value: " if asked and asked not in text else ""
        return where + _joined(text.partition("full_key:")[0])
    if isinstance(error, (fxzero.FxZeroError, SettingsError, OSError)):
        return str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0]  # Dynamo's own advice
    if _is_hydras(error):
        hint = ". A group is chosen by a name: model=gpt_lite"
        return _joined(str(error)) + (hint if "Config group" in str(error) else "")
    return "".join(traceback.format_exception(error)).rstrip()


def unknown_key(error: OmegaConfBaseException, asked: str) -> str:
    """Name the nearest key beside the one that there is not."""
    node = error.parent_node
    if isinstance(node, DictConfig) and error.key in node:  # another complaint
        return f"{asked}: {_joined(str(error).partition('full_key:')[0])}"
    known: Iterable[str] = map(str, node) if isinstance(node, DictConfig) else ()
    known = [key for key in known if key != "hydra"]
    parent, _, key = str(error.full_key or asked).rpartition(".")
    if not known:
        return f"{asked}: {parent or asked} holds no further settings"
    place = f"{parent} has" if parent else "there is"
    return f"{asked}: {place} no setting {key!r}: {nearest(key, known)}"


def _is_hydras(error: BaseException) -> bool:
    """Whether Hydra raised it itself, for it has plain ValueErrors too."""
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, ValueError)
        and bool(frames)
        and "hydra" in Path(frames[-1].filename).parts
    )


def _joined(text: str) -> str:
    return " ".join(text.split())
