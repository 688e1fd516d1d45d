"""Factories for `fxzero inspect`: right ones, wrong ones, and models that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """One matrix of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        """(B, 8) to (B, 8)."""
        return self.layer(x) * scale


class Nets:
    """A namespace of factories."""

    @staticmethod
    def small() -> Any:
        """A model and a tuple."""
        return Net(), (torch.ones(4, 8),)


def dict_inputs() -> Any:
    """Inputs by name."""
    return Net(), {"x": torch.ones(4, 8), "scale": 2.0}


def tensor_input() -> Any:
    """One input."""
    return Net(), torch.ones(4, 8)


def list_inputs() -> Any:
    """A list of both."""
    return [Net(), [torch.ones(4, 8)]]


def both_inputs() -> Any:
    """Positional and named ones."""
    return Net(), (torch.ones(4, 8),), {"scale": 2.0}


class Batched(Net):
    """Makes its own batches."""

    def example_inputs(self, batch_size: int) -> Any:
        """By name."""
        return {"x": torch.ones(batch_size, 8)}


def dict_batches() -> Any:
    """A model that makes batches as dicts."""
    return Batched()


def _returning(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    class Returning(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return output(self.layer(x))

    return lambda: (Returning(), (torch.ones(4, 8),))


whole_numbers = _returning(lambda y: y.argmax(-1))
words = _returning(lambda y: "loss")
nothing = _returning(lambda y: None)
empty = _returning(lambda y: {})


class Raising(Net):
    """Its forward refuses."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Raises."""
        raise KeyError("this model says no")


def breaks() -> Any:
    """A model whose forward raises."""
    return Raising(), (torch.ones(4, 8),)


def wrong_shapes() -> Any:
    """A batch that does not fit."""
    return Net(), (torch.ones(4, 7),)


def nothing_to_train() -> Any:
    """Frozen."""
    return Net().requires_grad_(False), (torch.ones(4, 8),)


# Wrong ones.


def needs_arguments(width: int, *, depth: int) -> Any:
    """Not without arguments."""


def raises() -> Any:
    """Fails by itself."""
    raise RuntimeError("no such checkpoint")


def raises_without_words() -> Any:
    """A bare assert."""
    raise AssertionError


def returns_none() -> None:
    """Forgot to return."""


def returns_class() -> Any:
    """Not an instance."""
    return Net


def returns_inputs_first() -> Any:
    """The wrong way round."""
    return (torch.ones(4, 8),), Net()


def returns_dict() -> Any:
    """No pair."""
    return {"model": Net(), "inputs": (torch.ones(4, 8),)}


def returns_three() -> Any:
    """Too many."""
    return Net(), torch.ones(4, 8), torch.ones(4, 8)


def returns_four() -> Any:
    """Far too many."""
    return Net(), (), {}, 1


def returns_number_inputs() -> Any:
    """Inputs that are none."""
    return Net(), 4


def returns_text_inputs() -> Any:
    """A string is a sequence too."""
    return Net(), "x"


def returns_numbered_dict() -> Any:
    """Names that are none."""
    return Net(), {0: torch.ones(4, 8)}


def has_no_batch() -> Any:
    """A model that makes no batch, and of which none can be guessed."""
    return nn.ReLU()


class BadBatches(Net):
    """Its batches fail."""

    def example_inputs(self, batch_size: int) -> Any:
        """Raises."""
        raise ZeroDivisionError("rows")


def bad_batches() -> Any:
    """A model whose batches fail."""
    return BadBatches()


class NoSize(Net):
    """Its batches have one size."""

    def example_inputs(self) -> Any:
        """Takes no size."""
        return (torch.ones(4, 8),)


def fixed_batches() -> Any:
    """A model whose batches have one size."""
    return NoSize()


class NumberBatch(Net):
    """Its batches are no batches."""

    def example_inputs(self, batch_size: int) -> Any:
        """A number."""
        return batch_size


def number_batches() -> Any:
    """A model whose batches are numbers."""
    return NumberBatch()


ready = Net()
number = 3


def made_before() -> Any:
    """A model with memory."""
    return ready, (torch.ones(4, 8),)


_rows = torch.ones(4, 8)


def rows_made_before() -> Any:
    """A batch with memory."""
    return Net(), (_rows,)


def odd_rows() -> Any:
    """Five rows: no four parts of them."""
    return Net(), (torch.ones(5, 8),)
