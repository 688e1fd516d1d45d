"""What training a model will cost: its step, compiled once for each ZeRO stage on ranks that exist
only in name, and simulated on a cluster's figures.

    flat group of N ranks     the step's graph, simulated                  one batch a rank
    replicate=R,shard=S       the same on a mesh of two axes               one batch a rank
    pipeline=P,…              a micro-step in stages, and a schedule       one batch for P ranks
                              replayed with them (`fxzero.inspect.pipeline`)

Nothing in it is a formula of the model's size: bytes, traffic and time are those of the graph that
the passes made, the one that would run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxzero.compiler.config import Config
from fxzero.cost.analytic import DTYPE_NAMES
from fxzero.cost.cluster import ClusterSpec, load_cluster
from fxzero.cost.flops import model_flops
from fxzero.errors import CaptureError, ConfigError
from fxzero.inspect.analysis import Analysis
from fxzero.inspect.capture import Capture, SharedModel, capture
from fxzero.inspect.estimate_rows import Estimate, MeshEstimate, PipelineEstimate, StageEstimate
from fxzero.inspect.mesh import MeshShape
from fxzero.inspect.pipeline import PipelineReport, micro_step_of, under
from fxzero.inspect.side_by_side import side_by_side
from fxzero.inspect.targets import Target
from fxzero.pipeline.schedules import AUTO, table_of
from fxzero.sharding.pipeline import PIPELINE

EVERY_STAGE = (0, 1, 2, 3)


def estimate(
    target: Target,
    *,
    world_size: int,
    stages: Iterable[int] = EVERY_STAGE,
    meshes: Iterable[MeshShape] = (),
    schedule: str = "1f1b",
    cluster: str = "dgx_h100",
    micro_batches: int = 1,
    clip_grad_norm: float | None = 1.0,
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
        meshes: further layouts of the same ranks, each for all of these stages. The ranks of a
            pipeline work on one batch together.
        schedule: of pipelines: `fxzero.pipeline.schedules`.
        cluster: a name in `conf/cluster`, or a YAML file.
        micro_batches: equal parts that each batch is split in.
        clip_grad_norm: the norm that gradients are clipped to; None does not clip.
        param_dtype: to gather and compute in.
        seq_len: tokens of a row.
        inputs: all of them by hand.
        options: the backend's; without a cluster of their own.
        settings: further ones of `capture`.

    Raises:
        CaptureError: the step cannot be traced as one graph.
        ConfigError: a mesh of another number of ranks, one that the model or the schedule cannot be
            cut for; see `capture`.
    """
    spec = load_cluster(cluster)
    config = Config.from_options({} if options is None else options)
    if config.cost.cluster not in (None, cluster):
        raise ConfigError(
            f"cluster={cluster!r} and options' cost.cluster={config.cost.cluster!r} differ"
        )
    config = replace(config, cost=replace(config.cost, cluster=cluster))
    asked, shapes = list(dict.fromkeys(stages)), list(dict.fromkeys(meshes))
    if not asked:
        raise ConfigError("no ZeRO stage was asked for")
    for shape in shapes:
        check_mesh(shape, world_size, schedule, micro_batches, config)
    usual = target.usual(param_dtype, seq_len, inputs)
    step = _Step(
        target,
        spec,
        world_size,
        micro_batches,
        {
            "micro_batches": micro_batches,
            "clip_grad_norm": clip_grad_norm,
            "options": config,
            "shared": SharedModel(),
            **usual,
            **settings,
        },
    )
    found = side_by_side(
        [functools.partial(step.captured, zero) for zero in asked]
        + [functools.partial(step.on_mesh, m, zero, schedule) for m in shapes for zero in asked]
    )
    first = found[0]
    flat, *on_meshes = (
        {of.stage.zero: of.stage for of in found[i : i + len(asked)]}
        for i in range(0, len(found), len(asked))
    )
    return Estimate(
        target=target.name,
        world_size=world_size,
        cluster=spec.name,
        device=spec.device.name,
        device_memory_bytes=int(spec.device.memory_bytes),
        num_parameters=first.num_parameters,
        batch=first.batch,
        rows=first.rows,
        tokens=first.tokens,
        micro_batches=micro_batches,
        param_dtype=first.param_dtype,
        flops=first.flops,
        stages=flat,
        meshes={
            str(shape): MeshEstimate(dict(shape.axes), world_size // shape.along(PIPELINE), stages)
            for shape, stages in zip(shapes, on_meshes, strict=True)
        },
    )


def check_mesh(
    mesh: MeshShape, world_size: int, schedule: str, micro_batches: int, config: Config
) -> None:
    """See, before anything is captured, that ranks can be laid out so.

    Raises:
        ConfigError: it is a mesh of another number of ranks; or a pipeline of one rank, one that
            the schedule is not for, or one whose ranks would hold something on the host.
    """
    mesh.check(world_size)
    if not mesh.is_pipeline:
        return
    num_ranks = mesh.along(PIPELINE)
    if num_ranks == 1:
        raise ConfigError(
            f"--mesh {mesh} is no pipeline: one rank has all stages. Leave the axis out: what its "
            "ranks would do is shown without it."
        )
    if schedule != AUTO:
        table_of(schedule, num_ranks, micro_batches)
    filled = config.filled
    moved = {
        "offload_states": filled.offload_states.share,
        "offload_params": filled.offload_params.share,
        "offload_activations": filled.offload_activations.share,
    }
    for name, share in moved.items():
        if share:
            raise ConfigError(
                f"--mesh {mesh}: what ranks of a pipeline hold is estimated on the device alone, "
                f"and {name}.share={share} moves some of it to the host. Leave out one of both."
            )


@dataclass(frozen=True)
class _Found:
    """One ZeRO stage's figures, and what they share with the others'."""

    stage: StageEstimate
    num_parameters: int
    batch: str
    rows: int
    tokens: int | None
    param_dtype: str
    flops: float


@dataclass(frozen=True)
class _Step:
    """A step whose ranks are laid out in several ways."""

    target: Target
    cluster: ClusterSpec
    world_size: int
    micro_batches: int
    settings: Mapping[str, Any]
    """Of every capture."""

    def on_mesh(self, mesh: MeshShape, zero: int, schedule: str) -> _Found:
        """One stage on a mesh."""
        if mesh.is_pipeline:
            return self.pipelined(zero, mesh, schedule)
        return self.captured(zero, mesh.sizes)

    def captured(self, zero: int, mesh: tuple[int, ...] = ()) -> _Found:
        """One stage, of a group of all ranks or on a mesh of axes that parameters lie on.

        Raises:
            CaptureError: the step is several graphs.
        """
        captured = capture(
            self.target.build,
            zero=zero,
            world_size=self.world_size,
            step=True,
            mesh=mesh,
            **self.settings,
        )
        if len(captured.compilations) != 1:
            raise CaptureError(
                f"the step of {self.target.name} is {len(captured.compilations)} graphs, and its "
                "cost is that of one. `fxzero inspect` without --step shows what breaks it."
            )
        if not captured.is_whole:
            raise CaptureError(
                f"the step of {self.target.name} is not one graph, as the warning says that came "
                "before, and its cost is that of one: with its update and its optimizer's state. "
                "`fxzero inspect` without --step shows what of it can be compiled."
            )
        analysis = Analysis.of(captured)
        (row,) = analysis.schedules
        if row.left_out:
            raise CaptureError(
                f"the memory of the step of {self.target.name} is not known: {row.left_out[0]} "
                "does not run on tensors without values, which would say what it holds."
            )
        stage = StageEstimate(
            zero=zero,
            model_state_bytes=analysis.states.num_bytes,
            states=analysis.states,
            peak_bytes=row.peak_bytes,
            bytes_by_kind=row.bytes_by_kind,
            host_bytes=row.host_bytes,
            disk_bytes=row.disk_bytes,
            traffic_bytes=round(analysis.sent_bytes()),
            **self._times(captured, analysis.flops, row.makespan_us, row.exposed_us),
            fits=self._fits(row.peak_bytes),
        )
        return _found(stage, captured, analysis.flops)

    def pipelined(self, zero: int, mesh: MeshShape, schedule: str) -> _Found:
        """One stage, within the stages of a pipeline."""
        inner = mesh.of_a_stage
        step = micro_step_of(
            self.target.build, zero=zero, world_size=len(inner), mesh=inner.sizes, **self.settings
        )
        report = under(schedule, step, mesh.along(PIPELINE), self.micro_batches)
        clips = self.settings["clip_grad_norm"] is not None
        step_us = _until_updated(report, clips)
        computing = zip(report.idle_shares, report.update_us, strict=True)
        busy_us = [report.step_us * (1 - idle) + update_us for idle, update_us in computing]
        place = max(range(report.num_ranks), key=report.peak_bytes.__getitem__)
        (compilation,) = step.capture.compilations
        assert compilation.joint is not None
        flops = model_flops(compilation.joint)
        stage = PipelineEstimate(
            zero=zero,
            model_state_bytes=report.states[place].num_bytes,
            states=report.states[place],
            peak_bytes=report.peak_bytes[place],
            bytes_by_kind=report.bytes_by_kind[place],
            host_bytes=0,
            disk_bytes=0,
            traffic_bytes=round(max(report.sent_bytes)),
            **self._times(step.capture, flops, step_us, report.exposed_us, report.num_ranks),
            fits=self._fits(report.peak_bytes[place]),
            schedule=report.schedule,
            place=place,
            message_bytes=max(report.message_bytes),
            idle_share=1 - sum(busy_us) / (step_us * report.num_ranks),
        )
        return _found(stage, step.capture, flops)

    def _fits(self, peak_bytes: int) -> bool:
        return peak_bytes <= self.cluster.device.memory_bytes

    def _times(
        self,
        captured: Capture,
        flops: float,
        step_us: float,
        exposed_us: float,
        ranks_per_batch: int = 1,
    ) -> dict[str, Any]:
        """What follows from how long a step takes.

        Args:
            flops: of a batch.
            ranks_per_batch: how many work on it together.
        """
        seconds, batches = step_us * 1e-6, self.world_size // ranks_per_batch
        rows, tokens = captured.batch.num_rows or 1, captured.batch.num_tokens
        peaks = self.cluster.device.peak_flops
        flops_per_s = peaks.get(DTYPE_NAMES.get(_dtype_of(captured), "fp32"), peaks["fp32"])
        return {
            "step_ms": step_us * 1e-3,
            "exposed_ms": exposed_us * 1e-3,
            "mfu": flops / (seconds * flops_per_s * ranks_per_batch),
            "samples_per_s": rows * batches / seconds,
            "tokens_per_s": None if tokens is None else tokens * batches / seconds,
        }


def _found(stage: StageEstimate, captured: Capture, flops: float) -> _Found:
    """What is kept of a stage. The graphs go with the capture: the next one's need their room."""
    return _Found(
        stage,
        captured.num_parameters,
        captured.batch.text(),
        captured.batch.num_rows or 1,
        captured.batch.num_tokens,
        str(_dtype_of(captured)).removeprefix("torch."),
        flops,
    )


def _until_updated(report: PipelineReport, clips: bool) -> float:
    """A pipeline's step with its update, which a rank begins when it has ended; where gradients are
    clipped, when all have: their norm is of all of them."""
    ends = [
        report.step_us if clips else max(report.replayed.end_us[a] for a in row)
        for row in report.replayed.table.ranks
    ]
    return max(end + us for end, us in zip(ends, report.update_us, strict=True))


def _dtype_of(captured: Capture) -> torch.dtype:
    """What most parameters' elements are computed in."""
    (compilation,) = captured.compilations
    sizes: dict[torch.dtype, int] = {}
    for spec in compilation.specs.values():
        sizes[spec.compute_dtype] = sizes.get(spec.compute_dtype, 0) + spec.num_elements
    return max(sizes, key=lambda dtype: sizes[dtype])
