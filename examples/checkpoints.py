"""A run's checkpoints: where they are, and what the log says of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

import fxzero
from examples.logs import RunLog
from examples.settings import CheckpointSettings, Resume
from fxzero.checkpoint import SIGNALS, Checkpoints


class RunCheckpoints:
    """The checkpoints of one run; none where the settings name no folder."""

    def __init__(self, inner: Checkpoints | None, log: RunLog) -> None:
        self._inner = inner
        self._log = log

    def resume(self, how: Resume) -> int:
        """Go on from the newest, as the settings say: how many steps were trained."""
        first = 0 if self._inner is None else self._inner.resume(how.value)
        self._log.go_on_after(first)
        if self._inner is None:
            return 0
        if first:
            self._log.say(f"going on after {first} steps, from {self._inner.folder}")
        return first

    def after_step(self, step: int) -> bool:
        """Save if it is time to; whether to stop, as somebody has asked for."""
        if self._inner is None:
            return False
        before = self._inner.saving
        stop = self._inner.after_step(step)
        self._tell(step, before)
        if stop:
            self._log.say(f"told to stop: all of {step} steps is saved, and resume=auto goes on")
        return stop

    def finish(self, step: int) -> None:
        """Save the end of the run."""
        if self._inner is not None:
            before = self._inner.saving
            self._inner.finish(step)
            self._tell(step, before)

    def _tell(self, step: int, before: object) -> None:
        assert self._inner is not None
        saving = self._inner.saving
        if saving is not None and saving is not before:
            self._log.record(step, checkpoint_held_s=saving.held_s)
            self._log.say(
                f"checkpoint of step {step} goes to {self._inner.folder}: training waited "
                f"{1000 * saving.held_s:.0f} ms"
            )


@contextmanager
def open_checkpoints(
    state: fxzero.TrainState, settings: CheckpointSettings, log: RunLog
) -> Iterator[RunCheckpoints]:
    """The checkpoints of a run, on every rank."""
    if settings.dir is None:
        yield RunCheckpoints(None, log)
        return
    with Checkpoints(
        state,
        settings.dir,
        every=settings.every,
        keep=settings.keep,
        keep_every=settings.keep_every,
        asynchronous=settings.asynchronous,
        signals=(*SIGNALS, signal.SIGINT),
    ) as inner:
        yield RunCheckpoints(inner, log)


def folder_of_job(settings: CheckpointSettings) -> CheckpointSettings:
    """Each job of a sweep has a folder of its own. Called on rank 0, where Hydra is."""
    hydra = HydraConfig.get()
    if settings.dir is not None and hydra.mode is RunMode.MULTIRUN:
        settings.dir = str(Path(settings.dir) / str(hydra.job.num))
    return settings
