"""Steps whose optimizer state and masters are on the host: bit by bit those that hold all on the
device.

Each case trains twice, with ``memory=states_host`` and without: losses, norms, parameters,
optimizer state and buffers are compared, NaN by its bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fxzero
from fxzero.runtime.arena import HostArena, arena_of
from tests.pairwise import pairwise
from tests.parity.harness import Pools
from tests.parity.models import EXAMPLES
from tests.parity.test_step import OPTIMIZERS, WithLoss, two_groups, warm_up
from tests.parity.training import build, make_batch

ROWS = 16
STEPS = 3
EAGER = {"lower_regions": {"backend": "eager"}}
HOST = {"memory": "states_host"}


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
        self.step = fxzero.compile_step(
            WithLoss(self.model, self.example.loss),
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
    base = {name: value for name, value in options.items() if name not in ("memory", "throttle")}
    plain = Training(example, optimizer, zero, base, **step).run()
    offloaded = Training(example, optimizer, zero, options, **step).run()
    assert is_at_home(offloaded)
    return same(plain, offloaded)


def is_at_home(training: Training) -> bool:
    """Whether all parameters and their state lie in the arena."""
    memory = training.arena.memory
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    tensors = [
        getattr(value, "_local_tensor", value)
        for p in training.model.parameters()
        for value in (p, *training.optimizer.state[p].values())
    ]
    return all(begin <= t.data_ptr() < end for t in tensors if t.numel())


CASES = pairwise(
    ["gpt", "convnet"],
    ["adamw", "sgd", "amsgrad", "plain_sgd", "adagrad"],
    [None, 0, 1, 2, 3],
    [1, 4, 8],
    [None, 0.1],
    [None, "bf16", "fp16"],
    ["states_host", "all_host"],
)


@pytest.mark.parametrize(
    ("example", "optimizer", "zero", "micro_batches", "clip", "low", "memory"), CASES
)
def test_one_rank(
    example: str,
    optimizer: str,
    zero: int | None,
    micro_batches: int,
    clip: float | None,
    low: Any,
    memory: str,
) -> None:
    """Whatever updates, in one process."""
    rest = {"micro_batches": micro_batches, "clip_grad_norm": clip, "precision": low}
    assert trains_alike(example, optimizer, zero, {**EAGER, "memory": memory}, **rest)


SEVERAL = pairwise(
    ["gpt", "mlp"],
    ["adamw", "sgd"],
    [0, 1, 2, 3],
    [1, 4],
    [None, 0.1],
    [None, "bf16"],
    ["states_host", "all_host"],
)


@pytest.mark.parametrize(
    ("example", "optimizer", "zero", "micro_batches", "clip", "low", "memory"), SEVERAL
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
    options = {**EAGER, "memory": memory}
    assert all(ranks(2).run(trains_alike, example, optimizer, zero, options, **rest))


@pytest.mark.parametrize(("zero", "memory"), [(0, "all_host"), (3, "states_host")])
def test_default_settings(ranks: Pools, zero: int, memory: str) -> None:
    """With compiled regions."""
    assert all(ranks(2).run(trains_alike, "gpt", "adamw", zero, {"memory": memory}))
