"""Meta-device models fill themselves, module by module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero import ShardingError


class Plain(nn.Module):
    """A parameter and nobody to fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """(3,) → (3,)."""
        return x * self.weight + self.table


class Forgetful(Plain):
    """Fills its parameter and not its buffer."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Careful(Plain):
    """Fills both, and counts how often."""

    calls = 0

    def reset_parameters(self) -> None:
        type(self).calls += 1
        nn.init.ones_(self.weight)
        nn.init.constant_(self.table, 2.0)


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight


class Rooted(nn.Module):
    """The root fills its modules, as models of the transformers library do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def _init_weights(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(5.0)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without memory."""
    with torch.device("meta"):
        return make()


def test_a_module_that_cannot_fill_itself_is_named() -> None:
    """Before anything was touched."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Plain()))
    with pytest.raises(ShardingError) as caught:
        fxzero.shard(model, 3)
    message = str(caught.value)
    assert message.startswith("1 (Plain) has weight, table on the meta device and no reset_param")
    assert "Define one that initialises every parameter and buffer" in message
    assert all(p.is_meta for p in model.parameters())
    assert type(model[0]) is nn.Linear  # type: ignore[index]


def test_a_root_that_cannot_fill_itself() -> None:
    """It has no path to be named by."""
    with pytest.raises(ShardingError, match=r"^the model \(Plain\) has weight, table"):
        fxzero.shard(on_meta(Plain), 3)


def test_a_value_that_was_left_unset_is_named() -> None:
    """Memory is never what happened to be there."""
    with pytest.raises(ShardingError, match=r"0.table was on the meta device and Forgetful.*unset"):
        fxzero.shard(on_meta(lambda: nn.Sequential(Forgetful())), 3)


def test_parameters_and_buffers_are_filled() -> None:
    """Once per module."""
    Careful.calls = 0
    model = fxzero.shard(on_meta(lambda: nn.Sequential(Careful(), Careful())), 3)
    assert Careful.calls == 2
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 5.0))


def test_tied_parameters_are_filled_once_and_stay_tied() -> None:
    """The head's initialiser must not overwrite what the embedding's has drawn."""
    torch.manual_seed(0)
    expected = torch.empty(4, 3)
    nn.init.normal_(expected)
    torch.manual_seed(0)
    model = fxzero.shard(on_meta(Tied), 3)
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight", "head.bias"]
    assert torch.equal(model.embedding.weight, expected)
    assert not model.head.bias.isnan().any()


def test_the_models_own_initialiser_runs() -> None:
    """`_init_weights`, without any reset_parameters."""
    model = fxzero.shard(on_meta(Rooted), 3)
    assert torch.equal(model.inner.weight, torch.full((3,), 5.0))
    assert torch.equal(model.inner.table, torch.full((3,), 5.0))


def test_frozen_stays_frozen() -> None:
    """And integers are zero, not NaN."""

    class Counting(Careful):
        def __init__(self) -> None:
            super().__init__()
            self.weight.requires_grad_(False)
            self.register_buffer("count", torch.ones((), dtype=torch.int64))

    model = fxzero.shard(on_meta(Counting), 3)
    assert not model.weight.requires_grad
    assert model.count.item() == 0


def test_real_models_are_left_alone() -> None:
    """Nothing is drawn again."""
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    fxzero.shard(model, 3)
    assert torch.equal(model.weight, before)
