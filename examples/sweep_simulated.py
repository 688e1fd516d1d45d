"""Look for the settings of the fastest step, by simulation: no ranks, no memory for a model.

    python examples/sweep_simulated.py -m zero=1,2,3 fxzero.prefetch.distance=null,1,2
    python examples/sweep_simulated.py -m sweep=gpt_lite hydra/launcher=joblib
    python examples/sweep_results.py outputs/simulated/…

Each job compiles the step for ranks that are not there and simulates it on a cluster's figures, as
`fxzero estimate` does. `sweep=` names a file of `examples/conf/sweep/`, which says what Optuna is
to choose. What cannot be, or does not fit the device, has the value inf and a reason.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `examples` lies

from examples.sweeps import Result, recorded
from fxzero.cli.arguments import meshes_of
from fxzero.inspect.estimate import estimate
from fxzero.inspect.estimate_rows import Estimate, StageEstimate
from fxzero.inspect.targets import load


class Objective(Enum):
    """What is to be least."""

    step_ms = "step_ms"
    us_per_sample = "us_per_sample"
    """Of all ranks: for sweeps over meshes or batches, whose steps train more or less."""
    peak_bytes = "peak_bytes"
    traffic_bytes = "traffic_bytes"


@dataclass
class Simulation:
    """Everything that a job can be told."""

    target: str
    """A preset, hf:NAME or package.module:factory, as `fxzero estimate` takes it."""
    world_size: int
    cluster_name: str
    """A name in conf/cluster, or a YAML file."""
    zero: int
    batch_size: int | None
    """Rows of each rank."""
    seq_len: int | None
    micro_batches: int
    mesh: str | None
    """Another layout than one axis of all ranks: pipeline=4,shard=2."""
    schedule: str
    """Of a pipeline."""
    clip_grad_norm: float | None
    objective: Objective
    fxzero: dict[str, Any]
    """The compiler's settings."""

    def run(self) -> tuple[Estimate, StageEstimate]:
        """Simulate it."""
        found = estimate(
            load(self.target),
            world_size=self.world_size,
            stages=[self.zero],
            meshes=meshes_of([self.mesh] if self.mesh else [], self.world_size),
            schedule=self.schedule,
            cluster=self.cluster_name,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            micro_batches=self.micro_batches,
            clip_grad_norm=self.clip_grad_norm,
            options=self.fxzero,
        )
        *_, stages = (found.stages, *(mesh.stages for mesh in found.meshes.values()))
        return found, stages[self.zero]

    @property
    def command(self) -> str:
        """What shows all of one job's figures."""
        sizes = {
            "--batch": self.batch_size,
            "--seq-len": self.seq_len,
            "--mesh": self.mesh,
            "--schedule": self.schedule if self.mesh and "pipeline" in self.mesh else None,
        }
        words = [word for name, value in sizes.items() if value for word in (name, str(value))]
        return shlex.join(
            [
                *("fxzero", "estimate", self.target, "--world-size", str(self.world_size)),
                *("--cluster", self.cluster_name, "--zero", str(self.zero), *words),
                *("--micro-batches", str(self.micro_batches)),
                *("--clip-grad-norm", str(self.clip_grad_norm or 0)),
                *("--options", json.dumps(_changed(self.fxzero, _DEFAULTS))),
            ]
        )


_DEFAULTS = yaml.safe_load(files("fxzero.conf").joinpath("fxzero/default.yaml").read_text())


def _changed(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not their defaults."""
    found = {
        name: _changed(value, defaults[name]) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value != defaults.get(name)
    }
    return {name: value for name, value in found.items() if value != {}}


def simulated(cfg: DictConfig) -> Result:
    """One job."""
    merged = OmegaConf.merge(OmegaConf.structured(Simulation), cfg)
    job = cast(Simulation, OmegaConf.to_object(merged))
    found, stage = job.run()
    figures = {
        "step_ms": stage.step_ms,
        "exposed_ms": stage.exposed_ms,
        "us_per_sample": 1e6 / stage.samples_per_s,
        "peak_bytes": stage.peak_bytes,
        "host_bytes": stage.host_bytes,
        "traffic_bytes": stage.traffic_bytes,
        "mfu": stage.mfu,
    }
    overrides = list(HydraConfig.get().overrides.task)
    if not stage.fits:
        has, takes = found.device_memory_bytes / 2**30, stage.peak_bytes / 2**30
        reason = f"does not fit: {takes:.1f} GiB at the peak, {found.device} has {has:.1f} GiB"
        return Result(overrides, None, figures, reason, job.command)
    return Result(overrides, figures[job.objective.value], figures, command=job.command)


@hydra.main(version_base="1.3", config_path="conf", config_name="simulated")
def main(cfg: DictConfig) -> float:
    """What Hydra calls for each job."""
    value = recorded(lambda: simulated(cfg))
    folder = Path(HydraConfig.get().runtime.output_dir)
    print(f"{Result.read(folder).command or folder}: {value:g}")
    return value


if __name__ == "__main__":
    main()
