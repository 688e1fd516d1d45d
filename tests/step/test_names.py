"""Parameters whose names are no names of Python's, or differ in a dot alone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import fxzero

KEYS = ["a-b", "my layer", "x/y", "lambda", "[b]", "<i>", "café", "9", "it's", 'q"', "a,b", "a\nb"]


class Named(nn.Module):
    """Layers by all kinds of names, and a parameter that is called as a layer's path."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({key: nn.Linear(4, 4) for key in KEYS})
        self.scales = nn.ParameterDict({"user-id": nn.Parameter(torch.ones(4))})
        self.last = nn.Linear(4, 4)
        self.last_weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to a loss."""
        for key in KEYS:
            x = x + self.layers[key](x).tanh()
        return (self.last(x * self.scales["user-id"]) * self.last_weight).square().mean()


def test_a_step_trains_them() -> None:
    """Their optimizer's state is an input of the graph by such a name."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = Named().double()
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = fxzero.compile_step(ours, mine, options={"lower_regions": {"backend": "eager"}})
    for _ in range(2):
        x = torch.randn(8, 4, dtype=torch.float64)
        step(x)
        other.zero_grad()
        theirs(x).backward()
        other.step()
    for (name, parameter), expected in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-13)
        for key, value in other.state[expected].items():
            torch.testing.assert_close(mine.state[parameter][key], value, msg=f"{key} of {name}")
