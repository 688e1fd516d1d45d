"""A sweep's jobs: each in processes of its own, and what became of it in a file of its folder.

    outputs/sweep/…/0/   .hydra/overrides.yaml   what the job was told
                         result.json             its value and figures, or why it has none
                         output.txt              what its ranks printed

A job that fails, or that cannot be, has the value inf: sweepers avoid it, and others go on. How
many run at once, and where, is Hydra's launcher: one after another, joblib, or Slurm by submitit.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

import fxzero
from examples.failures import SettingsError, sentence

RESULT = "result.json"
TRAIN = Path(__file__).with_name("train.py")
REFUSED = (fxzero.FxZeroError, SettingsError, HydraException, OmegaConfBaseException, OSError)
"""What says, in a sentence, why a job cannot be."""


@dataclass(frozen=True)
class Result:
    """What became of a job."""

    overrides: list[str]
    value: float | None
    """The objective, less is better; None where there is none."""
    figures: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why there is no value."""
    command: str = ""
    """What starts the job by itself."""

    @property
    def objective(self) -> float:
        """What a sweeper is told."""
        return math.inf if self.value is None else self.value

    def write(self, folder: Path) -> None:
        """Leave it in the job's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Result:
        """What a job has left."""
        return cls(**json.loads((folder / RESULT).read_text(encoding="utf-8")))


def in_sweep() -> bool:
    """Whether Hydra runs several jobs; asked where Hydra is."""
    return HydraConfig.get().mode is RunMode.MULTIRUN


def recorded(measure: Callable[[], Result]) -> float:
    """Run a job, leave its result in its folder, and return what the sweeper is told."""
    hydra = HydraConfig.get()
    try:
        result = measure()
    except Exception as error:
        # Another error than these is a fault, and its traceback the reason; it too is this job's.
        reason = sentence(error)
        kind = "" if isinstance(error, REFUSED) else f"{type(error).__name__}: "
        result = Result(list(hydra.overrides.task), None, reason=kind + reason)
    result.write(Path(hydra.runtime.output_dir))
    if result.reason:
        number = f"job {hydra.job.num}" if in_sweep() else "the job"
        why = result.reason.splitlines()[-1]
        print(f"{number} has no result: {why}", file=sys.stderr, flush=True)
    return result.objective


def launch_job(num_ranks: int, more: Iterable[str] = ()) -> Result:
    """Train what Hydra has composed, by torchrun, in the folder that Hydra has made.

    Args:
        more: further overrides.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = list(hydra.overrides.task)
    own = [o for o in hydra.overrides.hydra if o.startswith("hydra.searchpath")]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), str(TRAIN), *overrides, *more, *own),
    ]
    # The folder is there, and so is what `.hydra` of it says.
    here = [f"hydra.run.dir={quoted(str(folder))}", "hydra.output_subdir=null"]
    if not in_sweep():
        code = subprocess.run([*command, *here], check=False).returncode
        reason = f"torchrun ended with {code}; what it said stands above" if code else ""
    else:
        output = folder / "output.txt"
        with output.open("w", encoding="utf-8") as file:
            code = subprocess.run(
                [*command, *here], stdout=file, stderr=subprocess.STDOUT, check=False
            ).returncode
        reason = _last_words(output, code) if code else ""
    if reason:
        return Result(overrides, None, reason=reason, command=shlex.join(command))
    figures = figures_of(folder)
    value = figures.get("final_val_loss")
    if value is None or not math.isfinite(value):
        reason, value = f"the last validation loss is {value}", None
    return Result(overrides, value, figures, reason, shlex.join(command))


def figures_of(folder: Path) -> dict[str, float]:
    """Last losses, the median of a step's time and the largest peak, from a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def all_of(name: str) -> list[float]:
        return [record[name] for record in records if name in record]

    # The first step waits for the compiler.
    times, peaks = all_of("step_s"), all_of("peak_bytes")
    found = {name: all_of(name)[-1:] for name in ("loss", "final_train_loss", "final_val_loss")}
    figures = {name: values[0] for name, values in found.items() if values}
    if times:
        figures |= {"step_ms": 1e3 * median(times[1:] or times), "peak_bytes": max(peaks)}
    return figures


def _last_words(output: Path, code: int) -> str:
    """What stands last in torchrun's table: the failed rank's own message."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip(" =-")]
    last = said[-1] if said else ""
    return f"torchrun ended with {code}: {last} (see {output.name})"


def quoted(text: str) -> str:
    """A value for Hydra's grammar, whatever is in it."""
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"
