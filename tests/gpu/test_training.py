"""Parity on CUDA: one device without collectives, two over NCCL."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import fxzero
from examples.models import gpt_bench
from tests.parity.models import EXAMPLES, Batch
from tests.parity.test_step import WithLoss
from tests.parity.training import (
    RTOL,
    STEPS,
    Trace,
    assert_same,
    assert_same_trace,
    build,
    full_parameters,
    make_batch,
    rows_of_rank,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a device a rank")
lowerings = pytest.mark.parametrize("lowering", ["eager", "inductor"])


def batches(dtype: torch.dtype = torch.float64) -> list[Batch]:
    """The whole batch of each step, on the current device."""
    found = [make_batch(EXAMPLES["gpt"], dtype, seed) for seed in range(STEPS)]
    return [{name: tensor.cuda() for name, tensor in batch.items()} for batch in found]


def eager_trace() -> Trace:
    """The unsharded model on the whole batches, before there are ranks."""
    return train(build(EXAMPLES["gpt"], torch.float64).cuda(), EXAMPLES["gpt"].loss, batches())


def compiled(zero: int, lowering: str, **options: Any) -> Any:
    """The sharded model."""
    model = fxzero.shard(build(EXAMPLES["gpt"], torch.float64).cuda(), zero=zero)
    options |= {"lower_regions": {"backend": lowering}}
    return torch.compile(model, backend="fxzero", options=options)


@lowerings
def test_one_device(lowering: str) -> None:
    """A single process computes what eager PyTorch does."""
    expected = eager_trace()
    model: nn.Module = compiled(3, lowering)
    assert_same_trace(
        train(model, EXAMPLES["gpt"].loss, batches()), expected, rtol=RTOL[torch.float64]
    )


def step_losses(
    lowering: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[list[Tensor], nn.Module]:
    """Train the model by `compile_step`, with a learning rate that changes."""
    torch._dynamo.reset()
    example = EXAMPLES["gpt"]
    model = fxzero.shard(build(example, dtype).cuda(), zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = fxzero.compile_step(
        WithLoss(model, example.loss),
        optimizer,
        clip_grad_norm=0.1,
        scheduler=LambdaLR(optimizer, lambda i: 1 / (i + 1)),
        options={"lower_regions": {"backend": lowering}, **options},
    )
    return [step(**batch).loss for batch in batches(dtype) * 2], model


@lowerings
def test_whole_steps(lowering: str) -> None:
    """`compile_step` computes what the eager loop does."""
    example = EXAMPLES["gpt"]
    losses, model = step_losses(lowering)
    reference = build(example, torch.float64).cuda()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    schedule = LambdaLR(optimizer, lambda i: 1 / (i + 1))
    for batch, actual in zip(batches() * 2, losses, strict=True):
        loss = example.loss(reference, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert (actual - loss).abs() <= 1e-12 * loss.abs()
    assert_same(full_parameters(model), full_parameters(reference), RTOL[torch.float64])


def are_same(found: list[Tensor], expected: list[Tensor], lowering: str) -> bool:
    """Bitwise, or to rounding under Inductor, which times several kernels in each compilation and
    takes the fastest: two compilations of one step differ on a GPU."""
    rtol = 0.0 if lowering == "eager" else 1e-5
    pairs = zip(found, expected, strict=True)
    return all((a - b).abs() <= rtol * b.abs() for a, b in pairs)


@lowerings
def test_a_cuda_graph_computes_the_same(lowering: str) -> None:
    """Learning rates and batches change from step to step, and take effect."""
    plain, model = step_losses(lowering, torch.float32)
    replayed, other = step_losses(lowering, torch.float32, cuda_graph=True, strict=True)
    assert are_same(replayed, plain, lowering)
    rtol = 0 if lowering == "eager" else 1e-5
    assert_same(full_parameters(other), full_parameters(model), rtol=rtol)


def test_a_cuda_graph_in_float64_is_refused() -> None:
    """Its learning rates would be rounded to float32 by torch's kernels."""
    with pytest.raises(fxzero.FxZeroError, match="float64"):
        step_losses("eager", cuda_graph=True, strict=True)


@lowerings
@pytest.mark.parametrize("share", [0.9, 0.6])
def test_a_memory_budget_holds(lowering: str, share: float) -> None:
    """What the allocator counts is no more, and the losses are the same."""
    losses, peaks = {}, {}
    for budget in (0, 1):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = gpt_bench(num_layers=4, hidden=512, num_heads=8)
        batch = [tensor.cuda() for tensor in model.example_inputs(8)]
        fxzero.shard(model.cuda(), zero=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        held = sum(3 * p.numel() * p.element_size() for p in model.parameters())
        options: dict[str, Any] = {"lower_regions": {"backend": lowering}, "recompute": {}}
        if budget:
            options |= {"memory_budget": int(held + share * (peaks[0] - held))}
        step = fxzero.compile_step(model, optimizer, options=options)
        losses[budget] = [step(*batch).loss for _ in range(3)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(*batch)
        torch.cuda.synchronize()
        peaks[budget] = torch.cuda.max_memory_allocated() - before + held
        if budget:
            assert peaks[1] <= options["memory_budget"]
        del model, optimizer, step
    assert are_same(losses[1], losses[0], lowering)


@two_devices
@lowerings
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_devices(zero: int, lowering: str) -> None:
    """Two ranks over NCCL compute what one process does on the whole batch."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(on_nccl, (port, zero, lowering), nprocs=2)  # type: ignore[no-untyped-call]


def on_nccl(rank: int, port: int, zero: int, lowering: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    expected = eager_trace()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl", rank=rank, world_size=2)
    try:
        parts = [rows_of_rank(batch) for batch in batches()]
        trace = train(compiled(zero, lowering), EXAMPLES["gpt"].loss, parts)
        assert_same_trace(trace, expected, rtol=RTOL[torch.float64])
        in_places = compiled(zero, lowering, slab={"enabled": True}, prefetch={"keep": False})
        assert_same_trace(train(in_places, EXAMPLES["gpt"].loss, parts), trace, rtol=0)
    finally:
        dist.destroy_process_group()
