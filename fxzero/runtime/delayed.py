"""Updates that run one step late, beside the forward and backward of the next step.

    step n      A0 … gradients g_n arrive on the host, and wait there
    step n+1    start: update(g_n) ─────────────┐ host
                A, A_backward read copies       │ compute: of before that update
                … g_n+1; the copies are renewed ┘ behind it

ZeRO-Offload's delayed parameter update (Ren et al. 2021, section 5.2): an update that takes as long
as forward and backward costs nothing. Between two steps nothing runs: what somebody reads or writes
then is a model whose last gradients are still to be used. They are used before a state dict is made
of it, and forgotten where one is loaded.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxzero._compat import call_before_steps, is_fake
from fxzero.graph.stamps import Lane
from fxzero.runtime.lanes import worker
from fxzero.runtime.updates import Group, Lists

log = logging.getLogger("fxzero")


@dataclass
class Gradients:
    """What an update still has to use."""

    grads: list[Tensor]
    group: Group
    """The parameter group as it was in their step."""
    scale: Tensor | None
    skip: Tensor | None
    params: list[Tensor]
    state: Lists


NUM_STEPS = "num_steps_with_delay"
"""In an optimizer's groups, once a state dict was made of it: how many steps it has seen, of which
the first `delay_after` were not late. So that whoever goes on from there goes on counting."""


class Pending:
    """One update of an optimizer, and what it has left for the next step."""

    def __init__(self, kernel: Callable[..., None], optimizer: Optimizer | None = None) -> None:
        self.kernel = kernel
        self.gradients: Gradients | None = None
        self.num_steps: int | None = None
        """How often it was given gradients; None until somebody asks, as a state dict may say."""
        self.after = 0
        """Steps that are not late."""
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self.running: Future[Any] = Future()
        """The last one that was started."""
        self.running.set_result(None)

    def count(self) -> int:
        """Count a step: how many there were."""
        if self.num_steps is None:
            optimizer = self._optimizer() if self._optimizer is not None else None
            groups = optimizer.param_groups if optimizer is not None else []
            self.num_steps = max((int(group.get(NUM_STEPS, 0)) for group in groups), default=0)
        self.num_steps += 1
        return self.num_steps

    def start(self, params: list[Tensor], state: Lists, behind: Future[Any] | None = None) -> None:
        """Start using what is left, on parameters and state as they are now."""
        left, self.gradients = self.gradients, None
        if left is None:
            return

        def run() -> None:
            if behind is not None:
                behind.result()
            self.kernel(params, left.grads, state, left.group, left.scale, left.skip)

        self.running = worker(Lane.HOST).submit(run)


class StartUpdate:
    """The node that starts what the step before has left: on the host's lane, once the copies that
    compute reads were seen to be those of the parameters."""

    __module__ = "fxzero.runtime.delayed"

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.__name__ = self.__qualname__ = "start_update"

    def __call__(self, params: list[Tensor], state: Lists) -> Future[Any]:
        """Start it; what is returned is done when it is."""
        if self.pending.gradients is not None and not any(map(is_fake, params)):
            looked_at = worker(Lane.H2D).submit(lambda: None)  # behind `Resident.take`
            self.pending.start(params, state, looked_at)
        return self.pending.running


class LateUpdate:
    """An update on the host that leaves its gradients to the next step, from some step on."""

    __module__ = "fxzero.runtime.delayed"
    runs_on_host = True

    def __init__(self, pending: Pending, after: int) -> None:
        self.pending = pending
        pending.after = after
        self.__name__ = self.__qualname__ = f"late_{pending.kernel.__name__}"

    def __call__(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: Lists,
        group: Group,
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> Future[Any]:
        """Leave them; what is returned is done when the update before is."""
        pending = self.pending
        if any(map(is_fake, params)):
            pending.kernel(params, grads, state, group, scale, skip)
            return pending.running
        num_steps = pending.count()
        now = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        pending.gradients = Gradients(grads, now, scale, skip, params, state)
        if num_steps <= pending.after:
            pending.start(params, state)
        return pending.running

    def __repr__(self) -> str:
        return self.__name__


_Known = dict[tuple[str, ...], Pending]
_pending: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_ran_last: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()


def pending_of(optimizer: Optimizer, keys: tuple[str, ...], kernel: Callable[..., None]) -> Pending:
    """An optimizer's update of some parameters: one for all of its graphs."""
    known = _pending.setdefault(optimizer, {})
    found = known.get(keys)
    if found is None or found.kernel is not kernel:
        found = known[keys] = Pending(kernel, optimizer)
    return found


def use_gradients(optimizer: Optimizer) -> None:
    """Run the updates that the last step has left, and wait for them."""
    counts = [p.num_steps for p in _pending.get(optimizer, {}).values() if p.after and p.num_steps]
    for group in optimizer.param_groups if counts else []:
        group[NUM_STEPS] = max(counts)
    left = [p for p in _pending.get(optimizer, {}).values() if p.gradients is not None]
    with torch.no_grad():
        for pending in left:
            assert pending.gradients is not None
            pending.start(pending.gradients.params, pending.gradients.state)
    for pending in left:
        pending.running.result()


def drop_gradients(optimizer: Optimizer) -> None:
    """Forget what the last step has left: other parameters, or another state, have come."""
    for pending in _pending.get(optimizer, {}).values():
        pending.num_steps = None  # the state that comes may say it
    left = [p for p in _pending.get(optimizer, {}).values() if p.gradients is not None]
    for pending in left:
        pending.gradients = None
    if left:
        log.warning(
            "the last step's gradients were to be used by the next one (offload_states.delay=1), "
            "and are dropped: a state dict was loaded"
        )


def begin_run(optimizer: Optimizer, graph: object) -> None:
    """A graph is about to run. Where another one ran before, its gradients are used first: they
    lie where this one's may arrive."""
    if _ran_last.get(optimizer) is not graph:
        use_gradients(optimizer)
        _ran_last[optimizer] = graph


class _Hook:
    """Does something to an optimizer's gradients before a state dict is made, or loaded."""

    def __init__(self, optimizer: Optimizer | None, does: Callable[[Optimizer], None]) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._does = does

    def __call__(self, *_: Any, **__: Any) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            self._does(optimizer)

    def __reduce__(self) -> Any:
        """A copied model has no gradients that wait."""
        return _Hook, (None, self._does)


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_state_dicts(model: nn.Module, optimizer: Optimizer) -> None:
    """Use gradients before a state dict of a model or its optimizer is made, and forget them where
    one is loaded; asked for again, nothing happens."""
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    for owner in (model, optimizer):
        owner.register_state_dict_pre_hook(_Hook(optimizer, use_gradients))
        owner.register_load_state_dict_pre_hook(_Hook(optimizer, drop_gradients))
    call_before_steps(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Somebody calls ``optimizer.step()`` himself."""
    use_gradients(optimizer)
