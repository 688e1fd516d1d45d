"""What a run leaves behind, and what it shows while it runs. Rank 0 alone writes.

    metrics.jsonl            one object per record
    events.out.tfevents.*    the same numbers for TensorBoard
    wandb/                   the same as an offline run of wandb, where that is asked for
    config.yaml              the settings, resolved
    sample.txt               generated text

Each logged step is a line on the screen; a terminal also shows a progress bar. In any loop:

    with open_log(folder, num_steps) as log:
        steps = StepLog(log, model, every=10, samples_per_step=16)
        for step in range(1, num_steps + 1):
            loss = …
            steps.after(step, loss)
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard import SummaryWriter

from examples.failures import SettingsError
from examples.meter import Measured, Meter
from examples.ranks import mean_over_ranks, rank


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What is logged of one training step."""

    loss: float
    """Mean over the ranks."""
    lr: float
    grad_norm: float
    """Before clipping."""
    measured: Measured

    def __str__(self) -> str:
        norm = "" if math.isnan(self.grad_norm) else f"grad {self.grad_norm:.2f}  "
        return f"loss {self.loss:.3f}  lr {self.lr:.1e}  {norm}{self.measured}"

    @property
    def values(self) -> dict[str, float]:
        """All of it, flat, without what there is not."""
        numbers = asdict(self)
        found = numbers | numbers.pop("measured")
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, (int, float)) and not math.isnan(value)
        }


class RunLog:
    """The log of one run, open inside a `with`.

    Args:
        settings: what the run was told: a dataclass or a mapping.
        wandb: also write an offline run of wandb, which ``wandb sync`` uploads.

    Raises:
        SettingsError: wandb is not installed.
    """

    def __init__(self, output: Path, num_steps: int, settings: Any = None, wandb: bool = False):
        self.output = output
        self.num_steps = num_steps
        self._settings = OmegaConf.create({} if settings is None else settings)
        self._wandb = _wandb() if wandb else None
        self._is_broken = False

    def __enter__(self) -> RunLog:
        self.output.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._settings, self.output / "config.yaml")
        self._jsonl = (self.output / "metrics.jsonl").open("a+")
        self._tensorboard = SummaryWriter(str(self.output))
        if self._wandb is not None:
            config = OmegaConf.to_container(self._settings, resolve=True, enum_to_str=True)
            self._wandb.init(mode="offline", dir=str(self.output), config=config)
        self._console = Console()
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("train", total=self.num_steps)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._wandb is not None:
            self._wandb.finish()
        for file in (self._tensorboard, self._jsonl):
            try:
                file.close()
            except OSError as error:
                self._warn(error)

    def go_on_after(self, step: int) -> None:
        """Drop what a run before this one, in the same folder, has recorded of later steps."""
        self._jsonl.seek(0)
        lines = [line for line in self._jsonl if line.endswith("\n")]
        self._jsonl.truncate(0)
        self._jsonl.writelines(line for line in lines if json.loads(line)["step"] <= step and step)

    def record(self, step: int, **values: float) -> None:
        """Write the numbers that belong to the end of a step. A disk that takes none is said once:
        training does not end over its log."""
        try:
            self._jsonl.write(json.dumps({"step": step, **values}) + "\n")
            self._jsonl.flush()
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            if self._wandb is not None:
                self._wandb.log(values, step=step)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._is_broken:
            self.say(f"the log in {self.output} cannot be written ({error}); training goes on")
        self._is_broken = True

    def step(self, step: int, numbers: StepNumbers) -> None:
        """Record a training step, and show it."""
        self.record(step, **numbers.values)
        self._progress.update(self._bar, completed=step)
        self.say(f"step {step:>4}/{self.num_steps}  {numbers}")

    def sample(self, text: str) -> None:
        """Keep a generated text, and show it."""
        try:
            (self.output / "sample.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            self._warn(error)
        self.say(text)

    def say(self, text: str) -> None:
        """Print lines; on a terminal they scroll by above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class SilentLog(RunLog):
    """The log of every rank but the first: takes the same calls and does nothing."""

    def __init__(self, output: Path, num_steps: int, *_: object) -> None:
        self.output = output
        self.num_steps = num_steps

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def go_on_after(self, step: int) -> None:
        pass

    def record(self, step: int, **values: float) -> None:
        pass

    def step(self, step: int, numbers: StepNumbers) -> None:
        pass

    def sample(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def open_log(output: Path, num_steps: int, settings: Any = None, wandb: bool = False) -> RunLog:
    """The log to use on this rank: see `RunLog`."""
    return (RunLog if rank() == 0 else SilentLog)(output, num_steps, settings, wandb)


class StepLog:
    """Measures the steps of a loop, and logs some of them: the first, the last, every so many.

    Args:
        every: steps between two records.
        sizes: of a step, as `Meter` takes them.
        step: the last one that was done before.
    """

    def __init__(
        self, log: RunLog, model: nn.Module, *, every: int = 1, step: int = 0, **sizes: int
    ) -> None:
        self._log, self._every, self._first = log, every, step + 1
        self.meter = Meter(model, step=step, **sizes)  # type: ignore[arg-type]

    def after(
        self, step: int, loss: Tensor, lr: float = math.nan, grad_norm: Tensor | None = None
    ) -> None:
        """Called on all ranks after each step."""
        if step == self._first:
            self._log.record(step, first_step_s=self.meter.seconds)
            self._log.say(f"the first step is done, after {self.meter.seconds:.1f} s")
        if step not in (self._first, self._log.num_steps) and step % self._every:
            return
        numbers = {"loss": mean_over_ranks(loss), "lr": lr, "grad_norm": to_float(grad_norm)}
        self._log.step(step, StepNumbers(**numbers, measured=self.meter.read(step)))


def to_float(norm: Tensor | None) -> float:
    """A norm as a number; that of shards is first added up over the ranks."""
    if norm is None:
        return math.nan
    whole = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
    return whole.item()


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise SettingsError(
            "wandb=true writes an offline run of wandb: pip install wandb"
        ) from None
    return wandb
