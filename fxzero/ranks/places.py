"""Which line of the user's own code something happens at.

A stack ends in torch or in fxzero; what a person can change is the innermost frame that
belongs to neither. Stacks come as the text that Dynamo writes on a node, or as live frames.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PYTHON = f"{Path(linecache.__file__).parent}/"
_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")
_OURS = ("fxzero/runtime/collectives.py", "fxzero/ranks/agree.py")
_ANNOUNCING = "fxzero/ranks/agree.py"
_EAGER = ("fxzero/sharding/ops.py",)
_C10D = ("torch/distributed/distributed_c10d.py",)
_FUNCTIONAL = ("torch/distributed/_functional_collectives.py",)
_CALLS = ("torch/_ops.py", *_FUNCTIONAL)
_SAVING = ("fxzero/checkpoint/saving.py", "fxzero/checkpoint/keeper.py")
_WORD = re.compile(r"\w+")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')


def is_library(filename: str) -> bool:
    """Whether a file is torch's, fxzero's or Python's own: nothing that a user would change."""
    if filename.startswith((*_LIBRARIES, "<")):
        return True
    return filename.startswith(_PYTHON) and "site-packages" not in filename


def _as_written(function: str) -> str:
    """A function's name without what Dynamo adds to it after a graph break."""
    return _RESUMED.sub(r"\1", function)


def user_line(stack_trace: str | None) -> str:
    """``"model.py:12 in forward: x = self.head(x)"`` of a stack trace, or ``""``."""
    found = ""
    for filename, line, function, code in _FRAME.findall(stack_trace or ""):
        if not is_library(filename):
            found = f"{filename}:{line} in {_as_written(function)}: {code.strip()}"
    return found


def user_line_of(frame: FrameType | None) -> str:
    """The same of a live frame and its callers."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {_as_written(code.co_name)}: {text}"


@dataclass(frozen=True)
class Place:
    """Where a rank's main thread is."""

    kind: str
    """``"fxzero"``: waits in one of our transfers; ``"torch"``: in another collective;
    ``"checkpoint"``: for a checkpoint, which all ranks write together; ``"elsewhere"``: does
    something that is no collective."""
    name: str
    """What it waits in: equal on ranks that will go on together."""
    line: str
    """The user's line."""
    transfer: str = ""
    """In one of our graphs: the bucket."""

    @property
    def waits(self) -> bool:
        """Whether it can only go on when other ranks do something."""
        return self.kind != "elsewhere"

    def __str__(self) -> str:
        what = "waits in " if self.waits else "is busy"
        where = f" at {self.line}" if self.line else ""
        bucket = f" ({self.transfer})" if self.transfer else ""
        return f"{what}{self.name if self.waits else ''}{bucket}{where}"


def place_of(frame: FrameType | None, run: str, transfers: Mapping[str, str]) -> Place:
    """Where a thread is whose innermost frame this is.

    Args:
        run: the name of what fxzero is running.
        transfers: see `transfer_of`.
    """
    line = user_line_of(frame)
    library: list[FrameType] = []
    while frame is not None and is_library(frame.f_code.co_filename):
        library.append(frame)
        frame = frame.f_back
    if not library:
        return Place("elsewhere", "", line)
    innermost = library[0].f_code.co_filename
    ours = next((f for f in library if not f.f_code.co_filename.startswith(_PYTHON)), library[0])
    if ours.f_code.co_filename.endswith(_SAVING):
        return Place("checkpoint", "a checkpoint", line)
    files = [f.f_code.co_filename for f in library[:16]]
    if innermost.endswith(_OURS) or (innermost.endswith(_CALLS) and _any(files[:6], _EAGER)):
        return Place("fxzero", run, line, transfer_of(library, transfers))
    if innermost.endswith(_C10D) or (innermost.endswith(_CALLS) and _any(files, _FUNCTIONAL)):
        collective = next(f for f in library if not f.f_code.co_filename.endswith(_CALLS))
        names = dict.fromkeys((library[-1].f_code.co_name, collective.f_code.co_name))
        return Place("torch", "torch's " + " > ".join(n for n in names if n != "wrapper"), line)
    return Place("elsewhere", "", line)


def transfer_of(frames: Iterable[FrameType], transfers: Mapping[str, str]) -> str:
    """The transfer that a scheduled graph's generated code is waiting for, or that none began.

    Args:
        transfers: by the name that a launch has in the code, the name of its bucket.
    """
    found = ""
    for frame in frames:
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
            return _next_transfer(lines[frame.f_lineno - 1 :], transfers)
        if frame.f_code.co_filename.endswith(_ANNOUNCING):
            found = "before its first bucket"
    return found


def _next_transfer(lines: Iterable[str], transfers: Mapping[str, str]) -> str:
    """The transfer of the first line; or what it does, and before which transfer."""
    here = ""
    for line in lines:
        code = line.partition(";")[0].partition("#")[0].strip()
        found = next(filter(None, map(transfers.get, _WORD.findall(code))), "")
        if found:
            return f"{here}, before {found}" if here else found
        here = here or code
    return here


def _any(files: list[str], wanted: tuple[str, ...]) -> bool:
    return any(file.endswith(wanted) for file in files)
