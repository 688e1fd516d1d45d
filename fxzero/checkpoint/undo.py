"""What a run was before a checkpoint was loaded into it, should another rank not take its own.

    before    copies of this rank's parts, where the host has room for them
    restore   back into the tensors that are there now, below every hook, as those may have refused

An optimizer that loads as torch's do takes other tensors in place of its own, which then are as
they were. Models that load as torch's do, beside such optimizers on all ranks, refuse nothing of
what was compared before, and load last. Of neither are there copies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxzero._compat import has_load_hooks, load_hooks, set_versions, version_of
from fxzero.checkpoint import by_name, large_pages
from fxzero.checkpoint.staging import local_part
from fxzero.checkpoint.state import TrainState
from fxzero.cost.resources import available_bytes
from fxzero.sharding.shard_state import take_rows

_NAMES = ("params",)
_LOADS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""What of a module runs when it loads."""


class Before:
    """A model and its optimizer as they are now.

    Args:
        state: of which the parts are left alone.
        ranks_here: how many ranks share this host's memory at most.
        with_model: whether a rank's model or optimizer may refuse what fits, or write to a model
            that the other ranks leave: see `only_copies`.
    """

    def __init__(self, state: TrainState, ranks_here: int, *, with_model: bool) -> None:
        self._state = state
        optimizer = state.optimizer
        self._of_optimizer = _written_by(state.model, optimizer)
        self._with_model = with_model
        tensors = {**self._of_model(), **self._of_optimizer}
        kept = tensors if self._with_model else self._of_optimizer
        self._parts = {name: local_part(tensor) for name, tensor in kept.items()}
        num_bytes = sum(part.nbytes for part in self._parts.values())
        self._has_room = 2 * num_bytes * ranks_here < available_bytes()
        self._copying: Future[dict[str, Tensor]] | None = None
        self._versions = {tensor: version_of(tensor) for tensor in tensors.values()}
        self._extra = {
            name: copy.deepcopy(value)
            for name, value in by_name.model_state(state.model).items()
            if not isinstance(value, Tensor)
        }
        self._groups: list[dict[str, Any]] = [
            {key: value for key, value in group.items() if key not in _NAMES}
            for group in (optimizer.param_groups if optimizer is not None else [])
        ]
        self._states: Any = optimizer.state if optimizer is not None else {}
        self._values = [(key, own, dict(own)) for key, own in self._states.items()]
        """Of each parameter its state, and what was in it."""

    def copy(self) -> None:
        """Begin with the copies, once, in a thread: a rank that reads waits for its disk."""
        if not self._has_room or self._copying is not None:
            return
        if all(part.is_cpu for part in self._parts.values()):
            with_one = ThreadPoolExecutor(1)
            self._copying = with_one.submit(_copies_of, self._parts)
            with_one.shutdown(wait=False)
        else:  # behind what is under way on the caller's stream
            self._copying = Future()
            try:
                self._copying.set_result(_copies_of(self._parts))
            except Exception as error:
                self._copying.set_exception(error)

    def wait(self) -> None:
        """Until all of it is kept: nothing may be changed before."""
        if self._copying is not None and self._copying.exception() is not None:
            self._copying = None  # no reason not to load, and none to try again
            self._has_room = False

    def restore(self) -> bool:
        """Let everything be as it was; false if that cannot be: there was no room to keep it, or a
        tensor has become another one."""
        if self._copying is None:
            return False
        optimizer = self._state.optimizer
        if optimizer is not None:
            optimizer.state = self._states
            self._states.clear()
            for key, own, values in self._values:
                own.clear()
                own.update(values)
                self._states[key] = own
            for group, before in zip(optimizer.param_groups, self._groups, strict=True):
                for key in [k for k in group if k not in before and k not in _NAMES]:
                    del group[key]
                group.update(before)
        for name, value in self._extra.items():
            self._state.model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        tensors = {**self._of_model(), **self._of_optimizer}
        is_whole = self._with_model or all(
            self._versions.get(tensor) == version_of(tensor) for tensor in self._of_model().values()
        )
        with torch.no_grad():
            for name, kept in self._copying.result().items():
                part = local_part(tensors[name])
                if (part.shape, part.dtype) == (kept.shape, kept.dtype):
                    part.copy_(kept)
                else:
                    is_whole = False
        # Ranks that have loaded, and those that have not, count as often written to.
        set_versions(self._versions)
        return is_whole

    def _of_model(self) -> dict[str, Tensor]:
        """The model's tensors, those that are there now."""
        found = by_name.model_state(self._state.model).items()
        return {f"model.{name}": value for name, value in found if isinstance(value, Tensor)}


def _written_by(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The tensors of an optimizer's state that it may write into where it loads another."""
    if optimizer is None or replaces_tensors(optimizer):
        return {}
    return {
        f"optimizer.{name}.{key}": value
        for name, own in by_name.optimizer_state(model, optimizer)["state"].items()
        for key, value in own.items()
        if isinstance(value, Tensor)
    }


def only_copies(state: TrainState) -> bool:
    """Whether nobody's code but torch's runs when a model and its optimizer are loaded: neither
    refuses what fits, and in which order they load is of no matter."""
    takes = state.optimizer is None or replaces_tensors(state.optimizer)
    return takes and takes_what_fits(state.model)


def takes_what_fits(model: nn.Module) -> bool:
    """Whether a model that loads tensors of its own sizes does nothing but copy them: all of its
    modules load as torch's do, and nobody else's code runs meanwhile."""
    return all(map(_loads_as_torch_does, model.modules())) and all(
        type(tensor).__module__.startswith(("torch.", "fxzero.")) or type(tensor) is Tensor
        for tensor in (*model.parameters(), *model.buffers())
    )


def _loads_as_torch_does(module: nn.Module) -> bool:
    own = type(module)
    are_torchs = all(
        name not in vars(module)
        and str(getattr(getattr(own, name), "__module__", "")).startswith("torch.nn.")
        for name in _LOADS
    )
    return are_torchs and all(hook is take_rows for hook in load_hooks(module))


def _copies_of(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies = large_pages.empty({name: (part.shape, part.dtype) for name, part in parts.items()})
    with torch.no_grad():
        for name, part in parts.items():
            copies[name].copy_(part)
    return copies


def replaces_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer that loads a state dict leaves the tensors of its state as they are: one
    of torch's own does, and nobody else's code runs meanwhile."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return is_torchs and not has_load_hooks(optimizer) and "load_state_dict" not in vars(optimizer)
