"""Going on from a checkpoint: bit by bit as if nothing had happened, in another layout to 1e-12.

One training is saved in its middle and goes on; another one, of other values and generators, loads
and goes on too. In another layout the whole training is held against one eager process.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxzero
from fxzero import checkpoint
from tests.parity.harness import Pools
from tests.parity.models import Block
from tests.parity.training import (
    Tensors,
    assert_same,
    full,
    full_optimizer_state,
    full_parameters,
)
from tests.tiers import exhaustive

ROWS = 24
"""Of all ranks."""
TRAINED = 3
"""Steps before the checkpoint."""
GOING_ON = 20
EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}}


class Net(nn.Module):
    """A tied embedding, dropout, running statistics, a frozen parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.rand(16), requires_grad=False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """(rows, time) token ids, and those that follow, to the mean loss."""
        x = self.dropout(self.embedding(ids) * self.scale)
        for layer in self.layers:
            x = self.dropout(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Rows:
    """The batches of one rank, and how many were read: a loader with a position."""

    def __init__(self, part: int, parts: int) -> None:
        self.part, self.parts, self.read = part, parts, 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + self.read)
        self.read += 1
        ids = torch.randint(0, 32, (ROWS, 7), generator=generator).chunk(self.parts)[self.part]
        return ids[:, :-1], ids[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.read = state["read"]


@dataclass(frozen=True)
class Case:
    """A way to train."""

    zero: int = 3
    door: str = "step"
    mesh: str = "flat"
    dtype: torch.dtype = torch.float32
    precision: str | None = None
    dropout: float = 0.1
    micro_batches: int = 1
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=lambda: dict(EAGER))

    def __str__(self) -> str:
        plain = Case()
        names = ("zero", "door", "mesh", "precision", "micro_batches", "optimizer")
        said = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(plain, n)]
        return "-".join([*said, *(k for k in self.options if k not in EAGER)]) or "plain"


def is_here(tensor: Tensor) -> bool:
    """Whether a tensor is of this rank's stage of the pipeline, if there is one."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


class Run:
    """A model in training, on every rank."""

    def __init__(self, case: Case, seed: int) -> None:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        self.case = case
        model: nn.Module = Net(case.dropout).to(case.dtype)
        size, rank = dist.get_world_size(), dist.get_rank()
        kwargs: dict[str, Any] = {}
        readers = size
        if case.mesh == "hsdp":
            kwargs["mesh"] = init_device_mesh(
                "cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")
            )
        if case.mesh == "pipeline":
            kwargs["mesh"] = init_device_mesh(
                "cpu", (2, size // 2), mesh_dim_names=("pipeline", "shard")
            )
            readers = size // 2
            ids = torch.zeros(ROWS // readers // case.micro_batches, 6, dtype=torch.long)
            kwargs |= {"example_inputs": (ids, ids), "schedule": "1f1b"}
        self.model = fxzero.shard(model, zero=case.zero, **kwargs)
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1 and p.requires_grad]},
            {
                "params": [p for p in self.model.parameters() if p.ndim < 2 and p.requires_grad],
                "weight_decay": 0.0,
            },
        ]
        kind = getattr(torch.optim, case.optimizer)
        settings = {"momentum": 0.9} if case.optimizer == "SGD" else {}
        self.optimizer = kind(groups, lr=1e-2, **settings)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 9], 0.5)
        self.loader = Rows(rank % readers, readers)
        torch.manual_seed(100 * seed + rank)
        if case.door == "step":
            self.step = fxzero.compile_step(
                self.model,
                self.optimizer,
                micro_batches=case.micro_batches,
                clip_grad_norm=0.5,
                precision=case.precision,
                scheduler=self.schedule,
                options=case.options,
            )
            self.state = fxzero.TrainState(self.step, loader=self.loader)
        else:
            compiled = torch.compile(self.model, backend="fxzero", options=case.options)
            self.compiled: Any = compiled
            self.state = fxzero.TrainState(
                compiled, self.optimizer, scheduler=self.schedule, loader=self.loader
            )

    def train(self, num_steps: int) -> list[float]:
        """This rank's losses."""
        return [self._step(*next(self.loader)) for _ in range(num_steps)]

    def _step(self, ids: Tensor, targets: Tensor) -> float:
        if self.case.door == "step":
            return self.step(ids, targets).loss.item()
        losses = []
        count = self.case.micro_batches
        for part in zip(ids.chunk(count), targets.chunk(count), strict=True):
            loss = self.compiled(*part)
            (loss / count).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return sum(losses)

    def everything(self) -> Tensors:
        """All that training changes, whole, by name: of a pipeline, what this stage has."""
        found: Tensors = {"rng": torch.get_rng_state()}
        for name, parameter in self.model.named_parameters():
            if is_here(parameter):
                found[name] = full(parameter)
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    found[f"{name} {key}"] = full(value)
        return found


def goes_on(case: Case, folder: str) -> None:
    """Job: two trainings, one of which loads what the other saved."""
    first = Run(case, seed=0)
    first.train(TRAINED)
    saving = checkpoint.save(first.state, folder, step=TRAINED)
    expected = first.train(GOING_ON)  # while it is written
    saving.wait()
    scale = getattr(getattr(first, "step", None), "loss_scale", None)

    second = Run(case, seed=1)
    second.train(1)  # what it has trained is replaced
    loaded = checkpoint.load(second.state, folder)
    assert loaded is not None
    assert (loaded.step, loaded.skipped, loaded.left) == (TRAINED, (), ())
    assert second.train(GOING_ON) == expected
    assert_same(second.everything(), first.everything(), rtol=0)
    assert second.schedule.get_last_lr() == first.schedule.get_last_lr()
    if scale is not None:
        assert second.step.loss_scale.state_dict() == scale.state_dict()


HOST = {**EAGER, "memory": "states_host"}
EVERY_RUN = [
    Case(zero=0),
    Case(zero=1, door="loop", optimizer="SGD"),
    Case(zero=2, micro_batches=4),
    Case(zero=3, precision="fp16"),
    Case(zero=3, options={**EAGER, "memory": "infinity"}),
]
MORE = [
    Case(zero=1, optimizer="SGD"),
    Case(zero=3, options={}),
    Case(zero=3, door="loop", options={}),
    Case(zero=3, micro_batches=4, options={**EAGER, "memory": "all_host"}),
    Case(zero=1, options={**HOST, "offload_states": {"delay": 1}}),
    Case(zero=2, mesh="pipeline", micro_batches=2, dropout=0.0),
    Case(zero=2, optimizer="RMSprop"),
    *(
        Case(zero=zero, door=door, micro_batches=k)
        for zero, door, k in itertools.product(range(4), ("step", "loop"), (1, 4))
    ),
    *(Case(zero=zero, precision="fp16", micro_batches=4) for zero in range(4)),
    *(Case(zero=zero, options=HOST) for zero in range(4)),
    *(Case(zero=zero, optimizer="Adagrad") for zero in range(4)),
]


@pytest.mark.parametrize("case", [*EVERY_RUN, *exhaustive(*MORE)], ids=str)
def test_the_same_layout_goes_on_bit_by_bit(ranks: Pools, tmp_path: Path, case: Case) -> None:
    """Losses of 20 steps, parameters, states, generators, learning rates, loss scale."""
    if case.options.get("memory") == "infinity":
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        disk = {"paths": [str(scratch)], "chunk_bytes": 4096}
        case = replace(case, options={**case.options, "disk": disk})
    ranks(2).run(goes_on, case, str(tmp_path / "checkpoints"))


# -- other layouts

DOUBLE = Case(dtype=torch.float64, dropout=0.0)


def eager_reference(num_steps: int) -> Tensors:
    """One process, without fxzero."""
    torch.manual_seed(0)
    model = Net().double()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {
            "params": [p for p in model.parameters() if p.ndim < 2 and p.requires_grad],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 9], 0.5)
    loader = Rows(0, 1)
    for _ in range(num_steps):
        model(*next(loader)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {**full_parameters(model), **full_optimizer_state(model, optimizer)}


def leg(case: Case, folder: str, num_steps: int) -> Tensors:
    """Job: go on from what there is, train, save."""
    run = Run(case, seed=0)
    first = 0
    if checkpoint.folder.published(Path(folder)):
        for parameter in run.model.parameters():
            parameter.data.zero_()
        loaded = checkpoint.load(run.state, folder)
        assert loaded is not None
        first = loaded.step
    run.train(num_steps)
    checkpoint.save(run.state, folder, step=first + num_steps).wait()
    found = run.everything()
    found.pop("rng")
    return found


@pytest.mark.parametrize("worlds", [(1, 2), *exhaustive(((1, 2, 3, 4, 2),))], ids=str)
def test_through_worlds_of_other_sizes(
    ranks: Pools, tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    """Two steps with each number of ranks equal one process that was never disturbed."""
    zeros = {1: 0, 2: 3, 3: 1, 4: 2}
    for world in worlds:
        case = replace(DOUBLE, zero=zeros[world])
        found, *_ = ranks(world).run(leg, case, str(tmp_path), 2)
    assert_same(found, eager_reference(2 * len(worlds)), rtol=1e-12)


def pairs_of_stages(folder: str) -> list[Tensors]:
    """Job: every ZeRO stage goes on from every other one, through both doors."""
    found = []
    for zero in range(4):
        leg(replace(DOUBLE, zero=zero, door="step"), f"{folder}/{zero}", 2)
        for other in range(4):
            door = ("step", "loop")[(zero + other) % 2]
            run = Run(replace(DOUBLE, zero=other, door=door), seed=3)
            checkpoint.load(run.state, f"{folder}/{zero}")
            run.train(2)
            everything = run.everything()
            everything.pop("rng")
            found.append(everything)
    return found


@pytest.mark.exhaustive
def test_every_pair_of_stages(ranks: Pools, tmp_path: Path) -> None:
    """ZeRO 0 to 3 save, ZeRO 0 to 3 load, a step and a loop."""
    found, *_ = ranks(2).run(pairs_of_stages, str(tmp_path))
    expected = eager_reference(4)
    assert len(found) == 16
    for everything in found:
        assert_same(everything, expected, rtol=1e-12)


HSDP = replace(DOUBLE, mesh="hsdp")
PIPELINE = replace(DOUBLE, mesh="pipeline", micro_batches=2)


@pytest.mark.parametrize(
    ("cases", "world"),
    [
        ([replace(PIPELINE, zero=2), HSDP, replace(PIPELINE, zero=1)], 2),
        *exhaustive(
            ([HSDP, replace(DOUBLE, zero=2), HSDP], 4),
            ([replace(PIPELINE, zero=2), replace(DOUBLE, zero=3), replace(PIPELINE, zero=1)], 2),
            ([replace(PIPELINE, zero=3), HSDP], 4),
        ),
    ],
    ids=lambda value: "" if isinstance(value, int) else "-".join(case.mesh for case in value),
)
def test_through_other_meshes(ranks: Pools, tmp_path: Path, cases: list[Case], world: int) -> None:
    """HSDP, stages of a pipeline, one flat group: each goes on from the other."""
    for case in cases:
        everywhere = ranks(world).run(leg, case, str(tmp_path), 2)
    found = {name: value for here in everywhere for name, value in here.items()}
    expected = eager_reference(2 * len(cases))
    if cases[-1].mesh == "pipeline":  # a rank knows those of its own stage
        expected = {name: value for name, value in expected.items() if name in found}
    assert_same(found, expected, rtol=1e-12)


def plain_goes_on(folder: str) -> None:
    """Job: a model that nobody has sharded, in one process."""
    model = Net().double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loader = Rows(0, 1)
    state = fxzero.TrainState(model, optimizer, loader=loader, rng=False)
    checkpoint.load(state, folder, leave=["optimizer"])
    assert loader.read == 2
    expected = eager_reference(2)
    mine = full_parameters(model)
    assert_same(mine, {name: expected[name] for name in mine}, rtol=1e-12)
    checkpoint.save(state, f"{folder}/plain", step=2)


def test_from_shards_to_a_plain_model(ranks: Pools, tmp_path: Path) -> None:
    """And back: only the model, as its optimizer has other groups."""
    ranks(2).run(leg, DOUBLE, str(tmp_path), 2)
    ranks(1).run(plain_goes_on, str(tmp_path))


def rounded(folder: str) -> list[str]:
    """Job: a model in fp32 from shards in float64."""
    run = Run(replace(DOUBLE, dtype=torch.float32), seed=1)
    checkpoint.load(run.state, folder)
    expected = eager_reference(2)
    for name, value in full_parameters(run.model).items():
        reference = expected[name]
        assert value is not None
        assert reference is not None
        assert torch.equal(value, reference.float()) or torch.allclose(
            value.double(), reference, rtol=1e-6
        )
    run.train(1)
    return [str(p.dtype) for p in run.model.parameters()]


def test_shards_of_another_dtype(ranks: Pools, tmp_path: Path) -> None:
    """Values are rounded to what the model has."""
    ranks(2).run(leg, DOUBLE, str(tmp_path), 2)
    assert set(ranks(2).run(rounded, str(tmp_path))[0]) == {"torch.float32"}
