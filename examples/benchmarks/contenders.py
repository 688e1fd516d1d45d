"""Who takes part: each function turns the plain GPT into one way to train it.

    fxzero          fxzero.shard, then torch.compile(backend="fxzero")
    fxzero-step     fxzero.shard, then fxzero.compile_step: the optimizer is in the graph
    ddp             DistributedDataParallel: nothing is sharded
    fsdp2           fully_shard on every block, then on the rest; all resharded after forward
    fsdp2_compile   the same, after torch.compile on every block, as torchtitan does it
    simplefsdp      gathers as parametrizations, under torch.compile: see `simplefsdp`
    inductor        ddp under torch.compile: the whole model in as few graphs as it can
    deepspeed-1     DeepSpeed ZeRO-1 with torch's fused AdamW, buckets of its default sizes;
                    deepspeed-2 and deepspeed-3 alike
    fxzero-pipeline     stages of a pipeline, with fxzero's ZeRO inside
    pipelining          torch.distributed.pipelining, stages compiled
    pipelining-fsdp2    the same with FSDP2 inside, whose parameters stay gathered through a step,
                        as torchtitan does it; pipelining-reshard: gathered for each micro-batch
    alone           fxzero.compile_step in every process for itself: compute without transfers

All get the same weights and the same optimizer, so that only the way to train differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from examples.benchmarks.workload import Job
from examples.models import GPT

Step = Callable[[Tensor, Tensor], Tensor]


class Training(NamedTuple):
    """A model ready to train; `step(tokens, targets)` does all of it and returns the loss."""

    model: nn.Module
    optimizer: Optimizer
    step: Step


@dataclass(frozen=True)
class Contender:
    """One way to train the model."""

    build: Callable[[GPT, Job], Training]
    zero: int | None
    """ZeRO stage that it amounts to; None when the job says it."""
    imports: Sequence[str] = ()
    """Modules to load before memory is counted."""
    communicates: bool = True
    """Whether its ranks are one process group."""


def ordinary(model: nn.Module) -> Training:
    """Close the ordinary loop around a model: forward, backward, fused AdamW."""
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step)


def fxzero_compiled(model: GPT, job: Job) -> Training:
    """fxzero through its torch.compile door."""
    import fxzero  # the peers must run without it

    model = fxzero.shard(model, zero=job.zero)
    return ordinary(torch.compile(model, backend="fxzero", options=dict(job.fxzero_options)))


def fxzero_step(model: GPT, job: Job) -> Training:
    """fxzero through its other door: one graph from the batch to the update."""
    import fxzero

    model = fxzero.shard(model, zero=job.zero)
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    compiled = fxzero.compile_step(
        model,
        optimizer,
        micro_batches=job.micro_batches,
        options=dict(job.fxzero_options),
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        return compiled(tokens, targets).loss

    return Training(model, optimizer, step)


def deepspeed(stage: int) -> Callable[[GPT, Job], Training]:
    """DeepSpeed at a stage, with the same optimizer."""

    def build(model: GPT, job: Job) -> Training:
        import deepspeed

        optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
        config = {
            "train_micro_batch_size_per_gpu": job.workload.batch,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # what the others do
        }
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Training(engine, optimizer, step)

    return build


def simple_fsdp(model: GPT, job: Job) -> Training:
    """SimpleFSDP: one compiled graph whose collectives Inductor may reorder."""
    from examples.benchmarks.simplefsdp import shard_parameters

    model = shard_parameters(model, job.workload.device)
    options = {"reorder_for_compute_comm_overlap": True}
    return ordinary(torch.compile(model, fullgraph=True, options=options))


def fxzero_pipeline(model: GPT, job: Job) -> Training:
    """fxzero with stages of a pipeline, and a ZeRO stage inside of each."""
    from examples.benchmarks.pipelining import FxzeroPipeline

    step = FxzeroPipeline(model, job)
    return Training(step.module, step.optimizer, step)


def torch_pipeline(reshard: bool | None) -> Callable[[GPT, Job], Training]:
    """torch.distributed.pipelining, with FSDP2 inside unless `reshard` is None."""

    def build(model: GPT, job: Job) -> Training:
        from examples.benchmarks.pipelining import TorchPipeline

        step = TorchPipeline(model, job, reshard)
        return Training(step.module, step.optimizer, step)

    return build


def ddp(model: GPT, job: Job) -> Training:
    """DistributedDataParallel as it comes."""
    return ordinary(DistributedDataParallel(model))


def inductor(model: GPT, job: Job) -> Training:
    """DistributedDataParallel under torch.compile as it comes."""
    return ordinary(torch.compile(DistributedDataParallel(model)))


def fsdp2(model: GPT, job: Job) -> Training:
    """FSDP2, eager."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    return ordinary(fully_shard(model, reshard_after_forward=True))


def fsdp2_compile(model: GPT, job: Job) -> Training:
    """FSDP2 with each block compiled: its hooks then stay outside the graphs."""
    for block in model.blocks:
        block.compile()
    return fsdp2(model, job)


CONTENDERS = {
    "fxzero": Contender(fxzero_compiled, zero=None, imports=["fxzero", "fxzero.backend"]),
    "fxzero-step": Contender(fxzero_step, zero=None, imports=["fxzero", "fxzero.backend"]),
    **{
        f"deepspeed-{stage}": Contender(deepspeed(stage), zero=stage, imports=["deepspeed"])
        for stage in (1, 2, 3)
    },
    "alone": Contender(
        fxzero_step, zero=0, imports=["fxzero", "fxzero.backend"], communicates=False
    ),
    "fxzero-pipeline": Contender(fxzero_pipeline, zero=None, imports=["fxzero", "fxzero.backend"]),
    "pipelining": Contender(torch_pipeline(None), zero=0),
    "pipelining-fsdp2": Contender(torch_pipeline(False), zero=2),
    "pipelining-reshard": Contender(torch_pipeline(True), zero=3),
    "ddp": Contender(ddp, zero=0),
    "fsdp2": Contender(fsdp2, zero=3),
    "fsdp2_compile": Contender(fsdp2_compile, zero=3),
    "simplefsdp": Contender(simple_fsdp, zero=3),
    "inductor": Contender(inductor, zero=0),
}


LAZY_IMPORTS = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
    "sympy.physics.units",
)
"""What torch's optimizers and Inductor load when they first run."""


def build(job: Job) -> Training:
    """Build the model and hand it to the contender that the job names."""
    return CONTENDERS[job.contender].build(job.workload.build(), job)


def stage(job: Job) -> int:
    """Return the ZeRO stage that a job trains at."""
    own = CONTENDERS[job.contender].zero
    return job.zero if own is None else own


def load_imports(job: Job) -> None:
    """Load what the contender, or torch on its first step, would load lazily.

    torch's optimizers load Dynamo even in an eager run; without this, modules would count
    as training memory, and as compile time, for whoever triggers them.
    """
    for name in (*LAZY_IMPORTS, *CONTENDERS[job.contender].imports):
        importlib.import_module(name)
