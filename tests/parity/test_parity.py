"""Whole training runs: sharded and compiled on 1 to 4 ranks, against eager and unsharded.

Losses, the gradients of the first step, parameters, optimizer state and buffers after
five AdamW steps. Every rank trains on its rows; the reference is one model that sees all
of them. (For batch norm, whose statistics are those of a rank, it is torch's DDP.)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import fxzero
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES, Batch, Example
from tests.parity.training import (
    RTOL,
    STEPS,
    Tensors,
    Trace,
    assert_same,
    assert_same_trace,
    build,
    full_gradients,
    make_batch,
    mean_over_ranks,
    rows_of_rank,
    train,
)
from tests.tiers import exhaustive

STAGES = (0, 1, 2, 3)
GRAPHS = {"graph_break": 2}
"""How many graphs Dynamo makes of a model, where it is not one."""


@dataclass(frozen=True)
class Case:
    """One way to compile one model."""

    example: str
    zero: int
    dtype: torch.dtype = torch.float64
    lowering: str = "eager"

    def compiled(self, **dtypes: torch.dtype) -> nn.Module:
        """The example, sharded and compiled."""
        model = fxzero.shard(build(EXAMPLES[self.example], self.dtype), zero=self.zero, **dtypes)
        options = {"lower_regions": {"backend": self.lowering}}
        return torch.compile(model, backend="fxzero", options=options)  # type: ignore[return-value]


def in_worlds(**examples: str) -> pytest.MarkDecorator:
    """Parametrise by world and example: ``in_worlds(two="mlp gpt")``."""
    sizes = {"one": 1, "two": 2, "three": 3, "four": 4}
    pairs = [(sizes[size], name) for size, names in examples.items() for name in names.split()]
    return pytest.mark.parametrize(("world", "example"), pairs)


FLOAT64 = {
    1: {"gpt": (0, 3), "odd_shapes": (1, 2)},
    2: dict.fromkeys(EXAMPLES, STAGES),
    3: {"gpt": (1, 3), "convnet": (0, 2), "odd_shapes": STAGES},
    4: {"graph_break": (1, 3), "odd_shapes": STAGES},
}
"""The stages by world and example: every example at every stage on two ranks; on other numbers of
ranks those whose rows do not divide, and every stage with some of the others."""


EVERY_RUN = {
    1: {"gpt": (), "odd_shapes": (1,)},
    2: dict.fromkeys(EXAMPLES, (3,)) | {"odd_shapes": STAGES},
    3: {"gpt": (), "convnet": (), "odd_shapes": (3,)},
    4: {"graph_break": (), "odd_shapes": ()},
}
"""On two ranks every example where every read is a gather, and one at every stage."""


@pytest.mark.parametrize(
    ("world", "example", "zero"),
    [
        (w, name, z) if z in EVERY_RUN[w][name] else exhaustive((w, name, z))[0]
        for w, names in FLOAT64.items()
        for name, zs in names.items()
        for z in zs
    ],
)
def test_float64(ranks: Pools, world: int, example: str, zero: int) -> None:
    """No rounding to hide behind."""
    ranks(world).run(train_as_the_reference, Case(example, zero, torch.float64))


@pytest.mark.parametrize("zero", [3, *exhaustive(0, 1, 2)])
@in_worlds(two="gpt")
def test_float32(ranks: Pools, world: int, example: str, zero: int) -> None:
    """The dtype that models are trained in; its first gradients to the bit (see `test_bitwise`)."""
    ranks(world).run(train_to_the_bit, Case(example, zero, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "zero"),
    [
        *(("mlp", zero) for zero in STAGES),
        *exhaustive(("gpt", 3), ("gpt", 0), ("convnet", 1)),
    ],
)
@pytest.mark.parametrize("world", [2])
def test_inductor(ranks: Pools, world: int, example: str, zero: int) -> None:
    """Regions compiled to C++."""
    case = Case(example, zero, torch.float32, lowering="inductor")
    ranks(world).run(train_as_the_reference, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [3])
@in_worlds(two="mlp")
def test_inductor_in_float64(ranks: Pools, world: int, example: str, zero: int) -> None:
    """Regions compiled to C++, no rounding to hide behind."""
    case = Case(example, zero, torch.float64, lowering="inductor")
    ranks(world).run(train_as_the_reference, case)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("example", "zero"),
    [
        *(("odd_shapes", stage) for stage in STAGES),
        ("unet", 1),
        *exhaustive(("unet", 2)),
    ],
)
def test_bitwise(ranks: Pools, world: int, example: str, zero: int) -> None:
    """Two ranks add up in one order, and each adds the uses of a parameter as autograd does."""
    ranks(world).run(average_bit_by_bit, Case(example, zero, torch.float32))


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("example", "zero"),
    [
        *(("mlp", zero) for zero in STAGES),
        *exhaustive(*(("gpt", zero) for zero in STAGES)),
    ],
)
def test_bfloat16_compute(ranks: Pools, world: int, example: str, zero: int) -> None:
    """float32 masters, bfloat16 compute, float32 reduction."""
    ranks(world).run(compute_in_bfloat16, Case(example, zero, torch.float32))


def train_to_the_bit(case: Case) -> None:
    """Job: train, and compare what is left behind, and the first gradients with their average."""
    actual = trained_as_the_reference(case)
    assert_same(actual.gradients, averaged_gradients(case), rtol=0)


def train_as_the_reference(case: Case) -> None:
    """Job: train, and compare everything that is left behind."""
    trained_as_the_reference(case)


def trained_as_the_reference(case: Case) -> Trace:
    """What training leaves behind, which is what the reference does."""
    example = EXAMPLES[case.example]
    expected = reference_trace(case.example, case.dtype)
    counters.clear()
    batches = map(rows_of_rank, batches_of(example, case.dtype))
    actual = train(case.compiled(), example.loss, batches)
    assert_compiled_once(case.example)
    assert_same_trace(actual, expected, RTOL[case.dtype])
    return actual


def batches_of(example: Example, dtype: torch.dtype) -> list[Batch]:
    """One for each step, over all ranks."""
    return [make_batch(example, dtype, seed) for seed in range(STEPS)]


@functools.cache
def reference_trace(name: str, dtype: torch.dtype) -> Trace:
    """Train without fxzero and without compiling: once in a rank for all stages."""
    example = EXAMPLES[name]
    model, batches = build(example, dtype), batches_of(example, dtype)
    if example.name != "convnet":
        return train(model, example.loss, batches)
    # Statistics are of a rank's rows; each forward begins with those of rank 0, and so does what
    # comes after the last one under fxzero.
    trace = train(DistributedDataParallel(model), example.loss, map(rows_of_rank, batches))
    for buffer in trace.buffers.values():
        assert buffer is not None
        dist.broadcast(buffer, src=0)
    return trace


def assert_compiled_once(example: str) -> None:
    """An uncompiled run would give the right numbers too; so would one compiled at each step."""
    graphs = counters["stats"]["unique_graphs"]
    if example == "lstm":  # reading parameters in eager mode may give rise to graphs as well
        assert graphs >= 1, "no graph was compiled"
        return
    expected = GRAPHS.get(example, 1)
    breaks = dict(counters["graph_break"])
    assert graphs == expected, f"{graphs} graphs where {expected} is expected; {breaks}"


def average_bit_by_bit(case: Case) -> None:
    """Job: the first gradients, against each rank's own, averaged."""
    example = EXAMPLES[case.example]
    expected = averaged_gradients(case)
    model = case.compiled()
    example.loss(model, rows_of_rank(make_batch(example, case.dtype, seed=0))).backward()
    assert_same(full_gradients(model), expected, rtol=0)


def averaged_gradients(case: Case) -> Tensors:
    """Those of the first batch: each rank's own, of its rows, averaged."""
    example = EXAMPLES[case.example]
    replica = build(example, case.dtype)
    example.loss(replica, rows_of_rank(make_batch(example, case.dtype, seed=0))).backward()
    return averaged(full_gradients(replica))


def averaged(gradients: Tensors) -> Tensors:
    """The mean over the ranks of each gradient."""
    return {name: None if g is None else mean_over_ranks(g) for name, g in gradients.items()}


def compute_in_bfloat16(case: Case) -> None:
    """Job: the first gradients, against casts written out by hand.

    Both sides run the same bfloat16 kernels on the same values, add the uses of a
    parameter in bfloat16 and the two ranks in float32: nothing may differ.
    """
    example = EXAMPLES[case.example]
    batch = rows_of_rank(make_batch(example, torch.bfloat16, seed=0))
    expected_loss, expected = bfloat16_reference(example, batch)
    model = case.compiled(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    loss = example.loss(model, batch)
    loss.backward()
    assert_same({"loss": loss.detach()}, {"loss": expected_loss}, rtol=0)
    assert_same(full_gradients(model), expected, rtol=0)


def bfloat16_reference(example: Example, batch: Batch) -> tuple[Tensor, Tensors]:
    """This rank's loss, and the gradients averaged over ranks in float32."""
    masters = build(example, torch.float32)
    casts = {name: p.to(torch.bfloat16) for name, p in masters.named_parameters()}

    def in_bfloat16(*inputs: Tensor) -> Tensor:
        return torch.func.functional_call(masters, casts, inputs)

    loss = example.loss(in_bfloat16, batch)  # type: ignore[arg-type]
    loss.backward()
    return loss.detach(), averaged(full_gradients(masters))
