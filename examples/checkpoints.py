"""A run's checkpoints: where they are, and what the log says of them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

import fxzero
from examples.logs import RunLog
from examples.settings import CheckpointSettings, Resume, Settings
from fxzero.checkpoint import SIGNALS, Checkpoints

_FREE = ("checkpoint.", "resume", "zero", "mesh.", "schedule", "memory_budget", "fxzero.")
"""Settings that a run may have others of when it goes on, without a word."""
_FREE_OF_TRAINER = ("steps", "log_every", "val_every", "val_batches", "sample_length", "threads")


class BegunWith:
    """The settings that a run was begun with: those of now are compared with them.

    What belongs to the optimizer and its schedule is loaded, whatever the settings of now say.
    """

    def __init__(self, settings: Settings) -> None:
        nested = OmegaConf.to_container(OmegaConf.structured(settings), enum_to_str=True)
        self.settings = {
            key: str(value)
            for key, value in _flat(nested, "")
            if not key.startswith((*_FREE, *(f"trainer.{name}" for name in _FREE_OF_TRAINER)))
        }
        self.other: list[str] = []
        """What is another now."""

    def state_dict(self) -> dict[str, str]:
        """The settings, flat."""
        return self.settings

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Compare."""
        self.other = [
            f"{key}={state.get(key)} (now {self.settings.get(key)})"
            for key in sorted({*state, *self.settings})
            if state.get(key) != self.settings.get(key)
        ]


def _flat(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield where, value
        return
    for key, item in value.items():
        yield from _flat(item, f"{where}.{key}".removeprefix("."))


class RunCheckpoints:
    """The checkpoints of one run; none where the settings name no folder."""

    def __init__(self, inner: Checkpoints | None, begun_with: BegunWith, log: RunLog) -> None:
        self._inner = inner
        self._begun_with = begun_with
        self._log = log

    def resume(self, how: Resume) -> int:
        """Go on from the newest, as the settings say: how many steps were trained."""
        first = 0 if self._inner is None else self._inner.resume(how.value)
        self._log.go_on_after(first)
        if self._inner is None:
            return 0
        if first:
            self._log.say(f"going on after {first} steps, from {self._inner.folder}")
        if self._begun_with.other:
            self._log.say(
                f"the run was begun with other settings: {', '.join(self._begun_with.other)}. What "
                "the optimizer and its schedule were saved with holds."
            )
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
    state: fxzero.TrainState, begun_with: BegunWith, settings: CheckpointSettings, log: RunLog
) -> Iterator[RunCheckpoints]:
    """The checkpoints of a run, on every rank. What it was begun with is a part of its state."""
    if settings.dir is None:
        yield RunCheckpoints(None, begun_with, log)
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
        yield RunCheckpoints(inner, begun_with, log)


def folder_of_job(settings: CheckpointSettings) -> CheckpointSettings:
    """Each job of a sweep has a folder of its own, by what it was told: another sweep over the same
    values goes on with it, and one over others does not. Called on rank 0, where Hydra is."""
    hydra = HydraConfig.get()
    if settings.dir is not None and hydra.mode is RunMode.MULTIRUN:
        told = [o for o in hydra.overrides.task if not o.startswith(("checkpoint.", "resume="))]
        name = re.sub(r"[^\w=.,+-]", "_", ",".join(sorted(told))) or "default"
        settings.dir = str(Path(settings.dir) / name[:200])
    return settings
