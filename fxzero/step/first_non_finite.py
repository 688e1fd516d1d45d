"""Where in a forward and a backward the first number arises that is infinite or none.

    x ──► layers.0 ──► layers.1 ──► layers.2 ──► loss
                        exp: finite in, inf out: here

Every operator is looked at: one that makes such a number of finite ones is where it arises. What a
module takes back before it returns (a mask of -inf in front of a softmax) is none of that. In
backward a module has begun when the gradient of what it returned is there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxzero._compat import SeeOperators, local_tensor, pytree, without_torch_function
from fxzero.ranks.places import user_line_of

_UNDERWAY = ("_c10d_functional", "c10d")
"""Namespaces of operators whose results nobody may read before they are waited for."""


@dataclass(frozen=True)
class NonFinite:
    """Where numbers that are infinite, or not a number, arise first."""

    rank: int
    phase: str
    """``"parameter"``, ``"buffer"``, ``"batch"``, ``"forward"`` or ``"backward"``."""
    name: str
    """The parameter, buffer or argument; of an operator, the module, with its full name."""
    operator: str = ""
    """The operator that has made them of finite numbers."""
    about: str = ""
    """How many there are, and of what they were made."""
    line: str = ""
    """The model's line; unknown in backward."""
    position: int = field(default=0, compare=False)
    """How many operators had run."""

    def __str__(self) -> str:
        where = f", at {self.line}" if self.line else ""
        if not self.operator:
            return f"{self.phase} {self.name} on rank {self.rank}: {self.about}"
        return (
            f"{self.phase} of {self.name or 'the model itself'} on rank {self.rank}: "
            f"{self.operator} makes {self.about}{where}"
        )


def is_bad(tensor: Tensor, but: str = "") -> bool:
    """Whether a tensor, or this rank's part of it, holds a number that is not finite.

    Args:
        but: what is no fault: ``"infinity"``, or ``"minus infinity"`` alone.
    """
    if not _num_bad(tensor) or not but:
        return _num_bad(tensor) > 0
    with torch.no_grad(), without_torch_function():
        here = _here(tensor)
        wrong = here.isnan() if but == "infinity" else here.isnan() | here.isposinf()
        return bool(wrong.any())


def count_bad(tensor: Tensor) -> str:
    """``3 of 16 numbers are not finite``."""
    return f"{_num_bad(tensor)} of {_here(tensor).numel()} numbers are not finite"


class Finder:
    """Looks at what runs inside of its contexts.

    Args:
        model: names the modules.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.found: NonFinite | None = None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._candidates: list[NonFinite] = []
        """Of the forward: those that no module has taken back yet."""
        self._inside: list[str] = []
        """Modules whose forward runs, the innermost last."""
        self._begun: list[str] = []
        """Modules in whose backward something is to come."""
        self._is_forward = True
        self._position = 0
        self._handles: list[Any] = []

    def __enter__(self) -> Finder:
        """Begin with the forward."""
        modules = nn.modules.module
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def forward(self) -> Any:
        """A context for the forward."""
        self._is_forward = True
        return SeeOperators(self._see)

    def backward(self) -> Any:
        """A context for the backward of a loss that is finite."""
        self._is_forward = False
        return SeeOperators(self._see)

    def end_of_forward(self, loss: Tensor) -> None:
        """What reaches the loss was not taken back."""
        if is_bad(loss):
            self.found = (
                self._candidates[0]
                if self._candidates
                else NonFinite(
                    self.rank,
                    "forward",
                    "",
                    about="the loss is not finite, and no operator has made that of finite numbers:"
                    " a buffer or an argument of the model holds infinity",
                    position=self._position,
                )
            )
        self._candidates.clear()

    # -- modules

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        self._inside.append(name)
        for tensor in _floating(args):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(_calls(self._end_backward, name))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None or name not in self._inside:
            return
        while self._inside.pop() != name:
            pass
        for tensor in _floating(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(_calls(self._begin_backward, name))
        if self._is_forward and not any(map(is_bad, _floating(output))):
            inside = f"{name}." if name else ""
            self._candidates = [
                one
                for one in self._candidates
                if not (one.name == name or one.name.startswith(inside))
            ]

    def _begin_backward(self, name: str) -> None:
        self._begun.append(name)

    def _end_backward(self, name: str) -> None:
        if name in self._begun:
            self._begun.remove(name)

    def _module(self) -> str:
        """The module that runs: in backward, the innermost one that has begun last."""
        if self._inside or self._is_forward:  # a checkpoint repeats forwards in backward
            return self._inside[-1] if self._inside else ""
        return max(reversed(self._begun), key=lambda name: name.count("."), default="")

    # -- operators

    def _see(
        self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._position += 1
        if self.found is not None or operator.namespace in _UNDERWAY:
            return
        with without_torch_function():
            bad = [tensor for tensor in _floating(result) if is_bad(tensor)]
            if not bad or _asks_for_it((args, kwargs)):
                return
            read = list(_floating((args, kwargs)))
            written = {id(tensor) for tensor in bad}  # in place: nobody knows what was there
            if any(is_bad(tensor) for tensor in read if id(tensor) not in written):
                return
            one = NonFinite(
                self.rank,
                "forward" if self._is_forward else "backward",
                self._module(),
                str(operator.name()).replace("::", "."),
                _told(bad[0], [tensor for tensor in read if id(tensor) not in written]),
                user_line_of(sys._getframe()) if self._is_forward else "",
                self._position,
            )
        if self._is_forward:
            self._candidates.append(one)
        else:
            self.found = one


def _calls(function: Any, name: str) -> Any:
    """A hook on a gradient."""

    def hook(gradient: Tensor) -> None:
        function(name)

    return hook


def _floating(values: Any) -> Iterator[Tensor]:
    """The tensors of numbers among values."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf


def _here(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _num_bad(tensor: Tensor) -> int:
    with torch.no_grad(), without_torch_function():
        return int((~torch.isfinite(_here(tensor))).sum())


def _asks_for_it(arguments: Any) -> bool:
    """Whether somebody writes infinity, as into a mask; or memory that nothing was written to."""
    numbers = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, float)]
    reads = any(True for _ in _floating(arguments))
    return not reads or not all(map(math.isfinite, numbers))


def _told(bad: Tensor, read: list[Tensor]) -> str:
    """How many numbers, and of which."""
    dtype = str(bad.dtype).removeprefix("torch.")
    here = _here(bad)
    what = "NaN" if bool(torch.isnan(here).any()) else "infinity"
    text = f"{what} ({count_bad(bad)}, {dtype}{list(here.shape)})"
    sizes = [
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} up to {t.detach().abs().max():.3g}"
        for t in map(_here, read[:3])
        if t.numel()
    ]
    return f"{text} of {', '.join(sizes)}" if sizes else text
