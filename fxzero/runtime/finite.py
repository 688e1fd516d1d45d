"""Say which gradients were not finite, a step late, so that no device is waited for.

    step n      norm → copied to the host behind the step's own work
    step n + 1  is the copy there? then look at it

A norm that is computed anyway (to clip) costs nothing to look at; a NaN that nobody looks at
leaves every parameter NaN, and a run that ends as if all were well.
"""

from __future__ import annotations

import atexit
import logging
import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fxzero._compat import is_fake

log = logging.getLogger("fxzero")

_living: weakref.WeakSet[Finite] = weakref.WeakSet()


class Finite:
    """The node that passes on the total norm, and looks at the one of the step before.

    Args:
        names: the parameters, in the order of their norms.
    """

    __module__ = "fxzero.runtime.finite"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.num_steps = 0
        self.num_bad = 0
        self._pending: list[tuple[int, Tensor, torch.cuda.Event | None]] = []
        """Steps whose norms nobody has looked at: the total, then each parameter's."""
        self.__name__ = self.__qualname__ = "report_unless_finite"
        _living.add(self)

    @property
    def as_code(self) -> str:
        """An expression for another one like it."""
        return f"fxzero.runtime.finite.Finite({self.names!r})"

    def __call__(self, total: Tensor, norms: Tensor) -> Tensor:
        """Pass on the total norm.

        Args:
            total: of all gradients, on all ranks; 0-d.
            norms: of this rank's part of each gradient: (n,).
        """
        if is_fake(total) or (total.is_cuda and torch.cuda.is_current_stream_capturing()):
            return total
        self.look()
        self.num_steps += 1
        numbers = torch.cat([total.detach().reshape(1), norms.detach().to(total.dtype)])
        event = None
        if total.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending.append((self.num_steps, numbers, event))
        return total

    def look(self) -> None:
        """Look at the norms that have arrived."""
        while self._pending:
            step, numbers, event = self._pending[0]
            if event is not None and not event.query():
                return
            self._pending.pop(0)
            total, *norms = numbers.tolist()
            if not math.isfinite(total):
                self.num_bad += 1
                if self.num_bad & (self.num_bad - 1) == 0:  # the 1st, 2nd, 4th, … time
                    log.warning("%s", self.message(step, total, norms))

    def message(self, step: int, total: float, norms: list[float]) -> str:
        """What is said of a step."""
        bad = [n for n, v in zip(self.names, norms, strict=True) if not math.isfinite(v)]
        shown = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        again = f" ({self.num_bad} such steps so far)" if self.num_bad > 1 else ""
        return (
            f"in step {step} of this graph the norm of all gradients was {total}{again}: "
            f"{f'not finite in {shown}' if bad else 'another rank holds the parts not finite'}. "
            "The parameters were updated by it. Look at the batch and at the learning rate; "
            "options={'stop_unless_finite': True} stops before anything is changed."
        )


@atexit.register
def _look_at_the_last() -> None:
    """A run's last step has no step after it."""
    for finite in list(_living):
        finite.look()
