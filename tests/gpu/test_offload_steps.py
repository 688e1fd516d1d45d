"""Whole steps on CUDA that hold part of what they have on the host, or on disk.

What is updated on the device has the bits of the same step without offload; what is updated on the
host those of torch's fused kernel there, to 1e-12 in float64. Peaks, overlap, what scripts write
between two steps, checkpoints, overflows and late updates as on a CPU.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from examples.models import gpt_bench
from fxzero._compat import local_tensor
from fxzero.compiler.compilation import Compilation
from fxzero.runtime.residents import _residents
from fxzero.schedule.simulate import simulate_memory
from tests.gpu.test_training import two_devices
from tests.parity.models import EXAMPLES
from tests.parity.test_step import WithLoss
from tests.parity.training import RTOL, assert_same, build, make_batch, rows_of_rank
from tests.tracing import observed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
EXAMPLE = EXAMPLES["gpt"]
EAGER: dict[str, Any] = {"lower_regions": {"backend": "eager"}}
VALUES: dict[str, Any] = {"offload_activations": {"share": 1.0, "min_bytes": 1}}
STEPS = 3
ROWS = 16
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
ON_HOST = ["states_host", "all_host", "l2l", "infinity"]
ON_DEVICE = ["states_host, device", "all_host, device", "l2l, device"]


def held_by(memory: str) -> dict[str, Any]:
    """Settings of a preset, with ``, device`` updated there; pieces on disk are small."""
    preset, _, update = memory.partition(", ")
    return {
        "memory": preset,
        **({"offload_states": {"update": update}} if update else {}),
        **({"disk": {"chunk_bytes": 4096}} if preset == "infinity" else {}),
    }


def on_host(value: Tensor) -> Tensor:
    """A copy of a tensor's local part there."""
    part = local_tensor(value) if hasattr(value, "_local_tensor") else value  # type: ignore[arg-type]
    return part.detach().to("cpu", copy=True)


class Training:
    """A model in training on the device, by whole steps."""

    def __init__(
        self,
        memory: str = "none",
        optimizer: str = "adamw",
        *,
        offload: bool = False,
        dtype: torch.dtype = torch.float64,
        example: str = "gpt",
        zero: int = 0,
        more: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        torch._dynamo.reset()
        self.example = EXAMPLES[example]
        self.dtype = dtype
        self.model = build(self.example, dtype).to(DEVICE)
        fxzero.shard(self.model, zero, offload=offload)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.step = fxzero.compile_step(
            WithLoss(self.model, self.example.loss),
            self.optimizer,
            options={**EAGER, **held_by(memory), **(more or {})},
            **rest,
        )
        self.seen: list[Tensor] = []
        self.skipped: list[bool] = []

    def run(self, steps: int = STEPS, scale: float = 1.0) -> Training:
        """Train on some more batches."""
        for _ in range(steps):
            batch = make_batch(self.example, self.dtype, len(self.skipped), ROWS)
            batch = rows_of_rank(batch) if dist.is_initialized() else batch
            on_device = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
            if "x" in on_device:
                on_device["x"] = on_device["x"] * scale
            out = self.step(**on_device)
            self.seen += [out.loss, *([] if out.grad_norm is None else [out.grad_norm])]
            self.skipped.append(out.skipped)
        return self

    def left(self) -> dict[str, Tensor]:
        """All that there is to compare, on the host."""
        found = {f"seen {i}": on_host(value) for i, value in enumerate(self.seen)}
        for name, parameter in self.model.named_parameters():
            found[name] = on_host(parameter)
            for what, value in self.optimizer.state[parameter].items():
                found[f"{name} {what}"] = on_host(value)
        return found


def same(one: Training, other: Training) -> bool:
    """Whether two trainings have left the same bits."""
    mine, theirs = one.left(), other.left()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def by_hand(optimizer: str, clip: float | None, micro_batches: int) -> dict[str, Tensor]:
    """Gradients of the device, eagerly, and torch's fused kernel on the host."""
    model = build(EXAMPLE, torch.float64).to(DEVICE)
    names = [name for name, _ in model.named_parameters()]
    masters = [nn.Parameter(on_host(p)) for p in model.parameters()]
    update = OPTIMIZERS[optimizer](masters)
    seen: list[Tensor] = []
    for step in range(STEPS):
        batch = make_batch(EXAMPLE, torch.float64, step, ROWS)
        parts = {name: value.to(DEVICE).chunk(micro_batches) for name, value in batch.items()}
        losses = []
        for i in range(micro_batches):
            loss = EXAMPLE.loss(model, {name: own[i] for name, own in parts.items()})
            (loss / micro_batches).backward()
            losses.append(loss.detach())
        seen.append(torch.stack(losses).mean())
        if clip is not None:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = on_host(parameter.grad)
        update.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
    found = {f"seen {i}": on_host(value) for i, value in enumerate(seen)}
    for name, master in zip(names, masters, strict=True):
        found[name] = on_host(master)
        for what, value in update.state[master].items():
            found[f"{name} {what}"] = on_host(value)
    return found


everywhere = [
    pytest.mark.parametrize("optimizer", list(OPTIMIZERS)),
    pytest.mark.parametrize("clip", [None, 0.1]),
    pytest.mark.parametrize("micro_batches", [1, 4]),
]


def in_all_ways(test: Callable[..., None]) -> Callable[..., None]:
    """With and without momentum of both kinds, clipping, micro-batches."""
    for mark in everywhere:
        test = mark(test)
    return test


@in_all_ways
@pytest.mark.parametrize("memory", ON_HOST)
def test_updates_on_the_host(
    memory: str, optimizer: str, clip: float | None, micro_batches: int
) -> None:
    """What a loop does that is written out."""
    rest = {"clip_grad_norm": clip, "micro_batches": micro_batches}
    training = Training(memory, optimizer, offload=True, more=VALUES, **rest).run()
    assert_same(training.left(), by_hand(optimizer, clip, micro_batches), RTOL[torch.float64])  # type: ignore[arg-type]


@in_all_ways
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("memory", ON_DEVICE)
def test_updates_on_the_device(
    memory: str, offload: bool, optimizer: str, clip: float | None, micro_batches: int
) -> None:
    """The bits of the same step without offload."""
    if not offload and memory != "states_host, device":
        pytest.skip("only shard(offload=True) keeps parameters on the host of a GPU")
    rest = {"clip_grad_norm": clip, "micro_batches": micro_batches}
    training = Training(memory, optimizer, offload=offload, more=VALUES, **rest).run()
    assert same(training, Training("none", optimizer, **rest).run())


def test_presets_have_the_same_bits() -> None:
    """Where things are held changes nothing: one kernel updates them all."""
    first, *others = (Training(memory, offload=True).run() for memory in ON_HOST)
    assert all(same(first, other) for other in others)


@pytest.mark.parametrize("memory", ["states_host", "all_host", "states_host, device"])
def test_low_precision(memory: str) -> None:
    """bf16 on the device, fp32 masters on the host: what is sent is cast there."""
    offloaded, plain = (
        Training(kind, offload=offload, dtype=torch.float32, precision="bf16").run()
        for kind, offload in ((memory, True), ("none", False))
    )
    if memory.endswith("device"):
        assert same(offloaded, plain)
    else:
        assert_same(offloaded.left(), plain.left(), rtol=2e-2)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["states_host", "all_host"])
def test_default_settings(memory: str) -> None:
    """With compiled regions."""
    offloaded, plain = (
        Training(kind, offload=offload, more={"lower_regions": {"backend": "inductor"}}).run()
        for kind, offload in ((memory, True), ("none", False))
    )
    assert_same(offloaded.left(), plain.left(), RTOL[torch.float64])  # type: ignore[arg-type]


@two_devices
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_devices(zero: int) -> None:
    """Each rank copies its own shards; state that streams needs a group for the host, too."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(on_both, (port, zero), nprocs=2)  # type: ignore[no-untyped-call]


def on_both(rank: int, port: int, zero: int) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=2)
    try:
        rest: dict[str, Any] = {"zero": zero, "clip_grad_norm": 0.1, "micro_batches": 4}
        plain = Training("none", **rest).run()
        for memory in ("states_host", "all_host", "infinity"):
            training = Training(memory, offload=True, more=VALUES, **rest).run()
            assert_same(training.left(), plain.left(), RTOL[torch.float64])  # type: ignore[arg-type]
        for memory, offload in (("states_host, device", False), ("all_host, device", True)):
            assert same(Training(memory, offload=offload, more=VALUES, **rest).run(), plain)
    finally:
        dist.destroy_process_group()


# -- where things are


def held(training: Training) -> Iterator[tuple[str, Tensor]]:
    """Parameters and their state, by what they are."""
    for parameter in training.model.parameters():
        yield "", parameter
        yield from training.optimizer.state[parameter].items()


def is_pinned(tensor: Tensor) -> bool:
    """Whether it is in memory of the host that a GPU reads by itself."""
    return tensor.device.type == "cpu" and (tensor.is_pinned() or not tensor.numel())


@pytest.mark.parametrize("memory", ["states_host", "all_host"])
def test_what_lives_on_the_host_is_pinned(memory: str) -> None:
    """Parameters, and all of their state."""
    training = Training(memory, offload=True).run(2)
    assert all(is_pinned(tensor) for _, tensor in held(training))


def test_state_alone_lives_on_the_host() -> None:
    """Where parameters stay on the device; step counts are beside them."""
    training = Training("states_host, device").run(2)
    for what, tensor in held(training):
        assert is_pinned(tensor) == what.startswith("exp_avg"), what


def test_the_device_holds_nothing_between_two_steps() -> None:
    """Neither parameters nor state."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    fxzero.shard(model.cuda(), offload=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = fxzero.compile_step(model, optimizer, nn.functional.mse_loss, options=EAGER)
    x = torch.randn(4, 1024, device=DEVICE)
    for _ in range(2):
        step(x, x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_an_ordinary_step_between_two_steps() -> None:
    """State that streams is with its parameters for whoever calls ``optimizer.step()``."""
    offloaded, plain = (Training(kind).run(2) for kind in ("states_host, device", "none"))
    for training in (offloaded, plain):
        for parameter in training.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.run(1)
    assert same(offloaded, plain)


# -- between two steps


@pytest.mark.parametrize("memory", ["states_host", "all_host"])
def test_what_a_script_writes_at_once(memory: str) -> None:
    """While copies of what an update has left may still be on their way."""
    trained = []
    for settle in (False, True):
        training = Training(memory, offload=True)
        for _ in range(4):
            training.run(1)
            if settle:
                torch.cuda.synchronize()
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.data.mul_(0.9)
        trained.append(training)
    assert same(*trained)
    for resident in _residents.get(trained[0].optimizer, {}).values():
        assert all(map(is_pinned, resident.sent))


@pytest.mark.parametrize("memory", ["states_host", "states_host, device", "all_host", "infinity"])
def test_checkpoints_travel_both_ways(memory: str) -> None:
    """Between a run that holds part of what it has on the host and one that does not."""
    offload = memory != "states_host, device"
    one, other = Training(memory, offload=offload).run(2), Training("none").run(2)
    for there, back in ((one, other), (other, one)):
        back.model.load_state_dict(copy.deepcopy(there.model.state_dict()))
        back.optimizer.load_state_dict(copy.deepcopy(there.optimizer.state_dict()))
        one.run(1)
        other.run(1)
        assert_same(one.left(), other.left(), RTOL[torch.float64])  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["states_host", "states_host, device", "all_host"])
def test_an_overflow_changes_nothing(memory: str) -> None:
    """In fp16: whether a step is skipped the host learns from the device."""
    training = Training(
        memory, offload=True, dtype=torch.float32, example="mlp", precision="fp16"
    ).run(2)
    before = {k: v for k, v in training.left().items() if not k.startswith("seen")}
    training.run(1, scale=1e6)
    after = training.left()
    assert training.skipped == [False, False, True]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    training.run(1)
    assert training.skipped[-1] is False
    assert any(not torch.equal(value, training.left()[name]) for name, value in before.items())


def test_late_updates() -> None:
    """They use gradients of the step before, with its learning rate, beside this one's work."""
    late = Training("states_host", offload=True, more={"offload_states": {"delay": 1}}).run(4)
    late.step.use_gradients()
    again = Training("states_host", offload=True, more={"offload_states": {"delay": 1}})
    for _ in range(4):
        again.run(1)
        torch.cuda.synchronize()
    again.step.use_gradients()
    assert same(late, again)
    assert not same(late, Training("states_host", offload=True).run(4))


def test_memory_of_the_host_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before anything has moved; the device goes on."""
    cudart = torch.cuda.cudart()

    class Refuses:
        def __getattr__(self, name: str) -> Any:
            return getattr(cudart, name)

        def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
            return int(cudart.cudaHostRegister(0, 1 << 50, 0))

    monkeypatch.setattr(torch.cuda, "cudart", Refuses)
    training = Training("all_host", offload=True)
    with pytest.raises(fxzero.HostMemoryError, match=r"pool host.*ulimit -l"):
        training.run(1)
    assert (torch.ones(3, device=DEVICE) * 2).sum().item() == 6


# -- memory and time


def large(memory: str, **more: Any) -> tuple[Any, Callable[[], Any], list[Compilation]]:
    """A GPT of which a step takes some milliseconds, and the step on a batch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = gpt_bench(num_layers=8, hidden=1024, num_heads=16)
    batch = [tensor.to(DEVICE) for tensor in model.example_inputs(8)]
    held_there = memory not in ("none", "states_host, device")
    fxzero.shard(model.to(DEVICE), offload=held_there)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    options = {**EAGER, **held_by(memory), **more}
    if memory == "infinity":
        del options["disk"]
    step = fxzero.compile_step(model, optimizer, options=options)
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    with observed(keep):
        for _ in range(3):
            step(*batch)
    return model, lambda: step(*batch), found


@pytest.mark.parametrize("memory", ["none", *ON_HOST, *ON_DEVICE])
def test_the_peak_is_the_simulated_one(memory: str) -> None:
    """Within five per cent of what torch's allocator counts."""
    values = {"offload_activations": {"share": 1.0 if memory != "none" else 0.0}}
    _, step, found = large(memory, **values)
    (graph,) = [c.joint for c in found if c.joint is not None]
    simulated = simulate_memory(graph, fuses=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before + simulated.resident_bytes
    assert simulated.peak_bytes == pytest.approx(measured, rel=0.05)


def seconds(action: Callable[[], Any], repeats: int = 5) -> float:
    """What an action takes until the device is done, at best."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


def copied_s(num_bytes: int, *, up: bool) -> float:
    """What so many bytes take one way."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    target, source = (device, host) if up else (host, device)
    return seconds(lambda: target.copy_(source, non_blocking=True))


def updated_s(model: nn.Module) -> float:
    """What torch's fused AdamW on the host takes for all parameters."""
    own = [nn.Parameter(on_host(p)) for p in model.parameters()]
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer = OPTIMIZERS["adamw"](own)
    optimizer.step()
    return seconds(optimizer.step)


@pytest.mark.parametrize("memory", ["states_host", "all_host", "states_host, device"])
def test_a_step_takes_as_long_as_the_longest_of_its_lanes(memory: str) -> None:
    """At most a tenth more than compute, copies up, copies down or updates alone would."""
    _, plain, _ = large("none")
    compute_s = seconds(plain)
    del plain
    model, step, _ = large(memory)
    before = fxzero.report(model)
    step()
    after = fxzero.report(model)
    up = after.uploaded_bytes - before.uploaded_bytes
    down = after.downloaded_bytes - before.downloaded_bytes
    bounds = [
        compute_s,
        copied_s(up, up=True) if up else 0.0,
        copied_s(down, up=False) if down else 0.0,
        updated_s(model) if "device" not in memory else 0.0,
    ]
    assert seconds(step) <= 1.10 * max(bounds), bounds
