"""The host's memory: tensors that move there stay what they are to everybody else."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxzero.graph.lanes import ALIGNMENT, aligned
from fxzero.runtime.arena import Home, HostArena, arena_for, arena_of
from fxzero.transfer import Form

SHAPES: dict[str, Tensor] = {
    "vector": torch.randn(7),
    "matrix": torch.randn(3, 5),
    "transposed": torch.randn(3, 5).t(),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "one number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "empty vector": torch.empty(0),
    "double": torch.randn(5).double(),
    "half": torch.randn(3).bfloat16(),
    "whole numbers": torch.arange(5),
    "with gaps": torch.randn(4, 6)[:, ::2],
}


def homes_of(tensors: dict[str, Tensor]) -> dict[Home, Form]:
    """A home for each, under its name."""
    return {(name, ""): Form.of(tensor) for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> list[int]:
    """Its elements, bit by bit."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def is_in(tensor: Tensor, memory: Tensor) -> bool:
    """Whether a tensor's memory is part of another one's."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    return begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end


@pytest.fixture
def optimizer() -> Optimizer:
    """One that nothing is known of."""
    return torch.optim.SGD([nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_that_comes_home_is_the_same(name: str) -> None:
    """Its values, shape, dtype, order in memory and identity."""
    arena = HostArena(homes_of(SHAPES), 64)
    tensor = SHAPES[name].clone()
    before, identity = tensor.clone(), id(tensor)
    view_of_itself = weakref.ref(tensor)
    dense = torch.empty_like(tensor).stride()
    arena.bring_home((name, ""), tensor)
    assert view_of_itself() is tensor
    assert id(tensor) == identity
    assert bits(tensor) == bits(before)
    assert (tensor.shape, tensor.dtype, tensor.stride()) == (before.shape, before.dtype, dense)
    if tensor.numel():
        assert is_in(tensor, arena.memory)


def test_every_tensor_has_a_place_of_its_own() -> None:
    """What is written to one is read from no other."""
    tensors = {name: tensor.clone() for name, tensor in SHAPES.items()}
    arena = HostArena(homes_of(tensors), 64)
    for name, tensor in tensors.items():
        arena.bring_home((name, ""), tensor)
    for name, tensor in tensors.items():
        assert bits(tensor) == bits(SHAPES[name])
    for i, tensor in enumerate(tensors.values()):
        tensor.fill_(i)
    arena.staging.fill_(255)
    for i, tensor in enumerate(tensors.values()):
        assert tensor.eq(i).all()


def test_places_begin_on_a_cache_line() -> None:
    """Those of gradients too."""
    arena = HostArena(homes_of(SHAPES), 256)
    begin = arena.memory.data_ptr()
    tensors = [tensor.clone() for tensor in SHAPES.values()]
    for name, tensor in zip(SHAPES, tensors, strict=True):
        arena.bring_home((name, ""), tensor)
        assert not tensor.numel() or (tensor.data_ptr() - begin) % ALIGNMENT == 0
    assert (arena.staging.data_ptr() - begin) % ALIGNMENT == 0
    dense = [Form.of(tensor).num_bytes for tensor in tensors]
    assert arena.num_bytes == arena.memory.nbytes == sum(map(aligned, dense)) + 256
    assert arena.staging.nbytes == 256


@pytest.mark.parametrize(("num_bytes", "room"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_bytes_are_rounded_up(num_bytes: int, room: int) -> None:
    """To where the next tensor may begin."""
    assert aligned(num_bytes) == room


def test_a_parameter_stays_a_parameter() -> None:
    """A leaf that its optimizer and its module know, with its gradient."""
    module = nn.Linear(3, 2)
    parameter = module.weight
    module(torch.ones(1, 3)).sum().backward()
    arena = HostArena({("w", ""): Form.of(parameter)}, 0)
    arena.bring_home(("w", ""), parameter)
    assert module.weight is parameter
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.grad is not None
    module(torch.ones(1, 3)).sum().backward()
    assert parameter.grad.eq(2).all()


def test_what_is_at_home_is_not_copied() -> None:
    """A step asks for each in turn: nothing is written."""
    tensor = torch.ones(4)
    arena = HostArena({("w", ""): Form.of(tensor)}, 0)
    arena.bring_home(("w", ""), tensor)
    place, version = tensor.data_ptr(), tensor._version
    tensor.fill_(2)
    arena.bring_home(("w", ""), tensor)
    assert (tensor.data_ptr(), tensor._version) == (place, version + 1)
    assert tensor.eq(2).all()


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_tensor_that_was_given_other_memory_comes_home_again(order: torch.memory_format) -> None:
    """With what was written to it there, in the order that its home has."""
    tensor = SHAPES["channels_last"].clone()
    arena = HostArena({("w", ""): Form.of(tensor)}, 0)
    arena.bring_home(("w", ""), tensor)
    place, stride = tensor.data_ptr(), tensor.stride()
    other = torch.randn(2, 3, 4, 5).contiguous(memory_format=order)
    tensor.data = other.clone()
    arena.bring_home(("w", ""), tensor)
    assert tensor.data_ptr() == place
    assert tensor.stride() == stride
    assert torch.equal(tensor, other)


def test_what_somebody_else_looks_at_stays_where_it_is() -> None:
    """A backup by reference, of what is at home or of what comes, is not written to."""
    tensor = torch.arange(6.0)
    arena = HostArena({("w", ""): Form.of(tensor)}, 0)
    alias = tensor.view(2, 3)
    arena.bring_home(("w", ""), tensor)
    alias[0, 0] = 7  # it has not moved away from what looks at it
    assert tensor[0] == 7
    del alias
    arena.bring_home(("w", ""), tensor)
    backup = tensor.data
    tensor.data = torch.zeros(6)
    arena.bring_home(("w", ""), tensor)
    tensor.add_(1)
    assert torch.equal(backup, torch.tensor([7.0, 1, 2, 3, 4, 5]))
    assert torch.equal(tensor, torch.ones(6))


def test_a_tensor_of_it_is_saved_without_the_rest() -> None:
    """`torch.save` writes all of a storage."""
    small = torch.randn(100)
    arena = HostArena(
        {("a", ""): Form.of(small), ("b", ""): Form.of(torch.empty(1 << 20))}, 1 << 20
    )
    arena.bring_home(("a", ""), small)
    assert small.untyped_storage().nbytes() == small.nbytes
    buffer = io.BytesIO()
    torch.save(small, buffer)
    assert buffer.tell() < small.nbytes + 4096
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), small)


def test_a_tensor_outlives_the_arena() -> None:
    """Its memory is there as long as it is."""
    tensor = torch.randn(1000)
    before = tensor.clone()
    arena = HostArena({("w", ""): Form.of(tensor)}, 1 << 20)
    arena.bring_home(("w", ""), tensor)
    there = weakref.ref(arena)
    del arena
    gc.collect()
    assert there() is None
    torch.randn(1 << 18)  # would take what is free
    assert torch.equal(tensor, before)


# -- an optimizer's


def test_an_arena_that_has_room_stays(optimizer: Optimizer) -> None:
    """For fewer homes, and less on its way."""
    assert arena_of(optimizer) is None
    arena = arena_for(optimizer, homes_of(SHAPES), 256)
    assert arena_of(optimizer) is arena
    some = {home: layout for home, layout in homes_of(SHAPES).items() if home[0] == "matrix"}
    assert arena_for(optimizer, some, 128) is arena
    assert arena_for(optimizer, homes_of(SHAPES), 256) is arena


@pytest.mark.parametrize("grows", ["homes", "staging", "another layout"])
def test_one_that_has_none_is_replaced(optimizer: Optimizer, grows: str) -> None:
    """By one with room for all that was known; what lives there moves, and is what it was."""
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    first = arena_for(optimizer, homes_of(tensors), 256)
    for name, tensor in tensors.items():
        first.bring_home((name, ""), tensor)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    wanted, staging_bytes = dict(tensors), 128
    if grows == "homes":
        wanted = {"c": torch.randn(9)}
    elif grows == "staging":
        staging_bytes = 512
    else:
        wanted["a"] = torch.randn(5, 3).t()
    second = arena_for(optimizer, homes_of(wanted), staging_bytes)
    assert second is not first
    assert arena_of(optimizer) is second
    assert second.homes.keys() == {(name, "") for name in {*tensors, *wanted}}
    assert second.staging.nbytes == max(256, staging_bytes)
    for name, tensor in tensors.items():
        second.bring_home((name, ""), tensor)
        assert is_in(tensor, second.memory)
        assert torch.equal(tensor, before[name])
    there = weakref.ref(first)
    del first
    gc.collect()
    assert there() is None


def test_an_arena_ends_with_its_optimizer() -> None:
    """Nothing else holds it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    there = weakref.ref(arena_for(optimizer, {}, 64))
    assert there() is not None
    del optimizer
    gc.collect()
    assert there() is None


def test_optimizers_have_one_each(optimizer: Optimizer) -> None:
    """Two models in training."""
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert arena_for(optimizer, {}, 64) is not arena_for(other, {}, 64)
