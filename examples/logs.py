"""What a run leaves behind, and what it shows while it runs. Rank 0 alone writes.

    metrics.jsonl            one object per record
    events.out.tfevents.*    the same numbers for TensorBoard
    config.yaml              the settings, resolved
    sample.txt               generated text

Each logged step is a line on the screen; a terminal also shows a progress bar.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from examples.ranks import rank
from examples.settings import Settings


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What is logged of one training step."""

    loss: float
    """Mean over the ranks."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens_per_s: float
    """Of all ranks together, since the step that was logged before."""
    peak_bytes: int
    """Most memory that rank 0 has used so far."""
    num_gathers: int
    """This and what follows: per step, in compiled graphs."""
    gathered_bytes: int
    num_reduces: int
    reduced_bytes: int
    num_uploads: int = 0
    """Copies from the host's memory, where it holds part of the step, and back there."""
    uploaded_bytes: int = 0
    num_downloads: int = 0
    downloaded_bytes: int = 0

    def __str__(self) -> str:
        copies = (
            f"  {self.num_uploads} up {_mebibytes(self.uploaded_bytes)}"
            f"  {self.num_downloads} down {_mebibytes(self.downloaded_bytes)}"
        )
        return (
            f"loss {self.loss:.3f}  lr {self.lr:.1e}  grad {self.grad_norm:.2f}  "
            f"{self.tokens_per_s:,.0f} tokens/s  peak {_mebibytes(self.peak_bytes)}  "
            f"{self.num_gathers} gathers {_mebibytes(self.gathered_bytes)}  "
            f"{self.num_reduces} reduces {_mebibytes(self.reduced_bytes)}"
            f"{copies if self.num_uploads else ''}"
        )


class RunLog:
    """The log of one run, open inside a `with`."""

    def __init__(self, output: Path, settings: Settings):
        self.output = output
        self.settings = settings
        self.num_steps = settings.trainer.steps
        self._is_broken = False

    def __enter__(self) -> RunLog:
        OmegaConf.save(OmegaConf.structured(self.settings), self.output / "config.yaml")
        self._jsonl = (self.output / "metrics.jsonl").open("a+")
        self._tensorboard = SummaryWriter(str(self.output))
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
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._is_broken:
            self.say(f"the log in {self.output} cannot be written ({error}); training goes on")
        self._is_broken = True

    def step(self, step: int, numbers: StepNumbers) -> None:
        """Record a training step, and show it."""
        self.record(step, **asdict(numbers))
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


def open_log(output: Path, settings: Settings) -> RunLog:
    """The log to use on this rank."""
    return (RunLog if rank() == 0 else SilentLog)(output, settings)


def _mebibytes(num_bytes: int) -> str:
    """``3.2 MiB``."""
    return f"{num_bytes / 2**20:,.1f} MiB"
