"""Any number of ranks in one process, without memory."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero import CaptureError, ConfigError
from fxzero.compiler.compilation import Compilation, observers
from fxzero.compiler.config import Config
from fxzero.inspect import capture
from fxzero.inspect.capture import SharedModel, fake_ranks, scalar_of
from fxzero.inspect.targets import Batch
from fxzero.inspect.targets.calls import asked
from fxzero.runtime import executor
from tests.tracing import BY_LAYER, Chain, chain


def test_a_huge_world_needs_no_memory() -> None:
    """A terabyte of parameters: a real one would not fit."""

    class Huge(Chain):
        def example_inputs(self, batch_size: int) -> tuple[Tensor]:
            return (torch.randn(batch_size, 1 << 18),)

    captured = capture(
        lambda: Huge(4, width=1 << 18), zero=3, world_size=1024, batch_size=3, options=BY_LAYER
    )
    assert captured.num_parameters == 4 << 36
    (compilation,) = captured.compilations
    assert compilation.joint is not None
    assert [len(s.transfers()) for s in compilation.sides] == [4, 3 + 4]
    names = {r.name for r in compilation.records}
    assert names == {
        "stamp",
        "lower_kernels",
        "recompute",
        "outline",
        "expand_layers",
        "shard_params",
        "shard_grads",
        "bucket",
        "offload_shards",
        "prefetch",
        "join_copies",
        "lower_transfers",
        "release_saved",
        "draw_masks",
        "lower_regions",
    }


def test_it_decides_as_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, regions and buckets of the default settings; nothing is compiled on the way."""

    def never(*args: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("fxzero.regions.region.inductor_compile", never)
    (compilation,) = capture(chain(3), zero=3, world_size=8).compilations
    noted = {record.name: record.notes for record in compilation.records}
    assert compilation.config == Config()
    assert noted["outline"]["calls"] == 6
    assert noted["lower_regions"]["regions"] > 0
    monkeypatch.undo()
    seen: list[Compilation] = []
    observers.append(seen.append)
    with fake_ranks(8):
        model, (x,) = chain(3)()
        fxzero.shard(model, zero=3, mesh=init_device_mesh("cpu", (8,)))
        torch.compile(model, backend="fxzero")(x).sum().backward()
    observers.remove(seen.append)
    trained = {record.name: record.notes for record in seen[0].records}
    for name in ("outline", "bucket", "prefetch"):
        assert trained[name] == noted[name]


@pytest.mark.parametrize(("cluster", "gathers"), [("pair_1gbit", 6), ("dgx_h100", 2)])
def test_buckets_are_those_of_the_cluster(cluster: str, gathers: int) -> None:
    """Where gloo moves bytes, layers of 4 MiB travel apart; where a device does, together."""
    options = {"cost": {"cluster": cluster}, "prefetch": {"keep": False}}
    captured = capture(chain(3, width=1024), zero=3, world_size=8, options=options)
    (compilation,) = captured.compilations
    assert compilation.joint is not None
    assert len(compilation.joint.transfers(name="gather")) == gathers


def test_inference() -> None:
    """A forward alone has no reduces."""
    captured = capture(chain(2), zero=3, world_size=8, training=False)
    (compilation,) = captured.compilations
    assert compilation.joint is not None
    assert {t.stamp.lane.value for t in compilation.joint.transfers()} == {"gather"}


@pytest.mark.parametrize("step", [False, True])
def test_no_code_is_made_of_a_step_that_does_not_run(
    step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole step, that is; of the ordinary loop each side is called, on fake tensors."""
    made: list[object] = []
    generate = executor.generated

    def generated(graph: Any, part: Any) -> Any:
        made.append(part)
        return generate(graph, part)

    monkeypatch.setattr(executor, "generated", generated)
    capture(lambda: (Chain(2), torch.randn(4, 8)), zero=3, world_size=8, step=step)
    assert len(made) == (0 if step else 2)


def test_nothing_is_left_behind() -> None:
    """Neither a process group nor an observer, also after an error."""

    with pytest.raises(ConfigError, match="has no setting 'nope'"):
        capture(chain(1), zero=3, world_size=8, options={"nope": 1})
    assert not dist.is_initialized()
    assert observers == []


def test_inside_a_process_group_it_refuses() -> None:
    """It would have to replace it."""
    message = "this one has joined one of 4 ranks"
    with fake_ranks(4), pytest.raises(ConfigError, match=message):
        capture(chain(1), zero=3, world_size=8)


@pytest.mark.parametrize("rank", [-1, 8])
def test_the_rank_must_be_in_the_world(rank: int) -> None:
    """There are eight, from 0."""
    with pytest.raises(ConfigError, match=f"rank {rank} is not in a world of 8 ranks"):
        capture(chain(1), zero=3, world_size=8, rank=rank)


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (lambda: nn.ReLU(), "no batch can be made for ReLU"),
        (lambda: 3, "the factory returned int; it must return a module, or"),
        (lambda: (nn.Linear(2, 2),), "the factory returned tuple"),
    ],
)
def test_what_cannot_be_called(built: object, message: str) -> None:
    """What the factory returned, and what it should."""
    with pytest.raises(ConfigError, match=message):
        capture(built, zero=3, world_size=8)  # type: ignore[arg-type]


def test_losses() -> None:
    """A scalar, a mapping, an object, a tuple; anything else has none."""

    class Output:
        loss = torch.tensor(3.0)

    scalar = torch.tensor(3.0)
    for output in (scalar, {"loss": scalar}, {"logits": torch.ones(3)}, Output(), (scalar, 1)):
        assert scalar_of(output).item() == 3
    with pytest.raises(CaptureError, match="the model returned str: no tensor"):
        scalar_of("nothing")


@pytest.mark.slow
def test_regions_are_compiled_if_asked_for() -> None:
    """To see how many there are: a compiled region must then not run, for values are fake."""
    options = {"lower_regions": {"backend": "inductor"}}
    (compilation,) = capture(chain(2), zero=3, world_size=8, options=options).compilations
    notes = [r.notes for r in compilation.records if r.name == "lower_regions"]
    assert [bool(n["regions"]) for n in notes] == [True, True]


@pytest.mark.parametrize("step", [False, True])
def test_transfers_in_a_slab(step: bool) -> None:
    """They have places in memory that there is not, in both doors."""
    options = {"slab": {"enabled": True}, **BY_LAYER}
    found = capture(
        lambda: (Chain(3), torch.randn(4, 8)),
        zero=3,
        world_size=8,
        step=step,
        options=options,
    )
    passes = {r.name: r.notes for c in found.compilations for r in c.records}
    assert passes["slab"]


def test_a_model_made_once_is_copied_with_its_counts() -> None:
    """BatchNorm's count is a fake tensor that was made of a number."""

    class Counting(Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("same", self.norm.num_batches_tracked)

    def make() -> tuple[nn.Module, Batch]:
        return Counting(), Batch()

    shared = SharedModel()
    with shared.mode:
        first, _ = shared.copied(make)
        second, _ = shared.copied(make)
    one, other = first.get_submodule("norm"), second.get_submodule("norm")
    assert one.num_batches_tracked is not other.num_batches_tracked
    assert one.num_batches_tracked.device.type == other.num_batches_tracked.device.type == "cpu"
    assert first.get_buffer("same") is one.num_batches_tracked


class Tied(nn.Module):
    """A table that reads and writes, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(B,) to a loss."""
        return self.head(self.norm(self.table(tokens))).float().square().mean()


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda model: model.to(torch.bfloat16), torch.bfloat16),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.to("cpu"), torch.float32),
        (lambda model: model.to(device="cpu", dtype=torch.bfloat16).float(), torch.float32),
    ],
)
def test_a_factory_may_convert_its_model(convert: Any, dtype: torch.dtype, shares: bool) -> None:
    """By `.to(…)`, as many factories end: tied parameters stay one, frozen ones frozen."""
    swap = torch.utils.swap_tensors

    def build() -> Any:
        model = Tied()
        model.norm.bias.requires_grad_(False)
        return convert(model), (torch.zeros(4, dtype=torch.int64),)

    shared = SharedModel() if shares else None
    found = capture(build, zero=3, world_size=2, step=True, shared=shared)
    (compilation,) = found.compilations
    assert found.num_parameters == 16 * 8 + 8 + 8
    assert len(found.trained) == 2
    assert {spec.compute_dtype for spec in compilation.specs.values()} == {dtype}
    assert torch.utils.swap_tensors is swap


class Clip(nn.Module):
    """Numbers that are parameters, as CLIP's temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to a loss."""
        return (self.layer(x) * self.scale.exp()).float().square().mean()


class Keeping(nn.Module):
    """Keeps what nobody can copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to a loss."""
        return self.layer(x).float().square().mean()


class Closing(nn.Module):
    """Calls its first layer through a function that knows it."""

    def __init__(self) -> None:
        super().__init__()
        first = self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.call = lambda x: torch.relu(first(x))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to a loss."""
        return self.second(self.call(x)).square().mean()


class Encoder(nn.Module):
    """Layers that are copies of one, as torch's encoder has them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8) to a loss."""
        return self.layers(x).square().mean()


def averaged() -> Any:
    """A model beside a frozen average of itself."""
    model = Tied()
    copied = torch.optim.swa_utils.AveragedModel(model)
    assert copied.module.table.weight is copied.module.head.weight
    assert copied.module.table.weight is not model.table.weight
    return model, (torch.zeros(4, dtype=torch.int64),)


def truncated() -> Any:
    """Filled as vision transformers are."""
    model = Clip()
    nn.init.trunc_normal_(model.layer.weight, std=0.02)
    return model, torch.randn(4, 8)


def from_meta() -> Any:
    """Made without memory, and given some."""
    with torch.device("meta"):
        model = Clip()
    model.scale = nn.Parameter(torch.tensor(2.659))
    return model.to_empty(device="cpu"), torch.randn(4, 8)


def with_arguments() -> Any:
    """Reads a command line, of which it has none here."""
    argparse.ArgumentParser().parse_args()
    return Clip(), torch.randn(4, 8)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("build", "num_parameters"),
    [
        (lambda: (Clip(), torch.randn(4, 8)), 73),
        (lambda: (Clip().to(torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)), 73),
        (
            lambda: (Encoder(), torch.randn(2, 4, 8)),
            2 * (4 * 8 * 8 + 4 * 8 + 2 * 8 * 16 + 16 + 8 + 4 * 8),
        ),
        (averaged, 16 * 8 + 2 * 8),
        (truncated, 73),
        (from_meta, 73),
        (with_arguments, 73),
        (lambda: (Closing(), torch.randn(4, 8)), 144),
        (lambda: (Keeping(), torch.randn(4, 8)), 72),
    ],
    ids=[
        "number",
        "bf16_number",
        "copies",
        "average",
        "truncated",
        "meta",
        "argparse",
        "closure",
        "lock",
    ],
)
def test_habits_of_factories(build: Any, num_parameters: int, shares: bool) -> None:
    """What they do to real tensors they may do to fake ones: all parameters are sharded."""
    shared = SharedModel() if shares else None

    for _ in range(2):  # the second one of a shared model is of the same make
        found = capture(
            lambda: asked(build, "here"), zero=3, world_size=2, step=True, shared=shared
        )
        (compilation,) = found.compilations
        assert found.num_parameters == num_parameters
        assert found.is_whole
        assert sum(spec.num_elements for spec in compilation.specs.values()) == num_parameters


def test_fakes_are_as_before() -> None:
    """Behind a factory nothing of torch is another."""
    from torch._subclasses.fake_tensor import FakeTensor

    before = (torch.utils.swap_tensors, torch.nn.init._no_grad_trunc_normal_)
    with pytest.raises(ConfigError, match="raised ValueError"):
        capture(lambda: asked(lambda: int("x"), "it"), zero=3, world_size=2)
    assert before == (torch.utils.swap_tensors, torch.nn.init._no_grad_trunc_normal_)
    assert "__deepcopy__" not in vars(FakeTensor)


def test_a_factory_that_exits_or_reads_a_value() -> None:
    """Both are said with their line, and what to do."""
    with pytest.raises(ConfigError, match=r"raised SystemExit at .*test_capture.py:\d+: 3"):
        asked(lambda: sys.exit(3), "it")
    with pytest.raises(ConfigError, match="here tensors have shapes alone"):
        capture(lambda: asked(lambda: torch.ones(2).sum().item(), "it"), zero=3, world_size=2)
