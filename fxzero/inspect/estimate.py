"""What training a model will cost: its step, compiled once for each ZeRO stage on ranks that exist
only in name, and simulated on a cluster's figures.

Nothing in it is a formula of the model's size: bytes, traffic and time are those of the graph that
the passes made, the one that would run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fxzero.compiler.config import Config
from fxzero.cost.analytic import DTYPE_NAMES
from fxzero.cost.cluster import ClusterSpec, load_cluster
from fxzero.errors import CaptureError, ConfigError
from fxzero.inspect.analysis import Analysis
from fxzero.inspect.capture import Capture, SharedModel, capture
from fxzero.inspect.model_states import ModelStates
from fxzero.inspect.targets import Target

EVERY_STAGE = (0, 1, 2, 3)


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
class Estimate:
    """All stages that were asked for, side by side."""

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
    """By ZeRO stage."""

    def to_json(self) -> dict[str, Any]:
        """The same as what `json` can write; stages are keyed by ``"0"`` to ``"3"``."""
        data = asdict(self)
        data["stages"] = {str(zero): stage for zero, stage in data["stages"].items()}
        return data

    @property
    def suggestion(self) -> str:
        """What would help, where nothing fits; else nothing."""
        if any(stage.fits for stage in self.stages.values()):
            return ""
        states_fit = [
            stage.zero
            for stage in self.stages.values()
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
            "(fxzero inspect --mesh)."
        )


def estimate(
    target: Target,
    *,
    world_size: int,
    stages: Iterable[int] = EVERY_STAGE,
    cluster: str = "dgx_h100",
    micro_batches: int = 1,
    param_dtype: torch.dtype | None = None,
    seq_len: int | None = None,
    inputs: str | None = None,
    options: Mapping[str, Any] | Config | None = None,
    **settings: Any,
) -> Estimate:
    """Compile a model's whole training step with AdamW for some ZeRO stages.

    Args:
        target: the model; its usual compute dtype and length of a row hold where none is given.
        world_size: ranks that share the model, each with a batch of its own.
        stages: the ZeRO stages.
        cluster: a name in `conf/cluster`, or a YAML file.
        micro_batches: equal parts that each rank's batch is split in.
        param_dtype: to gather and compute in.
        seq_len: tokens of a row.
        inputs: all of them by hand.
        options: the backend's; without a cluster of their own.
        settings: further ones of `capture`.

    Raises:
        CaptureError: the step cannot be traced as one graph.
        ConfigError: see `capture`.
    """
    spec = load_cluster(cluster)
    config = Config.from_options({} if options is None else options)
    if config.cost.cluster not in (None, cluster):
        raise ConfigError(
            f"cluster={cluster!r} and options' cost.cluster={config.cost.cluster!r} differ"
        )
    config = replace(config, cost=replace(config.cost, cluster=cluster))
    usual = target.usual(param_dtype, seq_len, inputs)
    found: dict[int, tuple[Capture, Analysis]] = {}
    shared = SharedModel()
    for zero in dict.fromkeys(stages):
        captured = capture(
            target.build,
            zero=zero,
            world_size=world_size,
            step=True,
            micro_batches=micro_batches,
            options=config,
            shared=shared,
            **usual,
            **settings,
        )
        if len(captured.compilations) != 1:
            raise CaptureError(
                f"the step of {target.name} is {len(captured.compilations)} graphs, and its cost "
                "is that of one. `fxzero inspect` without --step shows what breaks it."
            )
        analysis = Analysis.of(captured)
        if found:  # of one stage's graphs dtypes are read; the others would only be in the way
            captured = replace(captured, compilations=())
        found[zero] = captured, analysis
    if not found:
        raise ConfigError("no ZeRO stage was asked for")
    return _together(target, spec, world_size, micro_batches, found)


def _together(
    target: Target,
    spec: ClusterSpec,
    world_size: int,
    micro_batches: int,
    found: Mapping[int, tuple[Capture, Analysis]],
) -> Estimate:
    captured, analysis = next(iter(found.values()))
    batch = captured.batch
    computed = _dtype_of(captured)
    rows = batch.num_rows or 1
    tokens = batch.num_tokens
    peak_flops = spec.device.peak_flops
    flops_per_s = peak_flops.get(DTYPE_NAMES.get(computed, "fp32"), peak_flops["fp32"])

    def stage(zero: int, analysis: Analysis) -> StageEstimate:
        (row,) = analysis.schedules
        seconds = row.makespan_us * 1e-6
        return StageEstimate(
            zero=zero,
            model_state_bytes=analysis.states.num_bytes,
            states=analysis.states,
            peak_bytes=row.peak_bytes,
            bytes_by_kind=row.bytes_by_kind,
            host_bytes=row.host_bytes,
            disk_bytes=row.disk_bytes,
            traffic_bytes=round(analysis.sent_bytes()),
            step_ms=row.makespan_us * 1e-3,
            exposed_ms=row.exposed_us * 1e-3,
            mfu=analysis.flops / (seconds * flops_per_s),
            samples_per_s=rows * world_size / seconds,
            tokens_per_s=None if tokens is None else tokens * world_size / seconds,
            fits=row.peak_bytes <= spec.device.memory_bytes,
        )

    return Estimate(
        target=target.name,
        world_size=world_size,
        cluster=spec.name,
        device=spec.device.name,
        device_memory_bytes=int(spec.device.memory_bytes),
        num_parameters=captured.num_parameters,
        batch=batch.text(),
        rows=rows,
        tokens=tokens,
        micro_batches=micro_batches,
        param_dtype=str(computed).removeprefix("torch."),
        flops=analysis.flops,
        stages={zero: stage(zero, of_stage) for zero, (_, of_stage) in found.items()},
    )


def _dtype_of(captured: Capture) -> torch.dtype:
    """What most parameters' elements are computed in."""
    (compilation,) = captured.compilations
    sizes: dict[torch.dtype, int] = {}
    for spec in compilation.specs.values():
        sizes[spec.compute_dtype] = sizes.get(spec.compute_dtype, 0) + spec.num_elements
    return max(sizes, key=lambda dtype: sizes[dtype])
