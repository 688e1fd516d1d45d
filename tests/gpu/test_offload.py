"""`fxzero.shard(…, offload=True)` on CUDA: shards and gradients in pinned memory of the host."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxzero
from fxzero._compat import local_tensor
from tests.gpu.test_training import batches, lowerings, two_devices
from tests.parity.models import EXAMPLES, Batch
from tests.parity.training import RTOL, Trace, assert_same, build, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXAMPLE = EXAMPLES["gpt"]


def sharded(zero: int, lowering: str, *, offload: bool, on: str = "cuda", **settings: Any) -> Any:
    """The model, compiled if a lowering is named."""
    model = build(EXAMPLE, torch.float64).to(on)
    fxzero.shard(model, zero=zero, offload=offload, **settings)
    if not lowering:
        return model
    return torch.compile(model, backend="fxzero", options={"lower_regions": {"backend": lowering}})


def fused(parameters: Any) -> torch.optim.Optimizer:
    """On the host and on the device, torch's fused kernel."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def on_cpu(trace: Trace) -> dict[str, Any]:
    """All of a trace on the host, where traces of both kinds can be compared."""
    parts = (trace.losses, trace.gradients, trace.parameters, trace.optimizer_state)
    return {
        f"{i} {name}": None if value is None else value.cpu()
        for i, part in enumerate(parts)
        for name, value in part.items()
    }


def is_home(tensor: torch.Tensor) -> bool:
    """Whether this rank's part is in pinned memory of the host."""
    local = local_tensor(tensor) if hasattr(tensor, "_local_tensor") else tensor  # type: ignore[arg-type]
    return local.device.type == "cpu" and (local.is_pinned() or not local.numel())


@pytest.mark.parametrize("lowering", ["", "eager", "inductor"])
def test_one_device(lowering: str) -> None:
    """Without a process group: eager PyTorch's numbers, from the host's memory."""
    model = sharded(3, lowering, offload=True)
    assert all(map(is_home, model.parameters()))
    host = on_cpu(train(model, EXAMPLE.loss, batches(), fused))
    device = on_cpu(train(build(EXAMPLE, torch.float64).cuda(), EXAMPLE.loss, batches(), fused))
    assert_same(host, device, RTOL[torch.float64])


def test_gradients_are_pinned_and_there_when_backward_returns() -> None:
    """The host may read them at once: it has waited for their copies."""
    model = sharded(3, "eager", offload=True)
    reference = build(EXAMPLE, torch.float64).cuda()
    for batch in batches():
        EXAMPLE.loss(model, batch).backward()
        found = {name: p.grad.clone() for name, p in model._orig_mod.named_parameters()}
        assert all(is_home(p.grad) for p in model.parameters())
        EXAMPLE.loss(reference, batch).backward()
        expected = {name: p.grad.cpu() for name, p in reference.named_parameters()}
        assert_same(found, expected, RTOL[torch.float64])
        model.zero_grad()
        reference.zero_grad()


def test_a_parameter_may_be_written_when_a_graph_has_returned() -> None:
    """No copy to the device still reads what the host writes to behind a forward."""
    width = 2048
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).cuda()
    reference = [layer.weight.detach().clone() for layer in model]
    fxzero.shard(model, offload=True)
    compiled = torch.compile(model, backend="fxzero")
    x = torch.randn(8, width, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            y = compiled(x)
            for parameter in model.parameters():
                parameter.zero_()  # at once, while the device may be computing
            expected = x
            for weight in reference:
                expected = expected @ weight.t()
            torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
            for parameter, weight in zip(model.parameters(), reference, strict=True):
                parameter.copy_(weight.cpu())


def test_the_device_holds_no_shards() -> None:
    """Between two steps nothing of the model is there."""
    once = nn.Linear(8, 8, device="cuda")  # cuBLAS takes its workspaces, in forward and backward
    once(torch.randn(4, 8, device="cuda", requires_grad=True)).sum().backward()
    del once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    fxzero.shard(model, offload=True)
    assert all(map(is_home, model.parameters()))
    compiled = torch.compile(
        model, backend="fxzero", options={"lower_regions": {"backend": "eager"}}
    )
    compiled(torch.randn(4, 1024, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


@two_devices
@lowerings
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_devices(zero: int, lowering: str) -> None:
    """Each rank copies its own shards; the norm of all gradients is taken over gloo."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(on_both, (port, zero, lowering), nprocs=2)  # type: ignore[no-untyped-call]


def on_both(rank: int, port: int, zero: int, lowering: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=2)
    try:
        traces = [
            train(sharded(zero, lowering, offload=offload), EXAMPLE.loss, map(rows, batches()))
            for offload in (True, False)
        ]
        host, device = map(on_cpu, traces)
        assert_same(host, device, RTOL[torch.float64])
        model = sharded(zero, lowering, offload=True)
        EXAMPLE.loss(model, rows(batches()[0])).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).device.type == "cpu"
    finally:
        dist.destroy_process_group()


def rows(batch: Batch) -> Batch:
    """This rank's part."""
    return {name: value.chunk(2)[dist.get_rank()] for name, value in batch.items()}
