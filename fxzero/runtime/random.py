"""Random numbers of a scheduled graph: torch's own, from its default generators.

state = generator_state("cpu"); mask = dropout_mask([4, 8], 0.1)         forward
again = DrawAgain(dropout_mask)(state, [4, 8], 0.1)                      backward: equal to mask
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Of a generator: a Mersenne twister's words, or Philox's seed and offset."""


def dropout_mask(shape: Sequence[int], rate: float) -> Tensor:
    """Which elements a dropout keeps, as torch's CPU kernel draws them: ones with 1 - `rate`."""
    return torch.empty(tuple(shape), dtype=torch.bool).bernoulli_(1.0 - rate)


dropout_mask.draws_random_numbers = True  # type: ignore[attr-defined]  # see graph.operators


def default_generator(device: str) -> torch.Generator:
    """What operators on a device draw from: of CUDA, on the device that is current."""
    if device == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def generator_state(device: str) -> Tensor:
    """The state from which the next numbers will be drawn, a copy in host memory."""
    return default_generator(device).get_state()


generator_state.reads_generator = True  # type: ignore[attr-defined]  # see graph.belongings
fx.node.has_side_effect(generator_state)  # another call of it returns something else


class DrawAgain:
    """Run a random operator once more, from the state that its generator had before.

    The generator goes on afterwards as if nothing had been drawn.

    Args:
        target: the operator.
        device: the type of the device that it draws on.
    """

    draws_again = True

    def __init__(self, target: Callable[..., Any], device: str) -> None:
        self.target = target
        self.device = device
        name = getattr(target, "_opname", None) or target.__name__
        self.__name__ = self.__qualname__ = f"draw_again_{name}"

    def __call__(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the operator returned then."""
        generator = default_generator(self.device)
        now = generator.get_state()
        generator.set_state(state)
        try:
            return self.target(*args, **kwargs)
        finally:
            generator.set_state(now)
