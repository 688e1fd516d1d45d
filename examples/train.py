"""Train a small GPT on bytes, its parameters sharded over the processes.

    torchrun --standalone --nproc-per-node 2 examples/train.py
    python examples/train.py -m ranks=2 zero=0,1,2,3
    torchrun --standalone --nproc-per-node 2 examples/train.py \
        mesh=pipeline2 schedule=1f1b trainer.micro_batches=4
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train.py \
        checkpoint.dir=checkpoints checkpoint.every=50
    torchrun --standalone --nproc-per-node 2 examples/train.py deepspeed=ds_config.json
    python examples/train.py data=text data.path=book.txt model=gpt_lite optimizer.lr=6e-4

Two lines are fxzero's: `fxzero.shard`, and `fxzero.compile_step` or ``backend="fxzero"``.
Settings are in `examples/conf/` and `conf/fxzero/`, logs go to `outputs/`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `examples` lies

import fxzero
from examples.checkpoints import BegunWith, folder_of_job, open_checkpoints
from examples.data import Batches, file_text, split, stdlib_text
from examples.deepspeed_json import by_deepspeed, decided
from examples.failures import FAILED, SettingsError
from examples.logs import RunLog, StepLog, open_log
from examples.meshes import check_ranks, make_mesh, reader, whole_state
from examples.models import GPT
from examples.ranks import (
    Stopped,
    from_rank_0,
    launch,
    mean_over_ranks,
    rank,
    ranks_to_train,
    run_on_all_ranks,
    set_threads,
    under_torchrun,
    world_size,
)
from examples.settings import DataSettings, Settings, Step, TrainerSettings
from examples.sweeps import Result, in_sweep, launch_job, quoted, recorded

T = TypeVar("T")


def train(settings: Settings, output: Path) -> float:
    """Train one model, on every rank; returns its last validation loss."""
    trainer = settings.trainer
    set_threads(trainer.threads)
    torch.manual_seed(trainer.seed)

    deepspeed = by_deepspeed(settings)
    with torch.device("meta"):
        model = instantiate(settings.model)
    model = fxzero.shard(
        model,
        zero=settings.zero,
        mesh=make_mesh(settings.mesh),
        param_dtype=settings.precision.param_dtype.value,
        reduce_dtype=settings.precision.reduce_dtype.value,
        offload=deepspeed is not None and deepspeed.offload,
        **in_stages(model, settings),
    )
    torch.manual_seed(trainer.seed + rank())  # ranks start alike and drop out differently

    optimizer = make_optimizer(model, settings)
    schedule = make_schedule(optimizer, settings)
    run_step = make_step(model, optimizer, schedule, settings)
    begun_with = BegunWith(settings)
    state = (
        fxzero.TrainState(run_step, settings=begun_with)
        if isinstance(run_step, fxzero.TrainStep)
        else fxzero.TrainState(model, optimizer, scheduler=schedule, settings=begun_with)
    )
    train_batches, val_batches = make_batches(settings, model.config.block_size)

    with (
        open_log(output, trainer.steps, settings, trainer.wandb) as log,
        open_checkpoints(state, begun_with, settings.checkpoint, log) as checkpoints,
    ):
        trained = checkpoints.resume(settings.resume)
        steps = StepLog(
            log,
            model,
            every=trainer.log_every,
            step=trained,
            samples_per_step=trainer.batch_size,
            tokens_per_step=trainer.batch_size * model.config.block_size,
        )
        if trainer.compile and trained < trainer.steps:
            log.say("compiling the step: about a minute, and less when caches on disk are warm")
        for step in range(trained + 1, trainer.steps + 1):
            done = run_step(*to_device(train_batches[step], model))
            steps.after(step, done.loss, done.learning_rate, done.grad_norm)
            if step % trainer.val_every == 0 and step < trainer.steps:
                (val_loss,) = evaluate(model, [val_batches], settings)
                log.record(step, val_loss=val_loss)
                log.say(f"after {step} steps: validation loss {val_loss:.3f}")
                steps.meter.restart(step)
            if checkpoints.after_step(step):
                raise Stopped

        checkpoints.finish(max(trained, trainer.steps))
        return finish(model, train_batches, val_batches, settings, log)


def in_stages(model: GPT, settings: Settings) -> dict[str, Any]:
    """What `fxzero.shard` has to know to cut a model into the stages of a pipeline."""
    if settings.mesh.pipeline == 1:
        return {}
    trainer = settings.trainer
    _, readers = reader(settings.mesh, world_size())
    rows = trainer.batch_size // readers // trainer.micro_batches
    inputs = model.example_inputs(rows)
    return {"example_inputs": inputs, "schedule": settings.schedule or "1f1b"}


def make_step(
    model: GPT, optimizer: Optimizer, schedule: LRScheduler, settings: Settings
) -> Callable[[Tensor, Tensor], fxzero.StepOutput]:
    """One training step, as a function of tokens and targets."""
    trainer, deepspeed = settings.trainer, by_deepspeed(settings)
    if trainer.step is Step.compiled:
        return fxzero.compile_step(
            model,
            optimizer,
            micro_batches=trainer.micro_batches,
            clip_grad_norm=trainer.clip_grad_norm,
            precision=None if deepspeed is None else deepspeed.precision,
            scheduler=schedule,
            options=settings.compiler(),
        )
    return ordinary_step(model, optimizer, schedule, settings)


def ordinary_step(
    model: GPT, optimizer: Optimizer, schedule: LRScheduler, settings: Settings
) -> Callable[[Tensor, Tensor], fxzero.StepOutput]:
    """The loop that everybody writes, around a compiled model."""
    trainer = settings.trainer
    # `compiled` has the parameters of `model`, which stays as it is for what is done
    # rarely: validation and sampling.
    compiled = model
    if trainer.compile:
        compiled = torch.compile(model, backend="fxzero", options=settings.fxzero)

    def run(tokens: Tensor, targets: Tensor) -> fxzero.StepOutput:
        count = trainer.micro_batches
        parts = zip(tokens.chunk(count), targets.chunk(count), strict=True)
        losses = []
        for i, part in enumerate(parts, start=1):
            last = i == trainer.micro_batches
            with nullcontext() if last or settings.zero > 1 else fxzero.no_sync(model):
                loss = compiled(*part)
            (loss / trainer.micro_batches).backward()
            losses.append(loss.detach())
        grad_norm = None
        if trainer.clip_grad_norm is not None:
            grad_norm = clip_grad_norm_(model.parameters(), trainer.clip_grad_norm)
        rates = tuple(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return fxzero.StepOutput(torch.stack(losses).mean(), grad_norm, rates, skipped=False)

    return run


def finish(
    model: GPT,
    train_batches: Batches,
    val_batches: Batches,
    settings: Settings,
    log: RunLog,
) -> float:
    """Final losses on both parts of the text, and a sample."""
    trainer = settings.trainer
    train_loss, val_loss = evaluate(model, [train_batches, val_batches], settings)
    log.record(trainer.steps, final_train_loss=train_loss, final_val_loss=val_loss)
    if trainer.sample_length:
        whole = full_copy(model, settings)
        if whole is not None:
            log.sample(sample(whole, trainer.sample_length, trainer.seed))
    folder = os.path.relpath(log.output)
    log.say(f"final loss: train {train_loss:.3f}, validation {val_loss:.3f}; logs in {folder}")
    return val_loss


def make_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """The optimizer that the settings name: matrices decay, biases and norms do not. Or that of
    DeepSpeed's JSON, under which all parameters are alike."""
    deepspeed = by_deepspeed(settings)
    if deepspeed is not None and deepspeed.make_optimizer is not None:
        return deepspeed.make_optimizer(model.parameters())
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return instantiate(settings.optimizer, _partial_=True)(groups)


def make_schedule(optimizer: Optimizer, settings: Settings) -> LRScheduler:
    """A learning rate that rises in a line, then falls as a cosine; or DeepSpeed's."""
    trainer, deepspeed = settings.trainer, by_deepspeed(settings)
    if deepspeed is not None:
        made = deepspeed.make_scheduler
        return LambdaLR(optimizer, lambda step: 1.0) if made is None else made(optimizer)

    def factor(step: int) -> float:
        if step < trainer.warmup_steps:
            return (step + 1) / trainer.warmup_steps
        done = (step - trainer.warmup_steps) / max(trainer.steps - trainer.warmup_steps, 1)
        cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return trainer.min_lr_ratio + (1 - trainer.min_lr_ratio) * cosine

    return LambdaLR(optimizer, factor)


def make_batches(settings: Settings, block_size: int) -> tuple[Batches, Batches]:
    """This rank's batches to train and to validate on."""
    part, parts = reader(settings.mesh, world_size())
    return text_batches(settings.data, settings.trainer, block_size, part, parts)


def text_batches(
    data: DataSettings, trainer: TrainerSettings, block_size: int, rank: int, num_ranks: int
) -> tuple[Batches, Batches]:
    """A rank's batches to train and to validate on."""
    text = file_text(data.path, data.max_bytes) if data.path else stdlib_text(data.max_bytes)
    train_batches, val_batches = (
        Batches(part, block_size, trainer.batch_size, trainer.seed, rank, num_ranks)
        for part in split(text, data.val_fraction)
    )
    return train_batches, val_batches


def evaluate(model: GPT, parts: Sequence[Batches], settings: Settings) -> list[float]:
    """The mean loss over the first batches of each part, the same on every rank. A collective call.

    Stages of a pipeline compute by whole steps alone: there rank 0 evaluates a copy of the model.
    """
    if settings.mesh.pipeline == 1:
        return [mean_over_ranks(mean_loss(model, part, settings)) for part in parts]
    whole = full_copy(model, settings)
    losses = torch.zeros(len(parts))
    if whole is not None:
        rows = [replace(part, rank=0, world_size=1) for part in parts]
        losses = torch.stack([mean_loss(whole, part, settings).cpu() for part in rows])
    return from_rank_0(losses).tolist()


@torch.no_grad()
def mean_loss(model: GPT, batches: Batches, settings: Settings) -> Tensor:
    """The mean loss over this rank's rows of the first batches: 0-d."""
    model.eval()
    count = settings.trainer.val_batches
    losses = [model(*to_device(batches[i], model)) for i in range(count)]
    model.train()
    return torch.stack(losses).mean()


def full_copy(model: GPT, settings: Settings) -> GPT | None:
    """The whole model on rank 0, None on the others. A collective call.

    A sharded model would gather every layer again for every token. Where a copy does not fit on
    one rank, set trainer.sample_length=0.
    """
    whole = whole_state(model)
    if rank():
        return None
    with torch.device("meta"):
        copy = instantiate(settings.model)
    copy.load_state_dict(whole, assign=True)
    return copy


def sample(model: GPT, num_bytes: int, seed: int) -> str:
    """Text that the model writes after a line break."""
    device = next(model.parameters()).device
    prompt = torch.tensor([list(b"\n")], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    tokens = model.generate(prompt, num_bytes, generator=generator)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def to_device(batch: tuple[Tensor, Tensor], model: nn.Module) -> tuple[Tensor, Tensor]:
    """Bring tokens and targets to where the model is."""
    device = next(model.parameters()).device
    tokens, targets = batch
    return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def check(settings: Settings, num_ranks: int) -> None:
    """Make everything once on rank 0, without memory, so that no rank starts on what cannot hold.

    Raises:
        SettingsError: rows that the ranks or micro-batches cannot share, a text that is too short
            or not there, a model or optimizer that does not take its settings.
    """
    trainer = settings.trainer
    with torch.device("meta"):
        model = made("model", lambda: instantiate(settings.model))
    if not isinstance(model, GPT):
        raise SettingsError(f"model._target_ made a {type(model).__name__}; this trains a GPT")
    if model.config.vocab_size < 256:
        raise SettingsError(
            f"model.vocab_size={model.config.vocab_size}: the text is read as bytes, of which "
            "there are 256"
        )
    for name, value in settings.optimizer.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"optimizer.{name}={value} must be a finite number")
        if name == "betas" and (not isinstance(value, list) or len(value) != 2):
            raise SettingsError(f"optimizer.betas={value} must be two numbers: [0.9, 0.95]")
    optimizer = made("optimizer", lambda: make_optimizer(model, settings))
    if not isinstance(optimizer, Optimizer):
        raise SettingsError(f"optimizer._target_ made a {type(optimizer).__name__}, no optimizer")
    check_ranks(settings.mesh, num_ranks)
    _, readers = reader(settings.mesh, num_ranks)
    text_batches(settings.data, trainer, model.config.block_size, 0, readers)
    rows = trainer.batch_size // readers
    if rows % trainer.micro_batches:
        raise SettingsError(
            f"trainer.micro_batches={trainer.micro_batches} does not divide the {rows} rows of "
            f"each rank: trainer.batch_size={trainer.batch_size} over {readers} "
            + ("ranks" if settings.mesh.pipeline == 1 else "pipelines")
        )


def made(group: str, make: Callable[[], T]) -> T:
    """What Hydra makes of a group of settings.

    Raises:
        SettingsError: it does not take them; with its own words.
    """
    try:
        return make()
    except Exception as error:
        reason = error
        while isinstance(reason, HydraException) and reason.__cause__ is not None:
            assert isinstance(reason.__cause__, Exception)
            reason = reason.__cause__
        text = " ".join(str(reason).split()).partition("full_key:")[0].strip()
        raise SettingsError(f"{group}: {type(reason).__name__}: {text}") from None


def prepared(cfg: DictConfig) -> Settings:
    """Check what Hydra composed, for as many ranks as will train it."""
    settings = Settings.of(cfg)
    settings = decided(settings, HydraConfig.get().overrides.task)
    settings.checkpoint = folder_of_job(settings.checkpoint)
    if under_torchrun() and settings.ranks not in (None, world_size()):
        raise SettingsError(
            f"ranks={settings.ranks} starts ranks, and torchrun has started {world_size()}: leave "
            "out one of both"
        )
    check(settings, ranks_to_train(settings.ranks))
    return settings


def job_of_sweep(cfg: DictConfig) -> Result:
    """Have ranks of its own train one job."""
    settings = prepared(cfg)
    folder = settings.checkpoint.dir
    return launch_job(settings.ranks or 1, [f"checkpoint.dir={quoted(folder)}"] if folder else [])


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """What Hydra calls, on rank 0, for each job of the command line."""
    if in_sweep() and under_torchrun():
        raise SettingsError(
            "a sweep starts the ranks of each of its jobs: python examples/train.py -m "
            f"ranks={world_size()} … instead of torchrun"
        )
    if in_sweep():
        return recorded(lambda: job_of_sweep(cfg))
    settings = prepared(cfg)
    if settings.ranks is not None and not under_torchrun():
        result = launch_job(settings.ranks)
        if result.reason:
            raise SystemExit(FAILED)
        return result.objective
    return run_on_all_ranks(train, settings, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    launch(main, train)
