"""Steps that hold part of what they have on the host: bit by bit those that hold all on the device.

Each case trains twice, with a preset of `memory` (and with saved values on the host) and without:
losses, norms, parameters, optimizer state and buffers are compared, NaN by its bits.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from examples.benchmarks.measure import allocated_peak_bytes
from examples.models import gpt_bench
from fxzero._compat import shares_memory
from fxzero.compiler.compilation import Compilation
from fxzero.runtime.arena import HostArena, arena_of
from fxzero.runtime.disk_arena import disk_arena_of
from fxzero.schedule.simulate import simulate_memory
from tests.pairwise import Case, pairwise
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES
from tests.parity.test_step import OPTIMIZERS, WithLoss, two_groups, warm_up
from tests.parity.training import build, make_batch
from tests.tiers import exhaustive, in_two_tiers
from tests.tracing import observed

ROWS = 16
STEPS = 3
EAGER = {"lower_regions": {"backend": "eager"}}
HOST = {"memory": "states_host"}
VALUES = {"offload_activations": {"share": 1.0, "min_bytes": 1}}
"""Saved values on the host, however small."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part, as bytes of its own."""
    part = getattr(tensor, "_local_tensor", tensor).detach().contiguous()
    return part.reshape(-1).view(torch.uint8).clone()


class Training:
    """A model in training."""

    def __init__(
        self, example: str, optimizer: str, zero: int | None, options: dict[str, Any], **step: Any
    ) -> None:
        torch._dynamo.reset()
        self.example = EXAMPLES[example]
        self.model = build(self.example, torch.float32)
        if zero is not None:
            fxzero.shard(self.model, zero=zero)
        self.optimizer = OPTIMIZERS[optimizer](two_groups(self.model))
        self.with_loss = WithLoss(self.model, self.example.loss)
        self.step = fxzero.compile_step(
            self.with_loss,
            self.optimizer,
            scheduler=warm_up(self.optimizer),
            options=options,
            **step,
        )
        self.seen: list[Tensor] = []

    def run(self, steps: int = STEPS, rows: int = ROWS, scale: float = 1.0) -> Training:
        """Train on some more batches."""
        for _ in range(steps):
            seed = 1000 * dist.get_rank() if dist.is_initialized() else 0
            batch = make_batch(self.example, torch.float32, seed + len(self.seen), rows)
            if "x" in batch:
                batch["x"] = batch["x"] * scale
            out = self.step(**batch)
            self.seen.append(out.loss)
            if out.grad_norm is not None:
                self.seen.append(out.grad_norm)
        return self

    @property
    def arena(self) -> HostArena:
        """Where it holds what is on the host."""
        found = arena_of(self.optimizer)
        assert found is not None
        return found

    def left(self) -> list[Tensor]:
        """All that there is to compare."""
        parameters = list(self.model.parameters())
        state = [v for p in parameters for v in self.optimizer.state[p].values()]
        return [local(t) for t in (*self.seen, *parameters, *state, *self.model.buffers())]


def same(one: Training, other: Training) -> bool:
    """Whether two trainings have left the same."""
    mine, theirs = one.left(), other.left()
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def trains_alike(
    example: str, optimizer: str, zero: int | None, options: dict[str, Any], **step: Any
) -> bool:
    """Whether a case trains alike with state on the host."""
    offload = (
        *("memory", "throttle", "offload_activations", "offload_states", "offload_params"),
        *("host_budget", "disk"),
    )
    base = {name: value for name, value in options.items() if name not in offload}
    plain = Training(example, optimizer, zero, base, **step).run()
    offloaded = Training(example, optimizer, zero, options, **step).run()
    on_device = options.get("offload_states", {}).get("update") == "device"
    stay = {"step"} if on_device else set()
    if on_device and options["memory"] == "states_host":
        stay.add("")  # parameters, but for masters
    strays = away(offloaded, stay) if arena_of(offloaded.optimizer) else []
    if dist.is_initialized():  # gloo's threads let go of what they have sent when they please
        strays = [stray for stray in strays if not stray.endswith(" True")]
    assert not strays, strays
    return same(plain, offloaded)


def is_at_home(training: Training) -> bool:
    """Whether all parameters and their state lie in the arena."""
    return not away(training)


def away(training: Training, stay: Collection[str] = ()) -> list[str]:
    """Parameters and state that do not, and whether something else looks at them.

    Args:
        stay: names of state, "" for parameters, that need not.
    """
    memory = training.arena.memory
    places = [(memory.data_ptr(), memory.data_ptr() + memory.nbytes)]
    disk = disk_arena_of(training.optimizer)
    if disk is not None:
        places.append((disk.store.address, disk.store.address + disk.num_bytes))
    found = []
    for name, parameter in training.model.named_parameters():
        state = training.optimizer.state[parameter]
        for what, value in (("", parameter), *state.items()):
            tensor = getattr(value, "_local_tensor", value)
            is_home = any(a <= tensor.data_ptr() < b for a, b in places)
            if tensor.numel() and what not in stay and not is_home:
                found.append(f"{name} {what} {shares_memory(tensor)}")
    return found


def held_by(memory: str) -> dict[str, Any]:
    """Settings of a preset, updated on the device if that is added; pieces on disk are small, so
    that updates take several."""
    preset, _, update = memory.partition(", ")
    more: dict[str, Any] = {"offload_states": {"update": update}} if update else {}
    return {
        "memory": preset,
        **more,
        **({"disk": {"chunk_bytes": 4096}} if preset == "infinity" else {}),
    }


PRESETS = [
    "states_host",
    "states_host, device",
    "all_host",
    "all_host, device",
    "l2l",
    "l2l, device",
    "infinity",
]


CASES = pairwise(
    ["gpt", "convnet"],
    ["adamw", "sgd", "amsgrad", "plain_sgd", "adagrad"],
    [None, 0, 1, 2, 3],
    [1, 4, 8],
    [None, 0.1],
    [None, "bf16", "fp16"],
    PRESETS,
    [False, True],
)


def cost(case: Case) -> float:
    """How long a case takes beside others: layers of attention are compiled for three times as
    long as what has none, eight micro-batches as five."""
    return (3.0 if case[0] == "gpt" else 1.0) * (2.0 if case[3] > 1 else 1.0)


@pytest.mark.parametrize(
    ("example", "optimizer", "zero", "micro_batches", "clip", "low", "memory", "values"),
    in_two_tiers(
        CASES,
        cost=cost,
    ),
)
def test_one_rank(
    example: str,
    optimizer: str,
    zero: int | None,
    micro_batches: int,
    clip: float | None,
    low: Any,
    memory: str,
    values: bool,
) -> None:
    """Whatever updates, in one process."""
    rest = {"micro_batches": micro_batches, "clip_grad_norm": clip, "precision": low}
    options = {**EAGER, **(VALUES if values else {}), **held_by(memory)}
    if (optimizer, low, memory) == ("plain_sgd", None, "states_host, device"):
        with pytest.warns(fxzero.FxZeroWarning, match="keeps no state"):
            assert trains_alike(example, optimizer, zero, options, **rest)
    else:
        assert trains_alike(example, optimizer, zero, options, **rest)


SEVERAL = pairwise(
    ["gpt", "mlp"],
    ["adamw", "sgd"],
    [0, 1, 2, 3],
    [1, 4],
    [None, 0.1],
    [None, "bf16"],
    PRESETS,
)


@pytest.mark.parametrize(
    ("example", "optimizer", "zero", "micro_batches", "clip", "low", "memory"),
    in_two_tiers(SEVERAL, cost=cost),
)
def test_two_ranks(
    ranks: Pools,
    example: str,
    optimizer: str,
    zero: int,
    micro_batches: int,
    clip: float | None,
    low: Any,
    memory: str,
) -> None:
    """Each rank holds its own shards on its host."""
    rest = {"micro_batches": micro_batches, "clip_grad_norm": clip, "precision": low}
    options = {**EAGER, **VALUES, **held_by(memory)}
    assert all(ranks(2).run(trains_alike, example, optimizer, zero, options, **rest))


@pytest.mark.parametrize(
    ("example", "zero", "memory"),
    [
        ("mlp", 3, "infinity"),
        *exhaustive(
            ("gpt", 3, "infinity"),
            ("gpt", 0, "all_host"),
            ("gpt", 3, "states_host"),
            ("gpt", 3, "states_host, device"),
        ),
    ],
)
def test_default_settings(ranks: Pools, example: str, zero: int, memory: str) -> None:
    """With compiled regions."""
    assert all(ranks(2).run(trains_alike, example, "adamw", zero, held_by(memory)))


def test_training_goes_on_elsewhere_and_comes_back() -> None:
    """State dicts travel between a run with state on the host and one without, both ways."""
    plain, host = (Training("gpt", "adamw", 3, {**EAGER, **more}) for more in ({}, HOST))
    plain.run(2)
    host.run(2)
    for there, back in ((plain, host), (host, plain)):
        back.model.load_state_dict(copy.deepcopy(there.model.state_dict()))
        back.optimizer.load_state_dict(copy.deepcopy(there.optimizer.state_dict()))
        plain.run(1)
        host.run(1)
        assert same(plain, host)
    assert is_at_home(host)


@pytest.mark.parametrize("before", ["l2l", *exhaustive("states_host", "all_host")])
def test_a_step_on_disk_behind_one_on_the_host(before: str) -> None:
    """The arena lets go of what moves; what it was goes on as it was."""
    plain, moved = (Training("gpt", "adamw", None, EAGER) for _ in range(2))
    for training, presets in ((plain, ["none"] * 3), (moved, [before, "infinity", before])):
        for memory in presets:
            training.step = fxzero.compile_step(
                training.with_loss,
                training.optimizer,
                options={**EAGER, "memory": memory},
            )
            training.run(1)
            if memory == "infinity":
                store = disk_arena_of(training.optimizer).store  # type: ignore[union-attr]
                end = store.address + store.num_bytes
                parameters = [p.data_ptr() for p in training.model.parameters() if p.numel()]
                assert all(store.address <= pointer < end for pointer in parameters)
                assert {name for _, name in training.arena.homes} == {"step"}  # numbers stay
    assert same(plain, moved)


def test_what_is_saved_is_no_more_than_itself(tmp_path: Path) -> None:
    """A file of one parameter has the bytes of one parameter, not the arena's."""
    host = Training("gpt", "adamw", None, {**EAGER, **HOST}).run(1)
    parameter = next(iter(host.model.parameters()))
    torch.save(parameter.detach(), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < parameter.nbytes + 4096 < host.arena.num_bytes


@pytest.mark.parametrize("memory", ["all_host", *exhaustive("states_host")])
def test_whatever_changes_a_parameter_between_two_steps(memory: str) -> None:
    """The next step begins with it: written through ``.data``, or given other memory."""
    plain, host = (
        Training("gpt", "adamw", None, {**EAGER, **more}).run(2)
        for more in ({}, {"memory": memory})
    )
    for training in (plain, host):
        first, second, *_ = training.model.parameters()
        first.data.mul_(0.5)
        second.data = second.data * 0.25
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.clamp_(-0.3, 0.3)
        training.run(2)
    assert same(plain, host)
    assert is_at_home(host)


def test_state_that_is_cleared_begins_anew() -> None:
    """And lives on the host again."""
    plain, host = (Training("gpt", "adamw", 3, {**EAGER, **more}).run(2) for more in ({}, HOST))
    for training in (plain, host):
        training.optimizer.state.clear()
        training.run(1)
    assert same(plain, host)
    assert is_at_home(host)


def test_two_shapes_of_batches_share_one_arena() -> None:
    """Each graph finds what the other one has left, and what is in the arena stays there."""
    plain, host = (Training("mlp", "adamw", 3, {**EAGER, **more}) for more in ({}, HOST))
    for training in (plain, host):
        for rows in (16, 8, 16, 8):
            training.run(1, rows)
    assert same(plain, host)
    assert is_at_home(host)


def test_a_part_of_the_state() -> None:
    """The rest is where it was; gathers between two steps go on for it."""
    options = {**EAGER, "offload_states": {"share": 0.5}}
    plain, host = (Training("gpt", "adamw", 3, {**EAGER, **more}).run() for more in ({}, options))
    assert same(plain, host)
    assert not is_at_home(host)
    assert 0 < len(host.arena.homes) < 4 * len(list(host.model.parameters()))


def test_a_step_that_overflows_changes_nothing() -> None:
    """In fp16, with inputs that are too large for it; the step after it trains."""
    runs = []
    for more in ({}, HOST):
        training = Training("mlp", "adamw", None, {**EAGER, **more}, precision="fp16").run(2)
        before = training.left()[-4:]
        training.run(1, scale=1e6)
        assert all(map(torch.equal, before, training.left()[-4:]))
        runs.append(training.run(2))
    assert same(*runs)


def test_gradients_that_are_not_finite_stop_before_anything_changes() -> None:
    """What is on its way is waited for, and training goes on."""
    options = {**EAGER, **HOST, "stop_unless_finite": True}
    plain, host = (
        Training("mlp", "adamw", None, {**options, **more}).run(2)
        for more in ({"memory": "none"}, {})
    )
    for training in (plain, host):
        seen = len(training.seen)
        with pytest.raises(fxzero.NonFiniteGradientError, match="Nothing was updated"):
            training.run(1, scale=float("inf"))
        assert len(training.seen) == seen
        training.run(2)
    assert same(plain, host)


@pytest.mark.parametrize("memory", ["all_host", *exhaustive("infinity")])
def test_within_a_memory_budget(memory: str) -> None:
    """The budget is the device's: what the host holds is not in it, nor the disk."""
    plain = Training("gpt", "adamw", None, {**EAGER}).run()
    options = {**EAGER, **held_by(memory), "memory_budget": "400KiB"}
    assert same(plain, Training("gpt", "adamw", None, options).run())


def test_copies_that_are_held_back() -> None:
    """Slow lanes change when things happen, and nothing else."""
    options = {**EAGER, **VALUES, **HOST, "throttle": {"h2d": "20MB/s", "d2h": "20MB/s"}}
    assert trains_alike("gpt", "adamw", None, options, clip_grad_norm=0.1)


def test_the_arena_ends_with_its_optimizer() -> None:
    """Nothing else keeps it, nor the copies on the device."""
    training = Training("mlp", "adamw", None, {**EAGER, **HOST}).run(1)
    arena = weakref.ref(training.arena)
    del training
    torch._dynamo.reset()
    gc.collect()
    assert arena() is None


def simulated_and_measured(zero: int, options: dict[str, Any]) -> tuple[int, int]:
    """Peaks of a step on the device: what is in the arena is not in either."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fxzero.shard(gpt_bench(num_layers=2, hidden=128, num_heads=4), zero=zero)
    batch = model.example_inputs(2)
    step = fxzero.compile_step(model, torch.optim.AdamW(model.parameters()), options=options)
    found: list[Compilation] = []

    def keep(compilation: Compilation) -> None:
        compilation.keep_graphs = True
        found.append(compilation)

    with observed(keep):
        for _ in range(3):
            step(*batch)
    (graph,) = [c.joint for c in found if c.joint is not None]
    memory = simulate_memory(graph, fuses=False)
    measured = min(allocated_peak_bytes(lambda: step(*batch)) for _ in range(3))
    return memory.peak_bytes, measured + memory.resident_bytes


@pytest.mark.parametrize(
    "memory",
    [
        "all_host",
        *exhaustive("states_host", "states_host, device", "all_host, device"),
        *exhaustive("l2l", "l2l, device", "infinity"),
    ],
)
def test_the_peak_is_the_simulated_one(ranks: Pools, memory: str) -> None:
    """Within five per cent of what torch allocates outside of the arena."""
    values = {"offload_activations": {"share": 1.0, "min_bytes": 1 << 14}}
    options = {**EAGER, **values, **held_by(memory), "gather_ahead": {"enabled": False}}
    for simulated, measured in ranks(2).run(simulated_and_measured, 3, options):
        assert simulated == pytest.approx(measured, rel=0.05)


class Norms(nn.Module):
    """Statistics that are float32 on CPU, whatever their fake kernels say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 8, 8) to (B, 4)."""
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))


def test_saved_values_of_another_dtype_than_was_thought() -> None:
    """In low precision such a value goes down and comes back as what it is."""
    found = []
    for more in ({}, VALUES):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Norms()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = fxzero.compile_step(
            model, optimizer, nn.functional.mse_loss, precision="bf16", options={**EAGER, **more}
        )
        losses = [step(torch.ones(4, 3, 8, 8) * n, torch.ones(4, 4)).loss for n in range(3)]
        found.append([*map(local, (*losses, *model.parameters(), *model.buffers()))])
    assert all(map(torch.equal, *found))
