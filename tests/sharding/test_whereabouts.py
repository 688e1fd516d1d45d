"""Whether code runs inside of a forward: what the call stack tells."""

from __future__ import annotations

import types

import torch
from torch import nn

from fxzero.sharding.whereabouts import in_forward


class Asks(nn.Module):
    """Its forward says what a function in it finds out."""

    def __init__(self, ask: types.FunctionType) -> None:
        super().__init__()
        self.ask = ask

    def forward(self) -> bool:
        """Ask from inside."""
        return bool(self.ask())


def test_a_forward_tells() -> None:
    """Below a module's call, and not outside of it."""
    assert Asks(in_forward)()
    assert not in_forward()
    assert Asks(in_forward).forward() is False  # which runs no hooks, and is no call of a module


def test_an_optimizer_in_a_forward_tells_otherwise() -> None:
    """The innermost caller counts."""
    found = []
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)

    def closure() -> float:
        found.append(in_forward())
        return 0.0

    Asks(lambda: optimizer.step(closure))()  # type: ignore[arg-type]
    assert found == [False]


def test_code_that_has_no_hash() -> None:
    """Dynamo continues a function behind a graph break by code with a dict among its constants."""

    def ask() -> bool:
        return in_forward()

    code = ask.__code__.replace(co_consts=(*ask.__code__.co_consts, {}))
    resumed = types.FunctionType(code, ask.__globals__)
    assert Asks(resumed)()
    assert not resumed()
