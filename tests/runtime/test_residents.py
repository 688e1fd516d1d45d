"""Copies that stay on the device: taken where they are what the parameters are, bit by bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero.graph.stamps import Lane
from fxzero.runtime import copies, residents
from fxzero.runtime.arena import arena_of
from fxzero.runtime.lanes import drain, worker
from fxzero.runtime.residents import Resident, resident_of
from tests.stepping import EAGER
from tests.tracing import Chain

NAN = float("nan")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No lane works on for another test."""
    yield
    drain()


def take(
    resident: Resident, params: list[Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """What compute would read."""
    return copies.join_upload(resident.take(list(params), dtype, None, 0.0))


def bits(tensor: Tensor) -> list[int]:
    """Its elements, bit by bit."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def done() -> Future[Any]:
    """An update that is over."""
    found: Future[Any] = Future()
    found.set_result(None)
    return found


def test_what_is_there_is_taken() -> None:
    """The same tensors, and nothing is copied."""
    params = [torch.randn(5), torch.randn(3, 4)]
    resident = Resident("some")
    first = take(resident, params)
    assert all(map(torch.equal, first, params))
    assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(first, params, strict=True))
    again = take(resident, params)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert resident.num_stale == 0


@pytest.mark.parametrize(
    ("before", "after", "stale"),
    [
        ([1.0, 2.0], [1.0, 3.0], 1),
        ([1.0, NAN], [1.0, NAN], 0),
        ([1.0, 2.0], [1.0, NAN], 1),
        ([1.0, NAN], [1.0, 2.0], 1),
        ([1.0, 0.0], [1.0, -0.0], 1),
        ([1.0, -0.0], [1.0, 0.0], 1),
        ([1.0] * 16, [1.0] * 15 + [2.0], 1),
        ([1.0] * 17, [1.0] * 16 + [2.0], 1),
    ],
)
def test_bits_are_compared(before: list[float], after: list[float], stale: int) -> None:
    """NaN equals itself, and minus zero is not zero."""
    parameter = torch.tensor(before)
    resident = Resident("some")
    take(resident, [parameter])
    parameter.copy_(torch.tensor(after))
    (mine,) = take(resident, [parameter])
    assert resident.num_stale == stale
    assert bits(mine) == bits(parameter)
    take(resident, [parameter])
    assert resident.num_stale == stale


def test_only_what_differs_is_copied_again() -> None:
    """Of two parameters one."""
    params = [torch.randn(5), torch.randn(3)]
    resident = Resident("some")
    first = take(resident, params)
    untouched = first[0]._version
    params[1].add_(1)
    again = take(resident, params)
    assert resident.num_stale == 1
    assert again[0]._version == untouched
    assert torch.equal(again[1], params[1])


@pytest.mark.parametrize(("change", "stale"), [(2**-12, 0), (2**-4, 1)])
def test_what_a_cast_leaves_is_compared(change: float, stale: int) -> None:
    """A change that 16 bits do not show is none."""
    parameter = torch.ones(4)
    resident = Resident("some")
    (mine,) = take(resident, [parameter], torch.bfloat16)
    parameter.add_(change)
    assert take(resident, [parameter], torch.bfloat16)[0] is mine
    assert resident.num_stale == stale
    assert torch.equal(mine, parameter.bfloat16())


@pytest.mark.parametrize(
    ("params", "dtype"),
    [
        ([torch.ones(5)], torch.float32),
        ([torch.ones(2, 2), torch.ones(1)], torch.float32),
        ([torch.ones(2, 2)], torch.bfloat16),
        ([torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)], torch.float32),
    ],
    ids=["shape", "number", "dtype", "strides"],
)
def test_other_parameters_get_other_copies(params: list[Tensor], dtype: torch.dtype) -> None:
    """Which look like them."""
    before = torch.ones(2, 3, 4, 5) if params[0].dim() == 4 else torch.ones(2, 2)
    resident = Resident("some")
    (first,) = take(resident, [before])
    made = take(resident, params, dtype)
    assert made[0] is not first
    for mine, parameter in zip(made, params, strict=True):
        looks = (parameter.shape, parameter.stride(), dtype)
        assert (mine.shape, mine.stride(), mine.dtype) == looks
    assert all(a is b for a, b in zip(made, take(resident, params, dtype), strict=True))
    assert resident.num_stale == 0


@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.empty(0, 3), torch.empty(0)], ids=str)
def test_one_number_or_none(tensor: Tensor) -> None:
    """There is nothing to walk through."""
    resident = Resident("some")
    first, again = take(resident, [tensor]), take(resident, [tensor])
    assert first[0] is again[0]
    assert torch.equal(first[0], tensor)
    assert resident.num_stale == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_update_leaves_is_there_for_the_next_step(dtype: torch.dtype) -> None:
    """Which finds nothing to copy."""
    parameter = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    resident = Resident("some")
    (mine,) = take(resident, [parameter], dtype)
    parameter.mul_(2)
    resident.launch([parameter], done(), dtype, None, 0.0)
    assert take(resident, [parameter], dtype)[0] is mine
    assert torch.equal(mine, parameter.to(dtype))
    assert resident.num_stale == 0


def test_it_is_copied_when_the_update_is_over() -> None:
    """And not before."""
    parameter = torch.ones(4)
    resident = Resident("some")
    take(resident, [parameter])
    may_go = threading.Event()

    def update() -> None:
        assert may_go.wait(5)
        parameter.mul_(2)

    resident.launch([parameter], worker(Lane.HOST).submit(update), torch.float32, None, 0.0)
    threading.Timer(0.05, may_go.set).start()
    (mine,) = take(resident, [parameter])
    assert mine.eq(2).all()
    assert resident.num_stale == 0


def test_an_update_that_failed_leaves_what_was_there() -> None:
    """The next step sees for itself whether it is still right."""
    parameter = torch.ones(4)
    resident = Resident("some")
    take(resident, [parameter])

    def update() -> None:
        parameter[0] = 5
        raise RuntimeError("lost")

    resident.launch([parameter], worker(Lane.HOST).submit(update), torch.float32, None, 0.0)
    drain()  # as a step does that fails
    (mine,) = take(resident, [parameter])
    assert torch.equal(mine, parameter)
    assert resident.num_stale == 1


def test_one_for_all_graphs_of_an_optimizer() -> None:
    """By parameters and dtype."""
    optimizer, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    found = resident_of(optimizer, ("a", "b"), torch.float32, "some")
    assert resident_of(optimizer, ("a", "b"), torch.float32, "again") is found
    for its in (
        resident_of(optimizer, ("a",), torch.float32, "some"),
        resident_of(optimizer, ("a", "b"), torch.bfloat16, "some"),
        resident_of(other, ("a", "b"), torch.float32, "some"),
    ):
        assert its is not found


# -- in a step


class Training:
    """A small model in training."""

    def __init__(self, memory: str, precision: str | None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Chain(3, 8, relu=False)
        self.weight = cast(nn.Parameter, self.model.layers[1].weight)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step = fxzero.compile_step(
            self.model,
            self.optimizer,
            options={**EAGER, "memory": memory},
            precision=precision,
        )
        self.first = copy.deepcopy(self.model.state_dict())

    def run(self, steps: int) -> list[Tensor]:
        """Train on; the losses. Copies for the next step are there when it returns."""
        torch.manual_seed(1)
        losses = [self.step(torch.randn(4, 8)).loss.clone() for _ in range(steps)]
        drain()
        return losses

    @property
    def num_stale(self) -> int:
        """How many copies were not what they should have been."""
        return sum(r.num_stale for r in residents._residents[self.optimizer].values())

    @property
    def is_at_home(self) -> bool:
        """Whether all parameters lie in the host's block."""
        arena = arena_of(self.optimizer)
        assert arena is not None
        begin = arena.memory.data_ptr()
        end = begin + arena.num_bytes
        return all(begin <= p.data_ptr() < end for p in self.model.parameters())


def through_data(training: Training) -> None:
    """Unseen by autograd."""
    training.weight.data.mul_(1.5)


def by_other_memory(training: Training) -> None:
    """The arena's is not the parameter's any more."""
    training.weight.data = training.weight.data * 1.5


def to_nan(training: Training) -> None:
    """Of one element."""
    training.weight.data[0, 0] = NAN


def by_a_checkpoint(training: Training) -> None:
    """All of them."""
    training.model.load_state_dict(training.first)


def nothing(training: Training) -> None:
    """What the updates have left is there."""


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(
    ("change", "stale"),
    [(nothing, 0), (through_data, 1), (by_other_memory, 1), (to_nan, 1), (by_a_checkpoint, 3)],
)
def test_parameters_that_change_between_two_steps(
    change: Callable[[Training], None], stale: int, precision: str | None
) -> None:
    """Are what the next step computes with, and what it updates."""
    seen = []
    for memory in ("none", "states_host"):
        training = Training(memory, precision)
        losses = training.run(2)
        change(training)
        losses += training.run(2)
        seen.append([bits(t) for t in (*losses, *training.model.parameters())])
    assert seen[0] == seen[1]
    assert training.num_stale == stale
    assert training.is_at_home
    torch._dynamo.reset()
