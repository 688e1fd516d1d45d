"""What `fxzero.shard` does to a model: parameters, names, values, meshes, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fxzero
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES
from tests.parity.sharded import (
    FLOAT64,
    TIGHT,
    all_stages,
    batches_of,
    compile_eagerly,
    compiled,
    on_two_ranks,
)
from tests.parity.training import (
    STEPS,
    Tensors,
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
from tests.tiers import exhaustive

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


# -- meshes


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize(
    ("example", "zero"),
    [
        ("odd_shapes", 3),
        *exhaustive(("odd_shapes", 0), ("odd_shapes", 2), ("gpt", 1), ("gpt", 3)),
    ],
)
def test_two_axis_mesh(ranks: Pools, world: int, example: str, zero: int) -> None:
    """Sharded inside pairs, replicated across them."""
    ranks(world).run(train_on_grid, example, zero, True)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("zero", [0, 3])
def test_two_axis_mesh_uncompiled(ranks: Pools, world: int, zero: int) -> None:
    """Eager gradients are averaged over both axes too."""
    ranks(world).run(train_on_grid, "odd_shapes", zero, False)


def train_on_grid(name: str, zero: int, compile_it: bool) -> None:
    """Job."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    example = EXAMPLES[name]
    batches = batches_of(example, STEPS)
    model = fxzero.shard(build(example, FLOAT64), zero=zero, mesh=mesh)
    model = compile_eagerly(model) if compile_it else model
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


# -- what touches parameters without training them


@on_two_ranks
@all_stages
def test_printing_on_one_rank(ranks: Pools, world: int, zero: int) -> None:
    """``if rank == 0: print(model)`` must not wait for the other ranks."""
    ranks(world).run(print_on_rank_0, zero)


def print_on_rank_0(zero: int) -> None:
    """Job."""
    model = fxzero.shard(build(EXAMPLES["mlp"], FLOAT64), zero=zero)
    if dist.get_rank() == 0:
        assert "bias=True" in repr(model)


class Teacher(nn.Module):
    """A model with trainable parameters that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4)
        self.student = nn.Linear(4, 4)
        self.dropped = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) → scalar."""
        with torch.no_grad():
            wanted = self.teacher(x)
        self.dropped(x)
        return (self.student(x) - wanted).square().sum()


@on_two_ranks
@all_stages
def test_parameters_without_gradient_have_none(ranks: Pools, world: int, zero: int) -> None:
    """Zeros instead of None would let weight decay move them."""
    ranks(world).run(look_for_gradients, zero)


def look_for_gradients(zero: int) -> None:
    """Job."""
    torch.manual_seed(0)
    model = fxzero.shard(Teacher(), zero=zero)
    options = {"lower_regions": {"backend": "eager"}}
    torch.compile(model, backend="fxzero", options=options)(torch.randn(3, 4)).backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {"student.weight", "student.bias"}
