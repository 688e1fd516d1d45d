"""A step of many micro-batches, of which five are in the graph, trains as one that holds all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero.compiler.compilation import Compilation
from fxzero.graph.steady import UNROLLED, NotSteadyError
from fxzero.runtime import executor
from tests.parity.harness import Pools
from tests.parity.test_step import Case, trains_as_the_eager_loop
from tests.stepping import holding
from tests.tiers import exhaustive, in_two_tiers
from tests.tracing import observed

MANY = UNROLLED + 1
"""The steady micro-step is run twice, so that it follows itself."""
EAGER = {"lower_regions": {"backend": "eager"}}
SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "by layer": {"bucket": {"min_bytes": 0}, "cost": {"cluster": "pair_1gbit"}, **EAGER},
    "kept": {
        "bucket": {"min_bytes": 0},
        "cost": {"cluster": "pair_1gbit"},
        "prefetch": {"budget_bytes": 1 << 20},
        **EAGER,
    },
    "distance 2": {"prefetch": {"distance": 2}, "bucket": {"min_bytes": 0}, **EAGER},
    "least": {"prefetch": {"distance": 0, "reduce_distance": 0}, **EAGER},
}


class Net(nn.Module):
    """Everything that a micro-step can leave to the next one: statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2)
        )
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to (B, 3)."""
        for layer in self.inner:
            x = x + layer(self.dropout(x))
        return self.out(x)


def trained(micro_batches: int, steps: int = 3, **settings: Any) -> tuple[list[Tensor], int]:
    """Losses, norms, parameters, buffers and optimizer state; and how many micro-steps were in
    the graph."""
    seen: list[Compilation] = []
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", settings.pop("mesh")) if "mesh" in settings else None
    zero, low = settings.pop("zero"), settings.pop("param_dtype", None)
    model = fxzero.shard(Net(), zero=zero, mesh=mesh, param_dtype=low)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = fxzero.compile_step(
        model, optimizer, nn.functional.mse_loss, micro_batches=micro_batches, **settings
    )
    found: list[Tensor] = []
    with observed(seen.append):
        for number in range(steps):
            torch.manual_seed(100 * number + dist.get_rank())
            out = step(torch.randn(2 * micro_batches, 6), torch.randn(2 * micro_batches, 3))
            found += [out.loss, *([] if out.grad_norm is None else [out.grad_norm])]
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()] + list(model.buffers())
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    local += [getattr(v, "_local_tensor", v) for v in state]
    (compilation,) = seen
    notes = next(r.notes for r in compilation.records if r.name == "accumulate")
    unrolled = notes["unrolled"]
    assert isinstance(unrolled, int)
    return [*found, *(tensor.detach().clone() for tensor in local)], unrolled


def all_in_one_graph(micro_batches: int, **settings: Any) -> tuple[list[Tensor], int]:
    """The same with every micro-step in the graph."""
    with holding(100):
        return trained(micro_batches, **settings)


def same_bits(micro_batches: int, settings: dict[str, Any]) -> None:
    """Job: with the loop, and without."""
    mine, held = trained(micro_batches, **settings)
    theirs, all_of_them = all_in_one_graph(micro_batches, **settings)
    assert (held, all_of_them) == (UNROLLED, micro_batches)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("zero", "schedule", "clip"),
    [
        *in_two_tiers(
            [
                *((3, schedule, None) for schedule in SCHEDULES if schedule != "default"),
                (3, "least", 0.05),
                # Where nothing is gathered in a micro-step, schedules differ in little.
                *((zero, "by layer", None) for zero in (0, 1)),
                (1, "least", 0.05),
                (2, "distance 2", 0.05),
            ]
        ),
        *exhaustive((3, "default", None), (0, "default", 0.05), (2, "default", None)),
    ],
)
def test_same_bits(ranks: Pools, zero: int, schedule: str, clip: float | None) -> None:
    """Losses, norms, parameters, statistics, moments.

    The default schedule has compiled regions, the others eager ones.
    """
    settings = {"zero": zero, "options": SCHEDULES[schedule], "clip_grad_norm": clip}
    ranks(2).run(same_bits, MANY, settings)


@pytest.mark.parametrize(("world", "zero"), [(2, 3), *exhaustive((4, 3), (4, 1))])
def test_same_bits_on_two_axes(ranks: Pools, world: int, zero: int) -> None:
    """Across replicas too."""
    ranks(world).run(same_bits, MANY, {"zero": zero, "mesh": (2, world // 2), "options": EAGER})


@pytest.mark.exhaustive
@pytest.mark.parametrize(("zero", "options"), [(2, EAGER), (0, EAGER), (3, {})])
def test_same_bits_in_low_precision(ranks: Pools, zero: int, options: dict[str, Any]) -> None:
    """Casts before gathers, sums in the parameters' own dtype."""
    settings = {"zero": zero, "param_dtype": torch.bfloat16, "options": options}
    ranks(2).run(same_bits, MANY + 1 if zero == 3 else MANY, settings)


@pytest.mark.parametrize(("zero", "clip"), [(3, None), *exhaustive((0, None), (1, 0.1), (2, 0.1))])
def test_as_the_eager_loop(ranks: Pools, zero: int, clip: float | None) -> None:
    """Eight micro-batches by a plain loop in one process, in float64."""
    ranks(2).run(trains_as_the_eager_loop, Case(zero, 8, clip, "adamw", example="odd_shapes"))


def test_where_micro_steps_differ_all_are_compiled(ranks: Pools) -> None:
    """A schedule that does not repeat is run as it stands."""
    ranks(2).run(fall_back)


def fall_back() -> None:
    """Job: the first graph is said to be unsteady."""
    settings = {"zero": 3, "options": EAGER}
    refused = NotSteadyError("said so")
    with mock.patch.object(executor, "find_loop", side_effect=refused):
        mine, held = trained(MANY, **settings)
    theirs, _ = all_in_one_graph(MANY, **settings)
    assert held == MANY
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("rows", [3, *exhaustive(4)])
def test_rows_that_begin_anywhere(ranks: Pools, rows: int) -> None:
    """Labels of 32 bytes a micro-batch are aligned in every second one: regions do not mind.

    Those of 24 bytes are in every eighth.
    """
    ranks(2).run(classify, rows)


def classify(rows: int) -> None:
    """Job: integer labels, under default settings."""
    torch.manual_seed(dist.get_rank())
    x, labels = torch.randn(rows * 8, 6), torch.randint(0, 3, (rows * 8,))
    found = []
    for unrolled in (UNROLLED, 100):
        torch._dynamo.reset()
        torch.manual_seed(0)
        seen: list[Compilation] = []
        model = fxzero.shard(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), zero=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = nn.functional.cross_entropy
        with holding(unrolled), observed(seen.append):
            step = fxzero.compile_step(model, optimizer, loss_fn, micro_batches=8)
            found.append([step(x, labels).loss, *(p.to_local() for p in model.parameters())])
        notes = next(r.notes for r in seen[0].records if r.name == "accumulate")
        assert notes["unrolled"] == min(unrolled, 8)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_ranks_with_other_numbers_of_micro_batches(ranks: Pools) -> None:
    """Their graphs are alike, their steps are not."""
    ranks(2).run(other_numbers)


def other_numbers() -> None:
    """Job."""
    with pytest.raises(fxzero.RanksDisagreeError):
        trained(7 + dist.get_rank(), zero=3, options=EAGER)
