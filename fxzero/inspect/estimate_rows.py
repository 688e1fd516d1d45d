"""An estimate as data: figures by ZeRO stage, of one group of ranks and of meshes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fxzero.inspect.model_states import ModelStates


@dataclass(frozen=True)
class StageEstimate:
    """One ZeRO stage, figures of one rank."""

    zero: int
    model_state_bytes: int
    """Parameters, gradients and optimizer state: `fxzero.inspect.model_states`."""
    states: ModelStates
    """The same, apart."""
    peak_bytes: int
    """Simulated: the most that the device holds at once in a step."""
    bytes_by_kind: dict[str, int]
    """What the peak is made of."""
    host_bytes: int
    """Held in the host's memory meanwhile."""
    disk_bytes: int
    """Held on disk."""
    traffic_bytes: int
    """Sent to other ranks in a step, and as much received."""
    step_ms: float
    """Simulated, with the update."""
    exposed_ms: float
    """Of it, how long compute stands still for transfers."""
    mfu: float
    """What the model computes over what the device could meanwhile: `fxzero.cost.flops`."""
    samples_per_s: float
    """Rows of all ranks."""
    tokens_per_s: float | None
    """Of all ranks; None where the model reads none."""
    fits: bool
    """Whether the peak is within the device's memory."""


@dataclass(frozen=True)
class PipelineEstimate(StageEstimate):
    """One ZeRO stage within the stages of a pipeline. States and peak are those of the ranks that
    hold most; what is sent is that of those that send most."""

    schedule: str
    """What was replayed."""
    place: int
    """Along the pipeline, of the ranks that hold most."""
    message_bytes: int
    """Of the traffic, what goes to neighbours along the pipeline."""
    idle_share: float
    """Of the time of all ranks in a step, the part in which they compute nothing."""


@dataclass(frozen=True)
class MeshEstimate:
    """The same ranks, laid out on a mesh."""

    axes: dict[str, int]
    """Ranks along each, outermost first."""
    batches: int
    """Of a step: one a rank, or one for all ranks of a pipeline."""
    stages: Mapping[int, StageEstimate]
    """By ZeRO stage; of a pipeline `PipelineEstimate`."""


@dataclass(frozen=True)
class Estimate:
    """All stages and meshes that were asked for, side by side."""

    target: str
    world_size: int
    cluster: str
    device: str
    device_memory_bytes: int
    num_parameters: int
    batch: str
    """What each rank's model is called with."""
    rows: int
    """Of each rank's batch."""
    tokens: int | None
    """Of each rank's batch."""
    micro_batches: int
    param_dtype: str
    """What is computed with."""
    flops: float
    """Of a step on each rank."""
    stages: dict[int, StageEstimate]
    """By ZeRO stage, of one group of all ranks."""
    meshes: dict[str, MeshEstimate] = field(default_factory=dict)
    """The same on meshes, by how they are written."""

    def to_json(self) -> dict[str, Any]:
        """The same as what `json` can write; stages are keyed by ``"0"`` to ``"3"``."""
        data = asdict(self)
        for part in (data, *data["meshes"].values()):
            part["stages"] = {str(zero): stage for zero, stage in part["stages"].items()}
        return data

    @property
    def every_stage(self) -> list[StageEstimate]:
        """Of the flat group, and of all meshes."""
        on_meshes = (stage for mesh in self.meshes.values() for stage in mesh.stages.values())
        return [*self.stages.values(), *on_meshes]

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(stage.fits for stage in self.every_stage)

    @property
    def suggestion(self) -> str:
        """What would help, where nothing fits; else nothing."""
        if self.fits:
            return ""
        states_fit = [
            stage.zero
            for stage in self.every_stage
            if stage.model_state_bytes < self.device_memory_bytes
        ]
        if states_fit:
            return (
                f"The model states of ZeRO-{max(states_fit)} fit, and what a step has beside them "
                'does not. Repeat what can be repeated, --options \'{"memory_budget": "auto"}\', '
                "split the batch (--micro-batches), or take a smaller one (--batch)."
            )
        return (
            "Model states alone do not fit. Take more ranks, hold them in the host's memory, "
            '--options \'{"memory": "all_host"}\', or cut the model into stages of a pipeline '
            "(--mesh pipeline=4,shard=2)."
        )
