"""Stages of a pipeline by torch.distributed.pipelining, and by fxzero, with the same cut.

    rank 0, 1 of a mesh (pipeline 2, shard 2): tokens, positions, the first half of the blocks
    rank 2, 3:                                  the other half, norm, head and loss

The head of the model is its token embedding. fxzero keeps it on both stages and adds up its two
gradients; torch's stages train a copy each, so that their losses drift from everybody else's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import AdamW

from examples.benchmarks.workload import Job
from examples.models import GPT

SCHEDULES = {"gpipe": ScheduleGPipe}
"""Those that both have, with one stage a rank; for others torch's is 1F1B."""


def mesh_of(job: Job) -> DeviceMesh:
    """All ranks, those of one stage beside each other."""
    replicas = dist.get_world_size() // job.stages
    shape, names = ((job.stages,), ("pipeline",))
    if replicas > 1:
        shape, names = (job.stages, replicas), ("pipeline", "shard")  # type: ignore[assignment]
    return init_device_mesh(job.workload.device, shape, mesh_dim_names=names)


def stage_of_block(index: int, num_blocks: int, stages: int) -> int:
    """As many blocks to each stage, the first ones to the first."""
    return index * stages // num_blocks


def stages_by_module(model: GPT, stages: int) -> dict[str, int | tuple[int, ...]]:
    """The cut, as `fxzero.shard` takes it."""
    count = len(model.blocks)
    blocks = {f"blocks.{i}": stage_of_block(i, count, stages) for i in range(count)}
    return {"tokens": (0, stages - 1), "positions": 0, **blocks, "norm": stages - 1}


class Stage(nn.Module):
    """What one rank of torch's pipeline has of the model."""

    def __init__(self, model: GPT, index: int, stages: int):
        super().__init__()
        count = len(model.blocks)
        self.is_first, self.is_last = index == 0, index == stages - 1
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        self.blocks = nn.ModuleList(
            block
            for i, block in enumerate(model.blocks)
            if stage_of_block(i, count, stages) == index
        )
        if self.is_last:
            self.norm = model.norm
            self.head = nn.Parameter(model.tokens.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T), or the stream (B, T, C), to the stream, or to logits (B, T, V)."""
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.head) if self.is_last else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens, as the model takes it."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class TorchPipeline:
    """torch.distributed.pipelining's step: stages compiled, AdamW fused."""

    def __init__(self, model: GPT, job: Job, reshard: bool | None):
        mesh = mesh_of(job)
        group = mesh.get_group("pipeline")
        index = dist.get_rank(group)
        self.module: nn.Module = Stage(model, index, job.stages)
        self.is_first, self.is_last = index == 0, index == job.stages - 1
        if reshard is None:
            self.module.compile()
        else:
            for block in self.module.blocks:  # type: ignore[union-attr]
                block.compile()
                fully_shard(block, mesh=mesh["shard"], reshard_after_forward=reshard)
            fully_shard(self.module, mesh=mesh["shard"], reshard_after_forward=reshard)
        device = torch.device(job.workload.device)
        stage = PipelineStage(self.module, index, job.stages, device, group=group)
        kind = SCHEDULES.get(job.schedule, Schedule1F1B)
        self.schedule = kind(stage, job.micro_batches, loss_fn=loss_of)
        self.optimizer = AdamW(self.module.parameters(), lr=1e-3, fused=True)
        self.group, self.last = group, dist.get_global_rank(group, job.stages - 1)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One step; the loss is returned on all ranks, as fxzero does."""
        losses: list[Tensor] = []
        if self.is_first:
            self.schedule.step(tokens)
        elif self.is_last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if self.is_last else torch.zeros(())
        dist.broadcast(loss, self.last, group=self.group)
        return loss


class FxzeroPipeline:
    """`fxzero.shard` on the same mesh with the same cut, and `compile_step`."""

    def __init__(self, model: GPT, job: Job):
        import fxzero

        stages = stages_by_module(model, job.stages)
        self.module = fxzero.shard(
            model, zero=job.zero, mesh=mesh_of(job), stages=stages, schedule=job.schedule
        )
        self.optimizer = AdamW(self.module.parameters(), lr=1e-3, fused=True)
        self.step = fxzero.compile_step(
            self.module,
            self.optimizer,
            micro_batches=job.micro_batches,
            options=dict(job.fxzero_options),
        )
        self.waited_s = count_waits()

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One step."""
        self.waited_s[0] = 0.0
        return self.step(tokens, targets).loss


def count_waits() -> list[float]:
    """Seconds that this rank waits for others from here on, in a list of one: for messages, and at
    the end for what all stages share, which the slowest is the last to give."""
    waited_s = [0.0]
    wait = dist.Work.wait

    def timed(work: dist.Work, *arguments: Any) -> bool:
        begin = time.perf_counter()
        try:
            return wait(work, *arguments)
        finally:
            waited_s[0] += time.perf_counter() - begin

    dist.Work.wait = timed  # type: ignore[method-assign]
    return waited_s
