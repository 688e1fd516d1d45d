"""What people do in a training loop besides a step, sharded against eager and unsharded.

In float64 on two ranks unless a test says otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import fxzero
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES, Batch, Example
from tests.parity.training import (
    RTOL,
    STEPS,
    Tensors,
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

FLOAT64 = torch.float64
TIGHT = RTOL[FLOAT64]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}

on_two_ranks = pytest.mark.parametrize("world", [2])
all_stages = pytest.mark.parametrize("zero", [0, 1, 2, 3])
first_and_last_stage = pytest.mark.parametrize("zero", [0, 3])


def compiled(name: str, zero: int, mesh: DeviceMesh | None = None, seed: int = 0) -> nn.Module:
    """An example in float64, sharded and compiled with eager regions."""
    model = fxzero.shard(build(EXAMPLES[name], FLOAT64, seed), zero=zero, mesh=mesh)
    return compile_eagerly(model)


def compile_eagerly(model: nn.Module) -> nn.Module:
    """Compile with fxzero's passes, but without a code generator behind them."""
    options = {"lower_regions": {"backend": "eager"}}
    return torch.compile(model, backend="fxzero", options=options)  # type: ignore[return-value]


def batches_of(example: Example, count: int) -> list[Batch]:
    """That many different batches over all ranks."""
    return [make_batch(example, FLOAT64, seed) for seed in range(count)]


def with_reference(name: str, zero: int) -> tuple[Example, nn.Module, nn.Module]:
    """An example, its compiled sharded model, and the same model for the reference."""
    return EXAMPLES[name], compiled(name, zero), build(EXAMPLES[name], FLOAT64)


# -- the parameters themselves


@pytest.mark.parametrize("world", [1, 2, 3])
@all_stages
def test_parameters_are_dtensors_of_rows(ranks: Pools, world: int, zero: int) -> None:
    """Stage 0 keeps plain tensors; above, every parameter is split by rows."""
    ranks(world).run(check_placements, zero)


def check_placements(zero: int) -> None:
    """Job."""
    before = build(EXAMPLES["odd_shapes"], FLOAT64)
    expected = full_parameters(before)
    model = fxzero.shard(before, zero=zero)
    assert model is before, "shard did not return the model it was given"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter), name
        assert isinstance(parameter, DTensor) == (zero > 0), f"{name} is a {type(parameter)}"
        if isinstance(parameter, DTensor):
            placement = Shard(0) if parameter.dim() else Replicate()
            assert parameter.placements == (placement,), f"{name}: {parameter.placements}"
            rows = sum(gather_objects(parameter.to_local().shape[:1].numel()))
            assert not parameter.dim() or rows == parameter.shape[0], f"{name}: {rows} rows"
    assert_same(full_parameters(model), expected, rtol=0)


def gather_objects(value: int) -> list[int]:
    """A number of each rank, on all ranks."""
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@on_two_ranks
@all_stages
def test_values_come_from_rank_0(ranks: Pools, world: int, zero: int) -> None:
    """Ranks that initialised differently start from the same model."""
    ranks(world).run(start_from_different_values, zero)


def start_from_different_values(zero: int) -> None:
    """Job."""
    example = EXAMPLES["convnet"]
    model = build(example, FLOAT64, seed=dist.get_rank())
    with torch.no_grad():
        model.get_buffer("1.running_mean").fill_(dist.get_rank() + 1)
    fxzero.shard(model, zero=zero)
    assert_same(full_parameters(model), full_parameters(build(example, FLOAT64)), rtol=0)
    assert_same(
        {"running_mean": model.get_buffer("1.running_mean")},
        {"running_mean": torch.ones(8, dtype=FLOAT64)},
        rtol=0,
    )


@on_two_ranks
@all_stages
@pytest.mark.parametrize("example", ["gpt", "convnet"])
def test_state_dict_keys_stay(ranks: Pools, world: int, example: str, zero: int) -> None:
    """Checkpoints, optimizer groups and `named_parameters` keep their names."""
    ranks(world).run(compare_names, example, zero)


def compare_names(name: str, zero: int) -> None:
    """Job."""
    model = build(EXAMPLES[name], FLOAT64)

    def names() -> list[list[str]]:
        named = (model.named_parameters(), model.named_buffers(), model.named_modules())
        return [list(model.state_dict()), *([key for key, _ in pairs] for pairs in named)]

    before, kind = names(), type(model)
    fxzero.shard(model, zero=zero)
    assert names() == before, f"{names()} where {before} is expected"
    assert isinstance(model, kind), f"a {kind} became a {type(model)}"
    model.load_state_dict(model.state_dict())
    assert names() == before, "load_state_dict changed the names"


@on_two_ranks
@all_stages
def test_meta_model_initialises_itself(ranks: Pools, world: int, zero: int) -> None:
    """From the meta device to the very values that a model built on the CPU has."""
    ranks(world).run(materialise, zero)


def materialise(zero: int) -> None:
    """Job: rank 1 has another seed, so that its values must come from rank 0."""
    example = EXAMPLES["convnet"]
    expected = build(example, torch.float32)
    with torch.device("meta"):
        model = example.build()
    torch.manual_seed(dist.get_rank())
    fxzero.shard(model, zero=zero)
    assert_same(full_parameters(model), full_parameters(expected), rtol=0)
    assert_same(dict(model.named_buffers()), dict(expected.named_buffers()), rtol=0)
    batch = rows_of_rank(make_batch(example, torch.float32, seed=0))
    example.loss(compile_eagerly(model), batch).backward()
    assert all(p.grad is not None for p in model.parameters()), "a parameter got no gradient"


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("example", ["gpt", "odd_shapes"])
def test_single_process_without_a_group(example: str, zero: int) -> None:
    """No launcher, no process group: plain parameters, the same numbers."""
    torch._dynamo.reset()
    model = compiled(example, zero)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    batches = batches_of(EXAMPLES[example], STEPS)
    loss = EXAMPLES[example].loss
    expected = train(build(EXAMPLES[example], FLOAT64), loss, batches)
    assert_same_trace(train(model, loss, batches), expected, TIGHT)


# -- optimizers and what sits between backward and step


@on_two_ranks
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
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
@all_stages
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


# -- more than one forward or backward to a step


@on_two_ranks
@all_stages
def test_gradient_accumulation(ranks: Pools, world: int, zero: int) -> None:
    """Three micro-batches add up in ``.grad``, twice, with a step and `zero_grad` between."""
    ranks(world).run(accumulate, zero)


def accumulate(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("gpt", zero)
    contexts = [nullcontext] * 3
    for step in range(2):
        compare_accumulation(example, model, reference, contexts, first_seed=3 * step)
        for each in (model, reference):
            take_step(each)


def compare_accumulation(
    example: Example,
    model: nn.Module,
    reference: nn.Module,
    contexts: list[Callable[[], AbstractContextManager[None]]],
    first_seed: int,
) -> None:
    """Run one micro-batch in each context, and compare the sums of gradients after the last."""
    for seed, context in enumerate(contexts, start=first_seed):
        batch = make_batch(example, FLOAT64, seed)
        example.loss(reference, batch).backward()
        with context():
            example.loss(model, rows_of_rank(batch)).backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


def take_step(model: nn.Module) -> None:
    """A step of plain descent, so that the next gradients are others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


@on_two_ranks
@all_stages
def test_forwards_before_a_backward(ranks: Pools, world: int, zero: int) -> None:
    """Two forwards alive at once, joined in one loss."""
    ranks(world).run(join_two_forwards, zero)


def join_two_forwards(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("gpt", zero)
    first, second = batches_of(example, 2)
    joined = [example.loss(model, rows_of_rank(batch)) for batch in (first, second)]
    (joined[0] * 3 + joined[1]).backward()
    (example.loss(reference, first) * 3 + example.loss(reference, second)).backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


@on_two_ranks
@all_stages
def test_backward_twice(ranks: Pools, world: int, zero: int) -> None:
    """With ``retain_graph=True`` nothing that the second backward needs may be gone."""
    ranks(world).run(go_back_twice, zero)


def go_back_twice(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("mlp", zero)
    batch = make_batch(example, FLOAT64, seed=0)
    for each, part in ((model, rows_of_rank(batch)), (reference, batch)):
        loss = example.loss(each, part)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


# -- no_sync


@on_two_ranks
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("compile_it", [True, False], ids=["compiled", "uncompiled"])
def test_no_sync(ranks: Pools, world: int, zero: int, compile_it: bool) -> None:
    """Two micro-batches without a reduction, one with it, twice."""
    ranks(world).run(accumulate_without_sync, zero, compile_it)


def accumulate_without_sync(zero: int, compile_it: bool) -> None:
    """Job."""
    example, model, reference = with_reference("gpt", zero)
    if not compile_it:
        model = inner(model)
    contexts = [lambda: fxzero.no_sync(model)] * 2 + [nullcontext]
    for step in range(2):
        compare_accumulation(example, model, reference, contexts, first_seed=3 * step)
        for each in (model, reference):
            take_step(each)


@on_two_ranks
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("kept_after", [0, 1])
def test_zero_grad_forgets_what_no_sync_kept(
    ranks: Pools, world: int, kept_after: int, zero: int
) -> None:
    """A micro-batch that is dropped before its reduction leaves nothing behind."""
    ranks(world).run(drop_a_micro_batch, kept_after, zero)


def drop_a_micro_batch(kept_after: int, zero: int) -> None:
    """Job: after the dropped one, `kept_after` micro-batches without a reduction and one with."""
    example, model, reference = with_reference("gpt", zero)
    dropped = rows_of_rank(make_batch(example, FLOAT64, seed=9))
    with fxzero.no_sync(model):
        example.loss(model, dropped).backward()
    adamw(model.parameters()).zero_grad()
    contexts = [lambda: fxzero.no_sync(model)] * kept_after + [nullcontext]
    compare_accumulation(example, model, reference, contexts, first_seed=0)


@on_two_ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_no_sync_follows_the_forward(ranks: Pools, world: int, zero: int) -> None:
    """A forward run inside keeps its gradient back even if its backward comes later."""
    ranks(world).run(leave_no_sync_before_backward, zero)


def leave_no_sync_before_backward(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("gpt", zero)
    first, second = batches_of(example, 2)
    with fxzero.no_sync(model):
        loss = example.loss(model, rows_of_rank(first))
    loss.backward()
    example.loss(model, rows_of_rank(second)).backward()
    for batch in (first, second):
        example.loss(reference, batch).backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


@on_two_ranks
@pytest.mark.parametrize("zero", [2, 3])
def test_no_sync_warns_where_it_has_no_effect(ranks: Pools, world: int, zero: int) -> None:
    """Stages 2 and 3 reduce every micro-batch: right gradients, and a warning that says so."""
    ranks(world).run(ask_for_no_sync_in_vain, zero)


def ask_for_no_sync_in_vain(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("gpt", zero)

    def no_sync() -> AbstractContextManager[None]:
        return fxzero.no_sync(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fxzero.FxZeroWarning)
        compare_accumulation(example, model, reference, [no_sync, no_sync, nullcontext], 0)
    ours = [w for w in caught if issubclass(w.category, fxzero.FxZeroWarning)]
    assert ours, "no FxZeroWarning"
    assert "no_sync" in str(ours[0].message), ours[0].message


# -- checkpoints


@on_two_ranks
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("example", ["gpt", "mlp"])
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
@first_and_last_stage
@pytest.mark.parametrize(
    ("example", "mode"), [("mlp", "no_grad"), ("mlp", "inference_mode"), ("convnet", "no_grad")]
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
@pytest.mark.parametrize("zero", [1, 3])
def test_batch_sizes_that_change(ranks: Pools, world: int, zero: int) -> None:
    """4, 6, then 2 rows per rank: Dynamo makes the batch dimension symbolic."""
    ranks(world).run(train_on_sizes, zero, (4, 6, 2))


def train_on_sizes(zero: int, rows_per_rank: tuple[int, ...]) -> None:
    """Job."""
    example, model, reference = with_reference("gpt", zero)
    for seed, rows in enumerate(rows_per_rank):
        batch = make_batch(example, FLOAT64, seed, rows=rows * dist.get_world_size())
        example.loss(model, rows_of_rank(batch)).backward()
        example.loss(reference, batch).backward()
        assert_same(full_gradients(model), full_gradients(reference), TIGHT)
        for each in (model, reference):
            take_step(each)


@on_two_ranks
@all_stages
@pytest.mark.parametrize("example", ["gpt", "odd_shapes", "lstm"])
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
@pytest.mark.parametrize("example", ["gpt", "odd_shapes"])
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
@all_stages
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


# -- meshes


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize(
    ("example", "zero"),
    [("gpt", 1), ("gpt", 3), ("odd_shapes", 0), ("odd_shapes", 2), ("odd_shapes", 3)],
)
def test_two_axis_mesh(ranks: Pools, world: int, example: str, zero: int) -> None:
    """Sharded inside pairs, replicated across them."""
    ranks(world).run(train_on_grid, example, zero)


def train_on_grid(name: str, zero: int) -> None:
    """Job."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    example = EXAMPLES[name]
    batches = batches_of(example, STEPS)
    model = compiled(name, zero, mesh)
    for key, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            expected_placements = (Replicate(), Shard(0) if parameter.dim() else Replicate())
            assert parameter.placements == expected_placements, f"{key}: {parameter.placements}"
    expected = train(build(example, FLOAT64), example.loss, batches)
    assert_same_trace(train(model, example.loss, map(rows_of_rank, batches)), expected, TIGHT)


# -- errors


@on_two_ranks
@pytest.mark.parametrize(
    "mistake",
    [
        "shard_twice",
        "shard_part_of_a_sharded_model",
        "non_leaf_parameter",
        "mesh_without_all_ranks",
        "no_such_stage",
        "meta_without_reset_parameters",
        "foreign_ignored",
    ],
)
def test_shard_refuses(ranks: Pools, world: int, mistake: str) -> None:
    """A mistake is an `FxZeroError` and a `ValueError`, and the model is as it was."""
    ranks(world).run(make_mistake, mistake)


def make_mistake(mistake: str) -> None:
    """Job."""
    model = build(EXAMPLES["mlp"], FLOAT64)
    action: Callable[[], object] = {
        "shard_twice": lambda: fxzero.shard(model, zero=3),
        "shard_part_of_a_sharded_model": lambda: fxzero.shard(model[0], zero=3),  # type: ignore[index]
        "non_leaf_parameter": lambda: fxzero.shard(model, zero=3),
        "mesh_without_all_ranks": lambda: fxzero.shard(model, 3, mesh=DeviceMesh("cpu", [0])),
        "no_such_stage": lambda: fxzero.shard(model, zero=4),
        "meta_without_reset_parameters": lambda: fxzero.shard(model, zero=3),
        "foreign_ignored": lambda: fxzero.shard(model, zero=3, ignored=[nn.Parameter(Tensor(2))]),
    }[mistake]
    if mistake.startswith("shard_"):
        fxzero.shard(model, zero=3)
    if mistake == "non_leaf_parameter":
        model[2]._parameters["weight"] = model[2].weight * 2  # type: ignore[index]
    if mistake == "meta_without_reset_parameters":
        with torch.device("meta"):
            model = EXAMPLES["odd_shapes"].build()
    before = snapshot(model)
    error = error_of(action)
    assert isinstance(error, fxzero.FxZeroError), f"{type(error)}: {error}"
    assert isinstance(error, ValueError), f"{type(error)} is no ValueError"
    assert_untouched(model, before)


Snapshot = list[tuple[str, type, object, Tensors | None]]


def snapshot(model: nn.Module) -> Snapshot:
    """Each module with its class, its own parameters and attributes, and their values."""
    return [
        (
            path,
            type(module),
            dict(module.__dict__) | {"p": dict(module._parameters)},
            values(module),
        )
        for path, module in model.named_modules()
    ]


def values(module: nn.Module) -> Tensors | None:
    """Copies of what a module holds itself; None where it has no memory."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    return None if any(p.is_meta for p in own.values()) else {n: full(p) for n, p in own.items()}


def assert_untouched(model: nn.Module, before: Snapshot) -> None:
    """The same objects in the same places, with the same values."""
    for (path, kind, attributes, held), now in zip(before, snapshot(model), strict=True):
        assert (now[0], now[1]) == (path, kind), f"{path} became {now[:2]}"
        assert isinstance(attributes, dict)
        assert isinstance(now[2], dict)
        same = attributes.keys() == now[2].keys() and all(
            attributes["p"][name] is p for name, p in now[2]["p"].items()
        )
        assert same, f"{path} was changed: {now[2].keys() ^ attributes.keys()}"
        assert (held is None) == (now[3] is None), path
        if held is not None and now[3] is not None:
            assert_same(now[3], held, rtol=0)


def error_of(action: Callable[[], object]) -> BaseException | None:
    """What an action raises; None if it raises nothing."""
    try:
        action()
    except Exception as error:
        return error
    return None


@on_two_ranks
@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"lower_region": {}}, "lower_regions"),
        ({"lower_regions": {"backnd": "eager"}}, "backend"),
    ],
)
def test_unknown_options_name_the_nearest(
    ranks: Pools, world: int, options: dict[str, object], hint: str
) -> None:
    """A typing error is an error, and the message has the right word."""
    ranks(world).run(misspell, options, hint)


def misspell(options: dict[str, object], hint: str) -> None:
    """Job: the error comes from torch.compile or from the first call; then the model trains."""
    example = EXAMPLES["mlp"]
    model = fxzero.shard(build(example, FLOAT64), zero=1)
    batch = make_batch(example, FLOAT64, seed=0)
    error = error_of(
        lambda: example.loss(
            torch.compile(model, backend="fxzero", options=options),  # type: ignore[arg-type]
            rows_of_rank(batch),
        )
    )
    assert isinstance(error, fxzero.FxZeroError), f"{type(error)}: {error}"
    assert isinstance(error, ValueError), f"{type(error)} is no ValueError"
    assert repr(hint) in str(error), error
    reference = build(example, FLOAT64)
    example.loss(reference, batch).backward()
    example.loss(compile_eagerly(model), rows_of_rank(batch)).backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


def inner(model: nn.Module) -> nn.Module:
    """The model that torch.compile wrapped."""
    return getattr(model, "_orig_mod", model)
