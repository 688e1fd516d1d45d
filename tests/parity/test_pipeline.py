"""Stages of a pipeline against one eager process: losses, norms, parameters, optimizer state.

Every schedule and ZeRO stage, tied weights, skips over stages, an encoder and a decoder, running
statistics. Ranks of one pipeline get the same rows, its replicas get others.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fxzero
from examples.benchmarks.measure import peak_meter, release_free_memory
from examples.models import gpt_bench
from examples.settings import Settings
from examples.train import train
from fxzero.errors import ShardingError
from tests.parity.harness import Pools
from tests.tiers import exhaustive

RTOL = 1e-12
ROWS = 2
"""Of a micro-batch."""
STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Tied embeddings at both ends; positions that need no parameter to be looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.places = nn.Embedding(4, 8)
        self.h = nn.ModuleList(Block(8) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Checkpointed(Gpt):
    """Blocks that the model itself repeats in backward."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class UNet(nn.Module):
    """Skips over two stages, and one from the input to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 12)
        self.deeper = nn.Linear(12, 16)
        self.bottom = nn.Linear(16, 16)
        self.up = nn.Linear(32, 12)
        self.out = nn.Linear(24, 6)
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = F.gelu(self.down(x))
        second = F.gelu(self.deeper(first))
        up = F.gelu(self.up(torch.cat([self.bottom(second), second], -1)))
        out = F.gelu(self.out(torch.cat([up, first], -1)))
        return F.mse_loss(self.last(torch.cat([out, x], -1)), y)


class Conv(nn.Module):
    """Running statistics on every stage, and a buffer that the forward counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleList(
            nn.Conv2d(2 if i == 0 else 4, 4, 3, padding=1, bias=False) for i in range(4)
        )
        self.norm = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = F.relu(norm(conv(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


class T5(nn.Module):
    """transformers' encoder and decoder, whose embedding three modules share."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            vocab_size=20,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        self.m = T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.m(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class Late(nn.Module):
    """A buffer that the last layer writes and the first one reads, a micro-batch later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x + self.seen))
        out = self.last(x)
        self.seen.copy_(x.detach().mean(0) + out.detach().mean())
        return F.mse_loss(out, y)


class Reread(nn.Module):
    """A head that is the embedding itself, read a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.h = nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), targets.flatten())


class Added(nn.Module):
    """Parameters that are only added: their gradients are what later stages compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.shift = nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(2))
        self.between = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.shift[0].expand(x.shape)
        h = torch.tanh(self.first(x)) + rows + 2 * self.shift[1]
        z = h
        for layer in self.between:
            z = torch.tanh(layer(z)) + h
        return F.mse_loss(self.head(z + h), y) + self.shift[1].sum()


class Twice(nn.Module):
    """One layer at both ends, and layers between them that are trained only at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.between = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        for layer in self.between:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.head(self.shared(x)), y)


def gpt_stages(count: int) -> dict[str, int]:
    blocks = {f"h.{i}": i * count // 4 for i in range(4)}
    return {"embed": 0, "places": 0, **blocks, "norm": count - 1, "head": count - 1}


def tokens(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 20, (rows, 4), generator=generator)
    return ids, torch.randint(1, 20, (rows, 4), generator=generator)


def numbers(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    made = (rows, 6), (rows, 1)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in made)
    return x, y


def images(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn((rows, 2, 5, 5), generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


@dataclass(frozen=True)
class Example:
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    stages: Mapping[int, Mapping[str, int | Sequence[int]]] = field(default_factory=dict)


EXAMPLES = {
    "gpt": Example(Gpt, tokens, {n: gpt_stages(n) for n in (2, 4)}),
    "unet": Example(
        UNet,
        numbers,
        {
            2: {"": 1, "down": 0, "deeper": 0},
            4: {"down": 0, "deeper": 1, "bottom": 2, "up": 2, "out": 3, "last": 3},
        },
    ),
    "conv": Example(
        Conv,
        images,
        {
            n: {
                **{f"{kind}.{i}": i * n // 4 for i in range(4) for kind in ("conv", "norm")},
                "head": n - 1,
            }
            for n in (2, 4)
        },
    ),
    "t5": Example(T5, tokens),
    "checkpointed": Example(Checkpointed, tokens, {2: gpt_stages(2)}),
    "late": Example(Late, numbers, {2: {"first": 0, "last": 1}}),
    "twice": Example(Twice, numbers),
    "added": Example(
        Added,
        numbers,
        {
            n: {
                "first": 0,
                "shift": 0,
                "head": n - 1,
                **{f"between.{i}": (i + 1) * n // 4 for i in range(3)},
            }
            for n in (2, 4)
        },
    ),
    "reread": Example(Reread, tokens, {2: {"embed": (0, 1), "h": 0, "h.2": 1, "h.3": 1}}),
}
CHUNKS = {"interleaved": 2, "breadth_first": 2, "zbv": 2}


@dataclass(frozen=True)
class Case:
    """One way to train one model in stages."""

    example: str = "gpt"
    schedule: str = "1f1b"
    places: int = 2
    zero: int = 0
    inner: str = "shard"
    micro_batches: int = 4
    clip: float | None = None
    frozen: str = ""
    lowering: str = "eager"
    by_inputs: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = EXAMPLES[self.example].build().double()
        for name, parameter in model.named_parameters():
            if self.frozen and name.startswith(self.frozen):
                parameter.requires_grad_(False)
        return model

    def batch(self, step: int, replicas: int) -> tuple[Tensor, Tensor]:
        """Of all replicas, one behind the other."""
        generator = torch.Generator().manual_seed(step)
        return EXAMPLES[self.example].batch(generator, ROWS * self.micro_batches * replicas)

    def in_stages(self, model: nn.Module) -> nn.Module:
        """The model, sharded over all ranks."""
        world = dist.get_world_size()
        shape, names = (self.places, world // self.places), ("pipeline", self.inner)
        if world == self.places:
            shape, names = shape[:1], names[:1]  # type: ignore[assignment]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        example = EXAMPLES[self.example]
        given: dict[str, Any] = {}
        if self.by_inputs or not example.stages:
            given["example_inputs"] = example.batch(torch.Generator().manual_seed(9), ROWS)
        else:
            given["stages"] = example.stages[self.places * CHUNKS.get(self.schedule, 1)]
        return fxzero.shard(model, zero=self.zero, mesh=mesh, schedule=self.schedule, **given)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, **settings)


def assert_same(name: str, mine: Tensor, expected: Tensor) -> bool:
    """See that this rank's part is that of one process; whether there is one."""
    if isinstance(mine, DTensor):
        local, mesh = mine.to_local(), mine.device_mesh
        if mesh.get_coordinate() is None:
            assert local.numel() == 0, f"{name} of another stage is here"
            return False
        if any(placement.is_shard() for placement in mine.placements):
            axis = next(i for i, p in enumerate(mine.placements) if p.is_shard())
            expected = (*expected.chunk(mesh.size(axis)), expected[:0])[mesh.get_local_rank(axis)]
        mine = local
    scale = max(float(expected.abs().max()), 1e-300) if expected.numel() else 1.0
    worst = float((mine - expected).abs().max()) if expected.numel() else 0.0
    assert worst <= RTOL * scale, f"{name} is off by {worst / scale:.1e} of its largest element"
    return True


def in_stages(case: Case) -> list[str]:
    """Job: train in stages, compare with one process; names of the parameters that are here."""
    torch._dynamo.reset()
    model = case.model()
    reference = copy.deepcopy(model)
    case.in_stages(model)
    optimizer, expected = adamw(model, fused=True), adamw(reference)
    step = fxzero.compile_step(
        model,
        optimizer,
        micro_batches=case.micro_batches,
        clip_grad_norm=case.clip,
        options={"lower_regions": {"backend": case.lowering}, **case.options},
    )
    replicas = dist.get_world_size() // case.places
    replica, rows = dist.get_rank() % replicas, ROWS * case.micro_batches
    for number in range(STEPS):
        batch = case.batch(number, replicas)
        out = step(*(tensor[replica * rows : (replica + 1) * rows] for tensor in batch))
        expected.zero_grad()
        losses = []
        for first in range(0, rows * replicas, ROWS):
            loss = reference(*(tensor[first : first + ROWS] for tensor in batch))
            (loss / (case.micro_batches * replicas)).backward()
            losses.append(loss.detach())
        if case.clip is not None:
            trained = [p for p in reference.parameters() if p.requires_grad]
            norm = nn.utils.clip_grad_norm_(trained, case.clip)
            assert out.grad_norm is not None
            assert_same("norm", out.grad_norm, norm)
        expected.step()
        own = losses[replica * case.micro_batches : (replica + 1) * case.micro_batches]
        assert_same("loss", out.loss, torch.stack(own).mean())
    here = []
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), other in pairs:
        with torch.no_grad():
            if assert_same(name, parameter.detach(), other.detach()):
                here.append(name)
        for key, value in expected.state[other].items():
            if key != "step":
                assert_same(f"{key} of {name}", optimizer.state[parameter][key], value)
    if replicas == 1:  # of several each sees its own rows
        for (name, buffer), other in zip(model.named_buffers(), reference.buffers(), strict=True):
            assert_same(name, buffer.double(), other.double())
    return here


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zbv", "auto"]
)
@pytest.mark.parametrize("world", [2])
def test_every_schedule(world: int, schedule: str, ranks: Pools) -> None:
    here = ranks(world).run(in_stages, Case(schedule=schedule, clip=0.1))
    assert "embed.weight" in here[0]
    assert not {"h.0.up.weight", "h.3.up.weight"} <= {*here[0]} or schedule == "zbv"


@pytest.mark.parametrize("example", ["conv", *exhaustive("unet", "t5")])
@pytest.mark.parametrize("world", [2])
def test_models(world: int, example: str, ranks: Pools) -> None:
    ranks(world).run(in_stages, Case(example, clip=0.5))


@pytest.mark.parametrize(
    ("example", "schedule"), [("added", "1f1b"), *exhaustive(("gpt", "zb_h1"))]
)
@pytest.mark.parametrize("world", [2])
def test_compiled_regions(world: int, example: str, schedule: str, ranks: Pools) -> None:
    ranks(world).run(in_stages, Case(example, schedule, lowering="inductor", clip=0.1))


@pytest.mark.parametrize("world", [2])
def test_frozen_parameters(world: int, ranks: Pools) -> None:
    """A whole stage of them, too: it has nothing to train."""
    ranks(world).run(in_stages, Case(frozen="h.1", clip=0.1))
    ranks(world).run(in_stages, Case("unet", frozen="d", clip=0.1))


@pytest.mark.parametrize("world", [2])
def test_stages_by_cost(world: int, ranks: Pools) -> None:
    here = ranks(world).run(in_stages, Case("unet", by_inputs=True))
    assert 0 < len(here[0]) < 12
    assert sorted([*here[0], *here[1]]) == sorted(dict(UNet().named_parameters()))


@pytest.mark.parametrize("zero", [3, *exhaustive(0, 1, 2)])
@pytest.mark.parametrize("world", [4])
def test_zero_inside_of_stages(world: int, zero: int, ranks: Pools) -> None:
    schedule = ("1f1b", "interleaved", "zbv", "zb_h1")[zero]
    ranks(world).run(in_stages, Case(zero=zero, schedule=schedule, clip=0.1))


@pytest.mark.parametrize("zero", [3, *exhaustive(0)])
@pytest.mark.parametrize("world", [4])
def test_one_micro_batch(world: int, zero: int, ranks: Pools) -> None:
    """Nothing is accumulated, and what stages share is a sum over them all the same."""
    ranks(world).run(in_stages, Case(zero=zero, micro_batches=1, clip=0.1))


@pytest.mark.parametrize("world", [4])
def test_replicas(world: int, ranks: Pools) -> None:
    ranks(world).run(in_stages, Case(inner="replicate", clip=0.1))


@pytest.mark.parametrize(
    "case", [Case("unet", places=4), *exhaustive(Case(places=4), Case("t5", places=4))]
)
@pytest.mark.parametrize("world", [4])
def test_four_stages(world: int, case: Case, ranks: Pools) -> None:
    ranks(world).run(in_stages, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("example", ["gpt", "unet", "conv"])
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zbv", "auto"]
)
@pytest.mark.parametrize("world", [4])
def test_everything(world: int, schedule: str, example: str, zero: int, ranks: Pools) -> None:
    ranks(world).run(in_stages, Case(example, schedule, zero=zero, clip=0.3))


def parameters_by(schedule: str, row_file: str = "") -> list[Tensor]:
    """Job: what training by a schedule leaves on this rank."""
    torch._dynamo.reset()
    case = Case()
    model = case.in_stages(case.model())
    options = {
        "lower_regions": {"backend": "eager"},
        "order_micro_batches": {"schedule": row_file or schedule},
    }
    step = fxzero.compile_step(model, adamw(model, fused=True), micro_batches=4, options=options)
    for number in range(2):
        step(*case.batch(number, 1))
    return [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [2])
def test_schedules_agree_bit_by_bit(world: int, ranks: Pools, tmp_path: Path) -> None:
    """Each stage adds up its micro-steps in one order, a table of one's own included."""
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1F2,1B1,1B2,1F3,1B3\n")
    expected = ranks(world).run(parameters_by, "1f1b")
    for schedule in ("gpipe", "zb_h1", str(file)):
        for mine, other in zip(ranks(world).run(parameters_by, schedule), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), schedule


def resumed(folder: str) -> list[float]:
    """Job: losses of training on, and of another model that a checkpoint was loaded into."""
    torch._dynamo.reset()
    case = Case()

    def fresh(seed: int) -> tuple[nn.Module, torch.optim.AdamW, fxzero.TrainStep]:
        torch.manual_seed(seed)
        model = case.in_stages(Gpt().double())
        optimizer = adamw(model, fused=True)
        options = {"lower_regions": {"backend": "eager"}}
        step = fxzero.compile_step(model, optimizer, micro_batches=4, options=options)
        step(*case.batch(seed, 1))
        return model, optimizer, step

    model, optimizer, step = fresh(0)
    saved = get_state_dict(model, optimizer)
    dcp.save(dict(zip("mo", saved, strict=True)), checkpoint_id=folder)
    other, its_optimizer, its_step = fresh(1)
    loaded = dict(zip("mo", get_state_dict(other, its_optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=loaded["m"], optim_state_dict=loaded["o"])
    losses = [one(*case.batch(n, 1)).loss.item() for n in (2, 3, 4) for one in (step, its_step)]
    assert all(int(optimizer.state[p]["step"]) == 4 for p in model.parameters())
    return losses


@pytest.mark.parametrize("world", [2])
def test_checkpoints(world: int, ranks: Pools, tmp_path: Path) -> None:
    """Every rank knows of all parameters, and writes what it has."""
    for losses in ranks(world).run(resumed, str(tmp_path)):
        assert losses[::2] == losses[1::2]


@pytest.mark.parametrize("world", [2])
def test_a_layer_at_both_ends(world: int, ranks: Pools) -> None:
    here = ranks(world).run(in_stages, Case("twice", clip=0.1))
    assert "shared.weight" in here[0]
    assert "shared.weight" in here[1]


@pytest.mark.parametrize("world", [2])
def test_a_module_of_two_stages(world: int, ranks: Pools) -> None:
    here = ranks(world).run(in_stages, Case("reread", clip=0.1))
    assert all("embed.weight" in names for names in here)


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv", *exhaustive("1f1b", "interleaved")])
@pytest.mark.parametrize("world", [2])
def test_gradients_that_other_stages_compute(world: int, schedule: str, ranks: Pools) -> None:
    """They travel to where the parameter is held, though nothing else there reads them."""
    ranks(world).run(in_stages, Case("added", schedule, clip=0.1))


@pytest.mark.parametrize("world", [2])
def test_frozen_layers_of_several_stages(world: int, ranks: Pools) -> None:
    """Autograd numbers nothing of them."""
    ranks(world).run(in_stages, Case(schedule="interleaved", frozen="h"))


def refused(kind: str) -> str:
    """Job: the message of what a pipeline refuses."""
    torch._dynamo.reset()
    case = Case({"buffer": "late", "checkpoint": "checkpointed"}.get(kind, "gpt"))
    model = case.model()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline",))
    stages: dict[str, Any] = dict(EXAMPLES[case.example].stages[2])
    try:
        if kind == "gap":
            fxzero.shard(model, mesh=mesh, stages={**stages, "head": 3})
        elif kind == "no number":
            fxzero.shard(model, mesh=mesh, stages={**stages, "head": "last"})
        elif kind == "several, one of none":
            fxzero.shard(model, mesh=mesh, stages={**stages, "embed": (0, 2)})
        elif kind == "unknown":
            fxzero.shard(model, mesh=mesh, stages={**stages, "h.7": 1})
        elif kind == "left out":
            stages.pop("norm")
            fxzero.shard(model, mesh=mesh, stages=stages)
        elif kind == "too many":
            fxzero.shard(model, mesh=mesh, stages=EXAMPLES["gpt"].stages[4])
        elif kind == "nothing":
            fxzero.shard(model, mesh=mesh)
        elif kind == "no axis":
            flat = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
            fxzero.shard(model, mesh=flat, example_inputs=case.batch(0, 1))
        elif kind == "own buffers":
            fxzero.shard(model, mesh=mesh, stages=stages, broadcast_buffers=False)
        elif kind == "budget":
            fxzero.shard(model, mesh=mesh, stages=stages, memory_budget="1GiB")
        elif kind == "one memory":
            model.h[1].norm.bias = nn.Parameter(model.h[0].norm.bias.data)  # type: ignore[union-attr,index]
            fxzero.shard(model, mesh=mesh, stages=stages)
        elif kind == "schedule":
            fxzero.shard(model, mesh=mesh, stages=stages, schedule="1f2b")
        else:
            if kind == "backwards":
                stages |= {"h.0": 1, "h.1": 0}
            fxzero.shard(model, mesh=mesh, stages=stages)
            batch = case.batch(dist.get_rank() if kind == "batch" else 0, 1)
            if kind == "eager":
                model(*batch)
            elif kind == "loop":
                torch.compile(model, backend="fxzero")(*batch)
            elif kind == "graph":
                fxzero.compile_step(model, adamw(model, fused=True), options={"cuda_graph": True})
            elif kind == "other places":
                options = {"order_micro_batches": {"schedule": "zbv"}}
                step = fxzero.compile_step(
                    model, adamw(model, fused=True), micro_batches=4, options=options
                )
                step(*batch)
            elif kind == "full":
                return "".join(_message(parameter.full_tensor) for parameter in model.parameters())
            else:
                fxzero.compile_step(model, adamw(model, fused=True))(*batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except ShardingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gap", "numbered from 0 without a gap"),
        ("unknown", "the model has no such module"),
        ("left out", "says nothing of norm.weight"),
        ("too many", "4 stages, and schedule='1f1b' has 2"),
        ("no number", "every stage is a number, or a tuple of some"),
        ("several, one of none", "names 3 stages"),
        ("nothing", "needs stages: pass example_inputs="),
        ("schedule", "1f2b"),
        ("one memory", "h.1.norm.bias"),
        ("no axis", "example_inputs= is for a mesh with an axis 'pipeline'"),
        ("own buffers", "broadcast_buffers=False and a mesh with an axis 'pipeline'"),
        ("backwards", "Stages follow each other in the order of the forward"),
        ("eager", "call fxzero.compile_step"),
        ("loop", "fxzero.compile_step"),
        ("budget", "memory_budget= is for stages that are found from example_inputs="),
        ("graph", "cuda_graph=True and a model in stages"),
        ("other places", "Shard with schedule='zbv'"),
        ("checkpoint", "options={'recompute': {'policy': 'full'}}"),
        ("buffer", "would not see what the micro-batch before has made of it"),
        ("batch", "ranks of one pipeline were given different batches"),
        ("full", "it is of another stage of the pipeline"),
    ],
)
@pytest.mark.parametrize("world", [2])
def test_what_is_refused(world: int, kind: str, words: str, ranks: Pools) -> None:
    for message in ranks(world).run(refused, kind):
        assert words in message, message


def trained(folder: str, overrides: Sequence[str]) -> list[float]:
    """Job: the last validation losses of a run of the trainer, without a pipeline and with one."""
    losses = []
    for more in ([], overrides):
        torch._dynamo.reset()
        with initialize_config_module("examples.conf", version_base="1.3"):
            settings = Settings.of(compose("train", overrides=[*SMALL_RUN, *more]))
        losses.append(train(settings, Path(folder)))
    return losses


SMALL_RUN = [
    *("model=gpt_tiny", "model.num_layers=2", "model.hidden=32", "data.max_bytes=100000"),
    *("trainer.steps=6", "trainer.micro_batches=2", "trainer.val_every=3", "trainer.val_batches=2"),
    *("trainer.sample_length=4", "fxzero.lower_regions.backend=eager", "trainer.threads=1"),
]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ["mesh=pipeline2", "schedule=zb_h1"]),
        *exhaustive((4, ["mesh=pipeline2"]), (4, ["mesh=replicate2"])),
    ],
)
def test_the_trainer(world: int, overrides: list[str], ranks: Pools, tmp_path: Path) -> None:
    """`mesh=` trains what all ranks on one axis would, to validations and a sample."""
    for flat, here in ranks(world).run(trained, str(tmp_path), overrides):
        assert here == pytest.approx(flat, rel=1e-5)
    assert (tmp_path / "sample.txt").exists()


def peak_of_sharding() -> tuple[int, int]:
    """Job: the most that a rank holds while it shards a model from the meta device, and the bytes
    of all parameters."""
    with torch.device("meta"):
        model = gpt_bench(num_layers=16, hidden=512)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    places = dist.get_world_size()
    mesh = init_device_mesh("cpu", (places,), mesh_dim_names=("pipeline",))
    blocks = {f"blocks.{i}": i * places // 16 for i in range(16)}
    ends = {"tokens": (0, places - 1), "positions": 0, "norm": places - 1}
    meter = peak_meter("cpu")
    release_free_memory()
    meter.reset()
    before = meter.now_bytes()
    fxzero.shard(model, zero=0, mesh=mesh, stages={**blocks, **ends})
    return meter.peak_bytes() - before, whole


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak, and glibc's heap")
@pytest.mark.parametrize("world", [4])
def test_no_rank_holds_the_stages_of_others(world: int, ranks: Pools) -> None:
    """A quarter of the model, a module that passes, and what is given back from time to time."""
    for peak, whole in ranks(world).run(peak_of_sharding):
        assert peak <= 0.35 * whole + (48 << 20), (peak, whole)
