"""`fxzero.shard(…, offload=True)`: the ordinary loop's bits do not change, and copies are made.

Each case trains twice, with shards in the host's memory and without: losses, gradients, parameters,
optimizer state and buffers are the same to the bit; in float64 they are eager PyTorch's, too.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import fxzero
from examples.benchmarks.measure import allocated_peak_bytes
from examples.models import gpt_bench
from fxzero.compiler.compilation import Compilation
from fxzero.schedule.simulate import simulate_memory
from tests.pairwise import Case, pairwise
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES, Batch
from tests.parity.sharded import FLOAT64, TIGHT, compile_eagerly, inner
from tests.parity.training import (
    Tensors,
    assert_same,
    build,
    full_gradients,
    full_optimizer_state,
    full_parameters,
    make_batch,
    mean_over_ranks,
    rows_of_rank,
)
from tests.tiers import in_two_tiers
from tests.tracing import observed

STEPS = 3
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "clipped": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "accumulated": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
}
"""By what a loop does: with `clip_grad_norm_`, or with two backwards to a step."""


def batch_of(example: str, dtype: torch.dtype, seed: int) -> Batch:
    """This rank's rows of a batch."""
    batch = make_batch(EXAMPLES[example], dtype, seed)
    return rows_of_rank(batch) if dist.is_initialized() else batch


def loop(model: nn.Module, example: str, habit: str, dtype: torch.dtype) -> Tensors:
    """All that a few steps leave behind."""
    loss_of = EXAMPLES[example].loss
    optimizer = OPTIMIZERS[habit](model.parameters())
    found: Tensors = {}
    for step in range(STEPS):
        if habit == "accumulated":
            state = fxzero.sharding.shard.model_state(model)
            keeps = state is not None and state.zero < 2
            with fxzero.no_sync(model) if keeps else contextlib.nullcontext():
                loss_of(model, batch_of(example, dtype, 10 + step)).backward()
        loss = loss_of(model, batch_of(example, dtype, step))
        loss.backward()
        found[f"loss {step}"] = mean_over_ranks(loss)
        found |= {f"gradient {step} {name}": g for name, g in full_gradients(model).items()}
        if habit == "clipped":
            norm = clip_grad_norm_(model.parameters(), 0.1)
            found[f"norm {step}"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in inner(model).named_buffers()}
    return {
        **found,
        **full_parameters(model),
        **full_optimizer_state(model, optimizer),
        **buffers,
    }


def trained(
    example: str, zero: int, door: str, habit: str, dtype: torch.dtype, **settings: Any
) -> Tensors:
    """What a sharded model's training leaves."""
    torch._dynamo.reset()
    model = fxzero.shard(build(EXAMPLES[example], dtype), zero=zero, **settings)
    if door == "eager":
        return loop(model, example, habit, dtype)
    found = loop(compile_eagerly(model), example, habit, dtype)
    traffic = fxzero.report(model)
    assert bool(traffic.num_uploads) == bool(traffic.num_downloads) == settings["offload"], traffic
    return found


def trains_alike(
    example: str,
    zero: int,
    door: str,
    habit: str,
    low: torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
    **settings: Any,
) -> None:
    """Job: with `offload`, without, and, where rounding is none, in plain eager mode."""
    dtype = FLOAT64 if low is None else torch.float32
    settings |= {"param_dtype": low, "mesh": mesh}
    host = trained(example, zero, door, habit, dtype, offload=True, **settings)
    device = trained(example, zero, door, habit, dtype, offload=False, **settings)
    assert_same(host, device, rtol=0)
    if low is None and habit != "accumulated" and example != "convnet":
        with contextlib.ExitStack() as stack:
            if dist.is_initialized():
                batches = {s: make_batch(EXAMPLES[example], dtype, s) for s in range(STEPS)}
                stack.enter_context(_patched(batches))
            expected = loop(build(EXAMPLES[example], dtype), example, habit, dtype)
        assert_same(host, expected, TIGHT)


@contextlib.contextmanager
def _patched(batches: dict[int, Batch]) -> Any:
    """Let the reference see all rows."""
    global batch_of
    before, batch_of = batch_of, lambda _example, _dtype, seed: batches[seed]
    try:
        yield
    finally:
        batch_of = before


TWO_RANKS = pairwise(
    ["gpt", "odd_shapes", "convnet"],
    [0, 1, 2, 3],
    ["compiled", "eager"],
    list(OPTIMIZERS),
    [None, torch.bfloat16],
)


def cost(case: Case) -> float:
    """How long a case takes beside others."""
    return (3.0 if case[0] == "gpt" else 1.0) * (2.0 if case[2] == "compiled" else 1.0)


@pytest.mark.parametrize(
    ("example", "zero", "door", "habit", "low"),
    in_two_tiers(
        TWO_RANKS,
        always=[
            ("odd_shapes", 1, "compiled", "clipped", None),
            ("convnet", 0, "compiled", "clipped", None),
        ],
        cost=cost,
    ),
)
def test_two_ranks(
    ranks: Pools, example: str, zero: int, door: str, habit: str, low: torch.dtype | None
) -> None:
    """Each rank copies its own shards: tied, uneven and 0-d parameters among them."""
    ranks(2).run(trains_alike, example, zero, door, habit, low)


def on_two_axes() -> None:
    """Job: four ranks are a mesh of two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    trains_alike("odd_shapes", 3, "compiled", "clipped", mesh=mesh, gather_group=True)


@pytest.mark.exhaustive
def test_replicas_of_shards(ranks: Pools) -> None:
    """HSDP, and gathers in a group of their own."""
    ranks(4).run(on_two_axes)


ONE_RANK = pairwise(
    ["frozen", "graph_break", "lstm"], [0, 3], ["compiled", "eager"], ["fused", "clipped"]
)


@pytest.mark.parametrize(("example", "zero", "door", "habit"), ONE_RANK)
def test_one_process(example: str, zero: int, door: str, habit: str) -> None:
    """Without a process group: frozen parameters, several graphs, what Dynamo leaves to Python."""
    trains_alike(example, zero, door, habit)


@pytest.mark.exhaustive
def test_compiled_regions() -> None:
    """Inductor does not round what it fuses, so that a cast inside of a region stays there."""
    found = []
    for offload in (True, False):
        torch._dynamo.reset()
        model = fxzero.shard(
            build(EXAMPLES["mlp"], torch.float32), param_dtype=torch.bfloat16, offload=offload
        )
        found.append(loop(torch.compile(model, backend="fxzero"), "mlp", "fused", torch.float32))  # type: ignore[arg-type]
    assert_same(*found, rtol=0)


def train_on(offload: bool, state: bytes = b"") -> tuple[Tensors, bytes]:
    """Job: two steps, from the start or from a checkpoint; what they leave, and a checkpoint."""
    torch._dynamo.reset()
    model = fxzero.shard(build(EXAMPLES["odd_shapes"], FLOAT64), zero=3, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    if state:
        loaded = torch.load(io.BytesIO(state), weights_only=False)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        schedule.load_state_dict(loaded["schedule"])
    compiled = compile_eagerly(model)
    for seed in range(2):
        EXAMPLES["odd_shapes"].loss(
            compiled, batch_of("odd_shapes", FLOAT64, seed + 7 * bool(state))
        ).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        schedule.step()
    file = io.BytesIO()
    states = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: copy.deepcopy(one.state_dict()) for name, one in states.items()}, file)  # type: ignore[attr-defined]
    return {**full_parameters(model), **full_optimizer_state(model, optimizer)}, file.getvalue()


def checkpoints_travel() -> None:
    """Job: each way between a run on the host and one that is not."""
    _, host = train_on(True)
    _, device = train_on(False)
    ends = [train_on(to, of)[0] for to, of in ((True, device), (False, host), (False, device))]
    assert_same(ends[0], ends[2], rtol=0)
    assert_same(ends[1], ends[2], rtol=0)


@pytest.mark.exhaustive
def test_checkpoints_travel(ranks: Pools) -> None:
    """State dicts are the same with and without."""
    ranks(2).run(checkpoints_travel)


def whole_steps(zero: int) -> None:
    """Job: `compile_step` holds on the host what `shard` has put there."""
    found = []
    for offload, options in ((True, {}), (False, {"memory": "all_host"}), (False, {})):
        torch._dynamo.reset()
        model = fxzero.shard(build(EXAMPLES["mlp"], FLOAT64), zero=zero, offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = fxzero.compile_step(
            model,
            optimizer,
            nn.functional.mse_loss,
            options={"lower_regions": {"backend": "eager"}, **options},
        )
        losses: Tensors = {}
        for seed in range(2):
            batch = batch_of("mlp", FLOAT64, seed)
            losses[f"loss {seed}"] = step(batch["x"], batch["y"]).loss
        traffic = fxzero.report(model)
        assert bool(traffic.num_downloads) == bool(offload or options), traffic
        found.append({**losses, **full_parameters(model), **full_optimizer_state(model, optimizer)})
    assert_same(found[0], found[1], rtol=0)
    assert_same(found[0], found[2], rtol=0)


def test_whole_steps(ranks: Pools) -> None:
    """By default it is ``memory="all_host"``."""
    ranks(2).run(whole_steps, 3)


def simulated_and_measured(offload: bool) -> tuple[int, int]:
    """What a forward and a backward hold on the device beside what was there before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = gpt_bench(num_layers=2, hidden=128, num_heads=4)
    fxzero.shard(model, zero=3, offload=offload)
    batch = model.example_inputs(2)
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    with observed(keep):
        compiled = compile_eagerly(model)
        train_once(compiled, batch)
    (graph,) = [c.joint for c in found if c.joint is not None]
    memory = simulate_memory(graph, fuses=False)
    measured = min(allocated_peak_bytes(lambda: train_once(compiled, batch)) for _ in range(3))
    return memory.peak_bytes - memory.resident_bytes, measured


def train_once(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    """A backward whose gradients are dropped."""
    model(*batch).backward()
    model.zero_grad()


@pytest.mark.parametrize("offload", [True, False])
def test_the_peak_is_the_simulated_one(offload: bool) -> None:
    """It is where backward begins, when nothing has gone down yet that torch would count, too."""
    simulated, measured = simulated_and_measured(offload)
    assert simulated == pytest.approx(measured, rel=0.01)


def test_training_goes_on_by_an_optimizer_of_the_users_own() -> None:
    """Gradients are the parameters' own on the host: hooks see them, and accumulate in place."""
    seen: list[Tensor] = []
    model = fxzero.shard(build(EXAMPLES["mlp"], FLOAT64), zero=2, offload=True)
    parameter = next(model.parameters())
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    compiled = compile_eagerly(model)
    batch = make_batch(EXAMPLES["mlp"], FLOAT64, 0)
    EXAMPLES["mlp"].loss(compiled, batch).backward()
    first = parameter.grad
    EXAMPLES["mlp"].loss(compiled, batch).backward()
    assert parameter.grad is first
    assert first is not None
    assert torch.equal(first, 2 * seen[0])
