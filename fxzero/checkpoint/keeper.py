"""Checkpoints in a training loop: every so often, on a signal, and at the end.

    with fxzero.checkpoint.Checkpoints(state, "checkpoints", every=50, keep=3) as checkpoints:
        for number in range(checkpoints.resume(), num_steps):
            step(*batches[number])
            if checkpoints.after_step(number + 1):
                break

A signal reaches one rank, or all of them at different moments: whether to stop is agreed on in a
reduction that one step starts and the next one looks at, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fxzero.checkpoint.folder import published
from fxzero.checkpoint.loading import Loaded, load
from fxzero.checkpoint.ranks import all_ranks
from fxzero.checkpoint.saving import Saving, save, wait_for_running
from fxzero.checkpoint.state import TrainState
from fxzero.errors import CheckpointError, ConfigError, FxZeroWarning, HostMemoryError, nearest

log = logging.getLogger("fxzero")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What tells a run to save and stop: launchers and schedulers send one of them before the end."""


class Resume(StrEnum):
    """Whether a run goes on from a checkpoint."""

    AUTO = "auto"
    """From the newest that is whole, if the folder has any."""
    MUST = "must"
    """From the newest; that there is none is an error."""
    NEVER = "never"
    """It begins anew, in a folder that has none."""


class Checkpoints:
    """Saves a run while it trains. All ranks make one, alike, and call it alike.

    Args:
        state: what to save, and to load into.
        folder: see `fxzero.checkpoint.save`.
        every: steps between two checkpoints; None saves on a signal, and at the end, alone.
        keep: see `fxzero.checkpoint.save`.
        keep_every: see there.
        asynchronous: see there.
        signals: on which a run saves and stops. A second SIGINT does what it did before; others
            change nothing then, as schedulers and torchrun send them to ranks several times.

    A checkpoint that cannot be written is a warning, and the run goes on; the last one, on a signal
    or in `finish`, is an error.
    """

    def __init__(
        self,
        state: TrainState,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = True,
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        """See the class.

        Raises:
            ConfigError: a number that is none of steps or checkpoints.
        """
        for name, number in (("every", every), ("keep", keep), ("keep_every", keep_every)):
            if number is not None and (type(number) is not int or number < 1):
                raise ConfigError(f"{name}={number!r} must be a whole number, 1 or more, or None")
        self.state = state
        self.folder = folder
        self.every = every
        self.saving: Saving | None = None
        """The checkpoint that was begun last."""
        self.told_by: signal.Signals | None = None
        """What told this rank to stop."""
        self._settings: dict[str, Any] = {
            "keep": keep,
            "keep_every": keep_every,
            "asynchronous": asynchronous,
        }
        self._saved_step: int | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        ranks = all_ranks()
        self._group = dist.new_group(backend="gloo") if ranks.group is not None else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._agreeing: Any = None
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._before[number] = signal.signal(number, self._on_signal)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._restore_signals()
        with contextlib.suppress(Exception):  # what ends the run is said, not what follows
            wait_for_running()

    def resume(self, how: Resume | str = Resume.AUTO) -> int:
        """Go on from a checkpoint.

        Returns:
            How many steps were trained: 0 in a run that begins.

        Raises:
            CheckpointError: see `fxzero.checkpoint.load`; or there is one, or none, where that is
                an error.
        """
        try:
            how = Resume(how)
        except ValueError:
            raise ConfigError(f"resume={how!r}: {nearest(str(how), list(Resume))}") from None
        if how is Resume.NEVER:
            self._refuse_old()
            return 0
        loaded: Loaded | None = load(self.state, self.folder)
        if loaded is None and how is Resume.MUST:
            raise CheckpointError(
                f"{self.folder} has no checkpoint to go on from. Give the folder of the run, or "
                "begin a new one with resume='auto'."
            )
        self._saved_step = loaded.step if loaded is not None else None
        return loaded.step if loaded is not None else 0

    def _refuse_old(self) -> None:
        old = all_ranks().from_first([str(item.path) for item in published(Path(self.folder))])
        if old:
            raise CheckpointError(
                f"{self.folder} has checkpoints of another run ({old[-1]}), and this one begins "
                "anew: it would delete some of them, and a later resume could take one. Give it a "
                "folder of its own, or go on with resume='auto'."
            )

    def after_step(self, step: int) -> bool:
        """Save if it is time to. All ranks call it after every step.

        Args:
            step: how many steps were trained so far.

        Returns:
            Whether to stop: a signal has come to a rank, and what was trained is on disk.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        stop = self._agree()
        if stop:
            began = time.perf_counter()
            self.finish(step)
            log.warning(
                "told to stop: checkpoint %d was written in %.1f s",
                step,
                time.perf_counter() - began,
            )
        elif self.every is not None and step % self.every == 0:
            self._save(step)
        return stop

    def finish(self, step: int) -> None:
        """Save the end of a run, unless it is saved, and wait until it is on disk.

        Args:
            step: how many steps were trained.

        Raises:
            CheckpointError: it could not be written.
        """
        self._settle()
        if self._saved_step != step:
            self.saving = save(self.state, self.folder, step=step, **self._settings)
            self._saved_step = step
        wait_for_running()

    def close(self) -> None:
        """Wait for what is being written, and let signals do what they did before.

        Raises:
            CheckpointError: it could not be written.
        """
        self._restore_signals()
        if self._agreeing is not None:
            self._agreeing.wait()
            self._agreeing = None
        wait_for_running()
        self._group = None

    def _save(self, step: int) -> None:
        """Begin to save, unless that step is saved. What fails does not end the run."""
        if self._saved_step == step:
            return
        self._settle()
        self._saved_step = None
        with _as_warning():
            self.saving = save(self.state, self.folder, step=step, **self._settings)
            self._saved_step = step

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written; one that fails was not saved."""
        saved, self._saved_step = self._saved_step, None
        with _as_warning():
            wait_for_running()
            self._saved_step = saved

    # -- signals

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that was forked means to end by it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.told_by = signal.Signals(number)
        if self.told_by is signal.SIGINT:  # who asks twice does not want to wait
            signal.signal(number, self._before.pop(self.told_by))

    def _agree(self) -> bool:
        """Whether a rank was told to stop before its last step but one, or this one alone."""
        if self._group is None:
            return self.told_by is not None
        stop = False
        if self._agreeing is not None:
            self._agreeing.wait()
            stop = bool(self._flag.item())
        self._flag = torch.tensor([int(self.told_by is not None)], dtype=torch.int32)
        self._agreeing = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return stop

    def _restore_signals(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}


@contextlib.contextmanager
def _as_warning() -> Iterator[None]:
    """Say what went wrong with a checkpoint, and go on."""
    try:
        yield
    except (CheckpointError, HostMemoryError) as error:
        warnings.warn(f"{error}\nTraining goes on.", FxZeroWarning, stacklevel=5)
