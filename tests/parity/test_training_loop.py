"""What people do in a training loop besides a step, sharded against eager and unsharded.

In float64 on two ranks unless a test says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import fxzero
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES, Batch, Example
from tests.parity.sharded import (
    FLOAT64,
    TIGHT,
    batches_of,
    compile_eagerly,
    compiled,
    ends_in_every_run,
    first_and_last_stage,
    inner,
    on_two_ranks,
    take_step,
    with_reference,
)
from tests.parity.training import (
    STEPS,
    adamw,
    assert_same,
    assert_same_trace,
    build,
    full,
    full_gradients,
    full_parameters,
    make_batch,
    rows_of_rank,
    train,
)
from tests.tiers import exhaustive, in_two_tiers
from tests.tracing import observed

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


# -- optimizers and what sits between backward and step


@on_two_ranks
@pytest.mark.parametrize(
    ("optimizer", "zero"), in_two_tiers([*itertools.product(OPTIMIZERS, (1, 3))])
)
def test_optimizers(ranks: Pools, world: int, optimizer: str, zero: int) -> None:
    """Batched implementations, on shards without rows and 0-d parameters too."""
    ranks(world).run(train_with_optimizer, optimizer, zero)


def train_with_optimizer(optimizer: str, zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("odd_shapes", zero)
    batches = batches_of(example, STEPS)
    expected = train(reference, example.loss, batches, OPTIMIZERS[optimizer])
    actual = train(model, example.loss, map(rows_of_rank, batches), OPTIMIZERS[optimizer])
    assert_same_trace(actual, expected, TIGHT)


@on_two_ranks
@ends_in_every_run
def test_clip_grad_norm(ranks: Pools, world: int, zero: int) -> None:
    """The norm is over all ranks, and so is what it scales."""
    ranks(world).run(clip, zero)


def clip(zero: int) -> None:
    """Job: twice, once with a norm that does not cut and once with one that does."""
    example, model, reference = with_reference("odd_shapes", zero)
    batch = make_batch(example, FLOAT64, seed=0)
    example.loss(model, rows_of_rank(batch)).backward()
    example.loss(reference, batch).backward()
    for max_norm in (100.0, 0.05):
        norm = clip_grad_norm_(model.parameters(), max_norm)
        expected = clip_grad_norm_(reference.parameters(), max_norm)
        assert expected > 0.05, "the gradients are too small to be cut"
        assert_same({"norm": full(norm)}, {"norm": expected}, TIGHT)
        assert_same(full_gradients(model), full_gradients(reference), TIGHT)


@on_two_ranks
@first_and_last_stage
def test_learning_rate_schedule(ranks: Pools, world: int, zero: int) -> None:
    """A scheduler that changes both the learning rate and a beta at every step."""
    ranks(world).run(train_on_schedule, zero)


def train_on_schedule(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("mlp", zero)
    batches = batches_of(example, STEPS)
    follow_schedule(reference, example, batches)
    follow_schedule(model, example, [rows_of_rank(batch) for batch in batches])
    assert_same(full_parameters(inner(model)), full_parameters(reference), TIGHT)


def follow_schedule(model: nn.Module, example: Example, batches: list[Batch]) -> None:
    """One cycle over the batches."""
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
    for batch in batches:
        example.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


# -- checkpoints


@on_two_ranks
@pytest.mark.parametrize(
    ("example", "zero"), [("mlp", 1), ("mlp", 3), *exhaustive(("gpt", 1), ("gpt", 3))]
)
def test_checkpoint_round_trip(
    ranks: Pools, world: int, example: str, zero: int, tmp_path: object
) -> None:
    """Training that stops and goes on elsewhere ends on the same bits."""
    ranks(world).run(save_and_resume, example, zero, str(tmp_path))


def save_and_resume(name: str, zero: int, folder: str) -> None:
    """Job: three steps, save, two more; a model with other values loads and does those two."""
    example = EXAMPLES[name]
    batches = [rows_of_rank(batch) for batch in batches_of(example, STEPS)]
    model = compiled(name, zero)
    optimizer = adamw(model.parameters())
    run_steps(model, optimizer, example, batches[:3])
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    run_steps(model, optimizer, example, batches[3:])

    resumed = compiled(name, zero, seed=7)
    optimizer = adamw(resumed.parameters())
    loaded = dict(zip(("model", "optimizer"), get_state_dict(resumed, optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        resumed,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    run_steps(resumed, optimizer, example, batches[3:])
    assert_same(full_parameters(resumed), full_parameters(model), rtol=0)


def run_steps(
    model: nn.Module, optimizer: Optimizer, example: Example, batches: list[Batch]
) -> None:
    """Steps of an optimizer that lives on."""
    for batch in batches:
        example.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- forwards of other kinds


@on_two_ranks
@pytest.mark.parametrize(
    ("example", "mode", "zero"),
    in_two_tiers(
        [
            *itertools.product(["mlp"], ["no_grad", "inference_mode"], [0, 3]),
            *itertools.product(["convnet"], ["no_grad"], [0, 3]),
        ],
        always=[("convnet", "no_grad", 3)],
    ),
)
def test_inference(ranks: Pools, world: int, example: str, mode: str, zero: int) -> None:
    """Evaluation between training steps, and training after it."""
    ranks(world).run(evaluate_between_steps, example, mode, zero)


def evaluate_between_steps(name: str, mode: str, zero: int) -> None:
    """Job: the convnet's statistics are those of a rank, so all ranks see the whole batch."""
    example, model, reference = with_reference(name, zero)
    batch = make_batch(example, FLOAT64, seed=0)
    for _ in range(2):
        for each in (model, reference):
            each.train()
            example.loss(each, batch).backward()
            each.eval()
        with getattr(torch, mode)():
            actual, expected = (example.loss(each, batch) for each in (model, reference))
        assert not actual.requires_grad, "an output of inference asks for gradients"
        assert_same({"loss": full(actual)}, {"loss": full(expected)}, TIGHT)
        assert_same(full_gradients(model), full_gradients(reference), TIGHT)
        for each in (model, reference):
            take_step(each)


@on_two_ranks
@pytest.mark.parametrize(("name", "zero"), [("mlp", 3), *exhaustive(("gpt", 3), ("gpt", 1))])
def test_batch_sizes_that_change(ranks: Pools, world: int, name: str, zero: int) -> None:
    """Ten sizes: one graph for the first, and one whose batch dimension is symbolic."""
    sizes = (4, 6, 2, 3, 5, 7, 8, 9, 10, 11)
    assert ranks(world).run(train_on_sizes, name, zero, sizes) == [2] * world


def train_on_sizes(name: str, zero: int, rows_per_rank: tuple[int, ...]) -> int:
    """Job: how many graphs were compiled."""
    example, model, reference = with_reference(name, zero)
    graphs: list[object] = []
    with observed(graphs.append):
        for seed, rows in enumerate(rows_per_rank):
            batch = make_batch(example, FLOAT64, seed, rows=rows * dist.get_world_size())
            example.loss(model, rows_of_rank(batch)).backward()
            example.loss(reference, batch).backward()
            assert_same(full_gradients(model), full_gradients(reference), TIGHT)
            for each in (model, reference):
                take_step(each)
    return len(graphs)


@on_two_ranks
@pytest.mark.parametrize(
    ("example", "zero"),
    in_two_tiers(
        [*itertools.product(["gpt", "odd_shapes", "lstm"], range(4))],
        always=[("odd_shapes", 3)],
    ),
)
def test_uncompiled(ranks: Pools, world: int, example: str, zero: int) -> None:
    """A sharded model works without torch.compile, for a debugger or a first try."""
    ranks(world).run(train_uncompiled, example, zero)


def train_uncompiled(name: str, zero: int) -> None:
    """Job."""
    example = EXAMPLES[name]
    batches = batches_of(example, STEPS)
    expected = train(build(example, FLOAT64), example.loss, batches)
    model = fxzero.shard(build(example, FLOAT64), zero=zero)
    assert_same_trace(train(model, example.loss, map(rows_of_rank, batches)), expected, TIGHT)


# -- models that were not sharded


@on_two_ranks
@pytest.mark.parametrize("example", ["odd_shapes", *exhaustive("gpt")])
def test_model_that_was_not_sharded(ranks: Pools, world: int, example: str) -> None:
    """The backend alone is data parallelism: plain parameters, reduced gradients."""
    ranks(world).run(train_plain, example)


def train_plain(name: str) -> None:
    """Job."""
    example = EXAMPLES[name]
    batches = batches_of(example, STEPS)
    expected = train(build(example, FLOAT64), example.loss, batches)
    model = compile_eagerly(build(example, FLOAT64))
    assert_same_trace(train(model, example.loss, map(rows_of_rank, batches)), expected, TIGHT)


@on_two_ranks
def test_two_models_that_were_not_sharded(ranks: Pools, world: int) -> None:
    """Parameters of equal names in two models, as a generator and a critic have."""
    ranks(world).run(train_two_plain)


def train_two_plain() -> None:
    """Job: equal names, other values and (between the examples) other shapes."""
    chosen = [(EXAMPLES["mlp"], 1), (EXAMPLES["mlp"], 2), (EXAMPLES["frozen"], 3)]
    references = [build(example, FLOAT64, seed) for example, seed in chosen]
    models = [compile_eagerly(build(example, FLOAT64, seed)) for example, seed in chosen]
    for _ in range(2):
        for (example, seed), model, reference in zip(chosen, models, references, strict=True):
            batch = make_batch(example, FLOAT64, seed)
            example.loss(model, rows_of_rank(batch)).backward()
            example.loss(reference, batch).backward()
            assert_same(full_gradients(model), full_gradients(reference), TIGHT)
            take_step(model)
            take_step(reference)


@on_two_ranks
@ends_in_every_run
def test_two_sharded_models(ranks: Pools, world: int, zero: int) -> None:
    """Two sharded models of equal names, whose steps alternate."""
    ranks(world).run(train_two_sharded, zero)


def train_two_sharded(zero: int) -> None:
    """Job: one output is the other's input, so that both are in one backward."""
    example = EXAMPLES["mlp"]
    models, references = (
        [make(seed) for seed in (1, 2)]
        for make in (
            lambda seed: compiled("mlp", zero, seed=seed),
            lambda seed: build(example, FLOAT64, seed),
        )
    )
    batch = make_batch(example, FLOAT64, seed=0)
    for pair, part in ((models, rows_of_rank(batch)), (references, batch)):
        first = pair[0](part["x"]).repeat(1, 2)
        example.loss(pair[1], {**part, "x": first}).backward()
    for model, reference in zip(models, references, strict=True):
        assert_same(full_gradients(model), full_gradients(reference), TIGHT)
