"""Where a run writes what was decided and measured: a folder a rank, a folder a graph.

    DIR/rank0/dump.json            what it is of; written last
    DIR/rank0/graph0/…             one graph: see `fxzero.inspect.dump`

A process empties its own rank's folder before it first writes there, if it is an earlier dump's;
a folder that holds something else is left alone, and refused. A process that was to write and has
compiled nothing says so when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fxzero.errors import ConfigError

if TYPE_CHECKING:
    from fxzero.compiler.compilation import Compilation

VARIABLE = "FXZERO_DUMP"
"""Of the environment: the folder, where no option names one."""
HEAD = "dump.json"
"""The file that makes a folder a rank's dump."""
PROFILE = ".trace.json.gz"
"""What the name of a profile ends with, behind the part's."""

log = logging.getLogger("fxzero")


def asked_for(option: str) -> str:
    """The folder that somebody has asked for, by option or environment; empty for none."""
    return option or ("" if _only_looked_at else os.environ.get(VARIABLE, ""))


_only_looked_at: list[bool] = []


@contextlib.contextmanager
def only_looked_at() -> Iterator[None]:
    """Let the environment ask for nothing meanwhile: a command that compiles a step to show it
    would replace the dump of the run that it was meant for."""
    _only_looked_at.append(True)
    try:
        yield
    finally:
        _only_looked_at.pop()


def expect(option: str = "") -> None:
    """Have it said at this process's end if it has written no graph into the folder that was asked
    for: nobody calls a compiler of which nothing is compiled."""
    folder = asked_for(option)
    if folder:
        _say_at_the_end(folder, os.getpid())


@functools.cache
def _say_at_the_end(folder: str, process: int) -> None:
    """Once, however often it is asked for."""
    atexit.register(_say_if_nothing_is_in, folder, process)


def _say_if_nothing_is_in(folder: str, process: int) -> None:
    if process != os.getpid():  # a fork's end is not that of the run
        return
    path = _absolute(folder)
    of_ranks = [
        ranks
        for (_, pid), ranks in _folders.items()
        if pid == process and ranks.path.parent == path
    ]
    if any(ranks.heads for ranks in of_ranks):
        return
    is_older = not of_ranks and any(path.glob(f"rank*/{HEAD}"))
    log.warning(
        "dump=%r: fxzero compiled nothing in this process, so that no dump was written%s. Is the "
        "model called through torch.compile(model, backend='fxzero'), or through compile_step?",
        folder,
        ", and the one that is there is of an earlier run" if is_older else "",
    )


@dataclass(eq=False)
class RankFolder:
    """One rank's part of a dump, in this process."""

    path: Path
    num_graphs: int = 0
    heads: dict[int, Any] = field(default_factory=dict)
    """What was said of each graph so far."""

    def next_graph(self) -> int:
        """A number for another graph."""
        self.num_graphs += 1
        return self.num_graphs - 1

    def graph(self, number: int) -> Path:
        """One graph's folder."""
        return self.path / f"graph{number}"


_OURS = re.compile(rf"graph\d+|{re.escape(HEAD)}(\.\d+\.part)?")
"""What a rank's folder holds; whatever else is in it is somebody's."""

_folders: dict[tuple[str, int], RankFolder] = {}


def rank_folder(folder: str) -> RankFolder:
    """This rank's part of a dump; emptied the first time that a process asks for it.

    Raises:
        ConfigError: it cannot be written to, or holds something that is no dump.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = _absolute(folder) / f"rank{rank}"
    key = (str(path), os.getpid())
    if key not in _folders:
        _empty(path)
        _folders[key] = RankFolder(path)
    return _folders[key]


def _absolute(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


def _empty(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = sorted(child.name for child in path.iterdir())
        others = [name for name in held if _OURS.fullmatch(name) is None]
        if others:
            raise ConfigError(
                f"dump={str(path.parent)!r}: {path} holds {others[0]!r}, which is of no dump. Name "
                "another folder, or empty this one."
            )
        for name in held:
            child = path / name
            if child.is_dir():
                shutil.rmtree(child)
            else:
                child.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"dump={str(path.parent)!r}: {path} cannot be written: {reason}. Name a folder that "
            "you may write to."
        ) from None


write_graph: Callable[[Compilation], None] | None = None
"""Writes what is known of a compilation: what looks at graphs stands above the compiler, and is
put in here by the package."""
