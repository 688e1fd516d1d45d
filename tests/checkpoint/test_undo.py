"""Of which models a load keeps copies to go back to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxzero
from fxzero.checkpoint import undo
from fxzero.checkpoint.staging import local_part
from tests.parity.harness import Pools


class Loads(nn.Linear):
    """Has code of its own that runs when it loads."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


class TakesExtra(nn.Linear):
    """So has this one."""

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: Any) -> None:
        raise ValueError(state)


class Marked(Tensor):
    """Nobody knows what copying into it does."""


def with_hook(before: bool) -> nn.Module:
    """A part that wants to be called."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if before:
        model[1].register_load_state_dict_pre_hook(lambda *_: None)
    else:
        model[1].register_load_state_dict_post_hook(lambda *_: None)
    return model


def with_own_function() -> nn.Module:
    """An object that loads in its own way."""
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model)["load_state_dict"] = lambda *_: None
    return model


def with_other_buffer() -> nn.Module:
    """A tensor of another class."""
    model = nn.Linear(2, 2)
    model.register_buffer("marked", torch.zeros(2).as_subclass(Marked))
    return model


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.Sequential(Loads(2, 2)), id="overrides"),
        pytest.param(lambda: nn.Sequential(TakesExtra(2, 2)), id="extra"),
        pytest.param(lambda: with_hook(before=True), id="hook"),
        pytest.param(lambda: with_hook(before=False), id="hook_behind"),
        pytest.param(with_own_function, id="object"),
        pytest.param(with_other_buffer, id="subclass"),
    ],
)
def test_a_model_with_code_of_its_own_is_kept(make: Callable[[], nn.Module]) -> None:
    """It may refuse a state, or do something else to the model."""
    assert not undo.takes_what_fits(make())


@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_a_model_that_copies_is_not_kept(zero: int | None) -> None:
    """It cannot refuse what fits, and there is memory for one copy less."""
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(4, 4))
    if zero is not None:
        model = fxzero.shard(model, zero=zero)
    assert undo.takes_what_fits(model)


class Masters(torch.optim.AdamW):
    """Has copies of its parameters, which it makes anew when it loads."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.masters = [p.detach().clone() for g in self.param_groups for p in g["params"]]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_optimizer_reads_what_its_parameters_have_become(
    ranks: Pools, tmp_path: Path, num_ranks: int
) -> None:
    """It loads behind the model, wherever it is not torch's own."""
    ranks(num_ranks, timeout_s=60).run(reads_parameters, tmp_path)


def reads_parameters(folder: Path) -> None:
    """Job."""
    model = fxzero.shard(nn.Linear(4, 4), zero=3)
    optimizer = Masters(model.parameters(), 0.1)
    state = fxzero.TrainState(model, optimizer)
    assert not undo.only_copies(state)
    assert undo.only_copies(fxzero.TrainState(model, torch.optim.AdamW(model.parameters())))
    fxzero.checkpoint.save(state, folder, step=1).wait()
    saved = [local_part(p).clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).add_(1)
    fxzero.checkpoint.load(state, folder)
    for master, value in zip(optimizer.masters, saved, strict=True):
        assert torch.equal(local_part(master), value)
